"""What every command shares: the server that the global options name, opened when first needed."""

from dataclasses import dataclass

import typer

from agentenv.cli.client import Client, resolve_target


@dataclass(slots=True)
class Connection:
    """The global options, and the client made from them."""

    url: str | None = None
    api_key: str | None = None
    client: Client | None = None


def client_of(context: typer.Context) -> Client:
    """The client of this run; made at the first call, since `aenv doctor` needs no server."""
    connection = context.ensure_object(Connection)
    if connection.client is None:
        connection.client = Client(resolve_target(connection.url, connection.api_key))
        context.call_on_close(connection.client.close)
    return connection.client
