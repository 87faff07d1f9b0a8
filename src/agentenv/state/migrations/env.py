"""Run by Alembic, inside the transaction that `agentenv.state.migrate` has begun."""

from alembic import context

from agentenv.state.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
