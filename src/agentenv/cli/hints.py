"""What other command lines understand and this one does not: still wrong usage, but told with what to do instead.

Typer tells a wrong option apart from what else was typed wrongly; what is not known here is told in Typer's own words.
"""

from typing import Any, Final

import typer

from agentenv.cli.client import USAGE, CliError
from agentenv.cli.times import DURATION_NAME, no_duration

USAGE_ERROR: Final[type[Exception]] = typer.BadParameter.__mro__[1]  # Typer exports only its heir
SPARE: Final = "a word too many"
NO_TERMINAL: Final = "for a terminal in the sandbox: aenv shell ID; exec passes standard input on with -i"
NOT_FOLLOWED: Final = "a console is printed, not followed; a file in the sandbox can be: aenv exec ID tail -f FILE"
ALL_LISTED: Final = "ls lists all of them, running and paused; for some only: --state, --metadata"
INSTEAD: Final = {
    ("exec", "-t"): NO_TERMINAL,
    ("exec", "--tty"): NO_TERMINAL,
    ("exec", "--interactive"): NO_TERMINAL,
    ("logs", "-f"): NOT_FOLLOWED,
    ("logs", "--follow"): NOT_FOLLOWED,
    ("ls", "-a"): ALL_LISTED,
    ("ls", "--all"): ALL_LISTED,
    ("fork", SPARE): "for more than one copy: aenv fork ID --count N",
    ("snapshot create", SPARE): "a name goes behind --name: aenv snapshot ID --name NAME",
}
ALIASES: Final = {"ps": "ls", "list": "ls"}
GLOBAL_VALUES: Final = {"--url": "URL", "--api-key": "KEY"}


def instead(error: Any) -> Exception:
    """The `USAGE_ERROR` *error* with a hint, where what was typed is known from elsewhere; else itself."""
    if error.ctx is None:
        return error  # type: ignore[no-any-return]
    option = getattr(error, "option_name", None)
    command = error.ctx.command_path.partition(" ")[2]
    if option in GLOBAL_VALUES:
        return _usage(error, f"it goes before the command: aenv {option} {GLOBAL_VALUES[option]} {command}")
    if command == "timeout" and option and option[1:].isdigit():
        return typer.BadParameter(no_duration(option), ctx=error.ctx, param_hint=f"'{DURATION_NAME}'")
    # Of the failures of parsing, the one of a word too many has no class of its own.
    typed = option or (SPARE if type(error) is USAGE_ERROR else "")
    hint = INSTEAD.get((ALIASES.get(command, command), typed))
    return _usage(error, hint) if hint else error


def _usage(error: Any, hint: str) -> CliError:
    return CliError(error.format_message(), hint=hint, code=USAGE)
