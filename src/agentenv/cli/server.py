"""`aenv server`: run a node."""

import os
from pathlib import Path
from typing import Annotated

import typer


def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A TOML file; see docs/reference.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    home: Annotated[Path | None, typer.Option(help="Where everything durable is kept.")] = None,
) -> None:
    """Run the server in the foreground until it is told to stop; sandboxes live on."""
    # Imported here: every other command starts without the server's libraries.
    from agentenv.config.resolve import resolve  # noqa: PLC0415
    from agentenv.server import run  # noqa: PLC0415

    flags = {"server.listen_host": host, "server.listen_port": port, "paths.home": home}
    run(resolve(flags, os.environ, config))
