"""`aenv delete`, and how things are deleted that are named one by one: each is tried, and each is told of."""

from collections.abc import Iterable
from typing import Annotated

import typer

from agentenv.cli.client import USAGE, Client, CliError
from agentenv.cli.context import client_of
from agentenv.cli.output import complain, remark
from agentenv.cli.sandboxes import complete_sandbox, pairs


def delete_each(client: Client, kind: str, names: Iterable[str]) -> None:
    """Delete the *kind* (a collection of the API) called *names*; a failure stops none of the others.

    Raises `typer.Exit` once all were tried, if any failed.
    """
    code = 0
    for name in dict.fromkeys(names):
        try:
            client.call("DELETE", kind, name)
            remark(f"deleted {name}")
        except CliError as error:
            complain(name, error.message, error.hint)
            code = max(code, error.code)
    if code:
        raise typer.Exit(code)


def delete(
    context: typer.Context,
    sandbox_ids: Annotated[
        list[str] | None, typer.Argument(help="Ids.", autocompletion=complete_sandbox, show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every sandbox there is.")] = False,
    metadata: Annotated[list[str] | None, typer.Option("--metadata", "-m", help="All that match NAME=VALUE.")] = None,
) -> None:
    """Delete sandboxes, running or paused, with everything in them."""
    client = client_of(context)
    chosen = list(sandbox_ids or [])
    if everything or metadata:
        wanted = pairs(metadata, "metadata")
        found = client.pages("v2", "sandboxes")
        chosen += [one["sandboxID"] for one in found if wanted.items() <= (one.get("metadata") or {}).items()]
        if not chosen:
            remark("no sandbox to delete")
    elif not chosen:
        raise CliError("which sandbox?", hint="give ids, --metadata NAME=VALUE or --all", code=USAGE)
    delete_each(client, "sandboxes", chosen)
