"""`aenv`, the command line: which commands there are, and how a failure is told.

Exit codes: 0 done, 1 failed, 2 wrong usage; `exec` and `shell` pass on the command's own.
"""

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import agentenv
from agentenv.cli import doctor, sandboxes, server, templates
from agentenv.cli.client import CliError
from agentenv.cli.context import Connection
from agentenv.cli.delete import delete
from agentenv.cli.hints import USAGE_ERROR, instead
from agentenv.cli.output import complain
from agentenv.model.errors import AgentEnvError


class Commands(TyperGroup):
    """A reader of our output that has seen enough (`aenv ls | head`) is no failure."""

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except USAGE_ERROR as error:
            raise instead(error) from error
        except BrokenPipeError:
            # What is still buffered has nowhere to go, and the interpreter would complain at its end.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
            raise typer.Exit(0) from None


typer_app = typer.Typer(
    cls=Commands,
    name="aenv",
    help="AgentENV: microVM sandboxes behind the E2B API.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(agentenv.__version__)
        raise typer.Exit


@typer_app.callback()
def options(
    context: typer.Context,
    url: Annotated[str | None, typer.Option("--url", help="The server; else AENV_API_URL or E2B_API_URL.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Else AENV_API_KEY or E2B_API_KEY.")] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Options that all commands take."""
    del version
    context.obj = Connection(url, api_key)


typer_app.command("server")(server.serve)
typer_app.command("doctor")(doctor.doctor)
typer_app.add_typer(templates.templates, name="template")
typer_app.command("start")(sandboxes.start)
typer_app.command("ls")(sandboxes.list_sandboxes)
typer_app.command("info")(sandboxes.info)
typer_app.command("exec", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})(
    sandboxes.execute
)
typer_app.command("shell")(sandboxes.shell)
typer_app.command("pause")(sandboxes.pause)
typer_app.command("resume")(sandboxes.resume)
typer_app.command("fork")(sandboxes.fork)
typer_app.add_typer(templates.snapshots, name="snapshot")
typer_app.command("timeout")(sandboxes.timeout)
typer_app.command("logs")(sandboxes.logs)
typer_app.command("delete")(delete)
# What people type who come from E2B's command line or from containers.
typer_app.command("create", hidden=True)(sandboxes.start)
typer_app.command("list", hidden=True)(sandboxes.list_sandboxes)
typer_app.command("ps", hidden=True)(sandboxes.list_sandboxes)
typer_app.command("kill", hidden=True)(delete)
typer_app.command("rm", hidden=True)(delete)


def app() -> None:
    """The console script."""
    try:
        typer_app(prog_name="aenv")  # also as `python -m agentenv.cli`: completion goes by this name
    except (CliError, AgentEnvError) as error:
        complain("error", error.message, error.hint)
        sys.exit(error.code if isinstance(error, CliError) else 1)
