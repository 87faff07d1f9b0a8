"""Run by Alembic, inside the transaction that `agentenv.state.migrate` has begun."""

from alembic import context

from agentenv.state.schema import metadata

# SQLite can undo DDL; Alembic assumes that it cannot, and would commit after each step.
context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
