"""`python -m agentenv.cli` is `aenv`."""

from agentenv.cli.main import app

app()
