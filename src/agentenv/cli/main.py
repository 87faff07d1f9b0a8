"""`aenv`, the command line: which commands there are, and how a failure is told.

Exit codes: 0 done, 1 failed, 2 wrong usage; `exec` and `shell` pass on the command's own.
"""

import sys
from typing import Annotated

import typer

import agentenv
from agentenv.cli import doctor, sandboxes, server, templates
from agentenv.cli.client import CliError
from agentenv.cli.context import Connection
from agentenv.cli.output import err
from agentenv.model.errors import AgentEnvError

typer_app = typer.Typer(
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
typer_app.command("list", hidden=True)(sandboxes.list_sandboxes)
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
typer_app.command("delete")(sandboxes.delete)
typer_app.command("rm", hidden=True)(sandboxes.delete)


def app() -> None:
    """The console script."""
    try:
        typer_app()
    except (CliError, AgentEnvError) as error:
        err.print(f"[bold red]error:[/bold red] {error.message}", highlight=False, soft_wrap=True)
        if error.hint:
            err.print(f"[dim]hint: {error.hint}[/dim]", highlight=False, soft_wrap=True)
        sys.exit(error.code if isinstance(error, CliError) else 1)
    except BrokenPipeError:
        sys.exit(0)  # the reader of our output has seen enough
