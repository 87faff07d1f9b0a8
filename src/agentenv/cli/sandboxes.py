"""Commands on sandboxes."""

from typing import Annotated, Any
from urllib.parse import quote, urlencode

import httpx
import typer

from agentenv.cli import process
from agentenv.cli.client import USAGE, CliError, told
from agentenv.cli.context import client_of
from agentenv.cli.hints import NO_TERMINAL
from agentenv.cli.output import complain, fields, for_people, out, plain, print_json, say, show, working
from agentenv.cli.times import DURATION_NAME, brief, clock, parse_duration

COLUMNS = (
    ("SANDBOX", "sandboxID"),
    ("TEMPLATE", "alias"),
    ("STATE", "state"),
    ("STARTED", "startedAt"),
    ("ENDS", "endAt"),
    ("CPU", "cpuCount"),
    ("MIB", "memoryMB"),
    ("METADATA", "metadata"),
)
WIDE = 100  # columns of a terminal that has room for all of them, with an id in one piece
Json = Annotated[bool, typer.Option("--json", help="JSON also on a terminal.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Ids only, one a line, also when piped.")]
COMPLETION_TIMEOUT = httpx.Timeout(2.0)  # of each step; somebody has pressed Tab and waits


def complete_sandbox(context: typer.Context, incomplete: str) -> list[str]:
    """Ids of the sandboxes there are; nothing when the server cannot be asked quickly."""
    try:
        sandboxes = client_of(context).pages("v2", "sandboxes", timeout=COMPLETION_TIMEOUT)
        return [s["sandboxID"] for s in sandboxes if s["sandboxID"].startswith(incomplete)]
    except CliError:
        return []


SandboxId = Annotated[
    str, typer.Argument(help="Id of the sandbox.", autocompletion=complete_sandbox, show_default=False)
]


Duration = Annotated[
    int,
    typer.Option(
        "--timeout", "-t", parser=parse_duration, metavar=DURATION_NAME, help="Time to live: 90, 5m, 1h30m, 1d."
    ),
]


def pairs(values: list[str] | None, what: str) -> dict[str, str]:
    """``["a=1"]`` as ``{"a": "1"}``."""
    found = {}
    for value in values or []:
        name, separator, text = value.partition("=")
        if not separator or not name:
            raise typer.BadParameter(f"{what} {value!r} is not NAME=VALUE")
        found[name] = text
    return found


def complete_template(context: typer.Context, incomplete: str) -> list[str]:
    """Names of the templates there are; nothing when the server cannot be asked quickly."""
    try:
        templates = client_of(context).pages("v2", "templates", timeout=COMPLETION_TIMEOUT)
        return [name for one in templates for name in one["names"] if name.startswith(incomplete)]
    except CliError:
        return []


def start(
    context: typer.Context,
    template: Annotated[
        str, typer.Argument(help="Template or snapshot: name or id.", autocompletion=complete_template)
    ] = "base",
    timeout: Duration = "5m",  # type: ignore[assignment]
    metadata: Annotated[list[str] | None, typer.Option("--metadata", "-m", help="NAME=VALUE, repeatable.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE, repeatable.")] = None,
    auto_pause: Annotated[bool, typer.Option(help="Pause, rather than kill, at the end.")] = False,
    auto_resume: Annotated[bool, typer.Option(help="Let traffic wake it when it is paused.")] = False,
    internet: Annotated[bool, typer.Option(help="Let it reach the internet.")] = True,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Start a sandbox and print its id; when piped, all about it as JSON, unless -q."""
    body: dict[str, Any] = {
        "templateID": template,
        "timeout": timeout,
        "metadata": pairs(metadata, "metadata"),
        "envVars": pairs(env, "variable"),
        "autoPause": auto_pause,
        "autoResume": {"enabled": auto_resume},
    }
    if not internet:
        body["allow_internet_access"] = False
    with working(f"starting {template}"):
        sandbox = client_of(context).call("POST", "v2", "sandboxes", json=body)
    if quiet or (for_people() and not as_json):
        print(sandbox["sandboxID"])
    else:
        print_json(sandbox)


def list_sandboxes(
    context: typer.Context,
    state: Annotated[str | None, typer.Option(help="running, paused, or both with a comma.")] = None,
    metadata: Annotated[list[str] | None, typer.Option("--metadata", "-m", help="NAME=VALUE that must match.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """List sandboxes."""
    params = {"state": state} if state else {}
    if wanted := pairs(metadata, "metadata"):
        params["metadata"] = urlencode({quote(k, safe=""): quote(v, safe="") for k, v in wanted.items()})
    sandboxes = client_of(context).pages("v2", "sandboxes", params=params)
    if quiet:
        for sandbox in sandboxes:
            print(sandbox["sandboxID"])
    else:
        table = not as_json and for_people()
        dropped: tuple[str, ...] = ("metadata",)
        if any(one.get("metadata") for one in sandboxes):
            dropped = ("cpuCount", "memoryMB") if out.width < WIDE else ()
        columns = [(title, key) for title, key in COLUMNS if key not in dropped]
        show([_row(one) for one in sandboxes] if table else sandboxes, columns, as_json=as_json)


def _row(sandbox: dict[str, Any]) -> dict[str, Any]:
    """*sandbox* as the table has it: times as distances, and the exact state, as one in error is "paused" to E2B."""
    state = sandbox.get("lifecycleState") or sandbox.get("state")
    times = {key: brief(sandbox[key]) for key in ("startedAt", "endAt") if sandbox.get(key)}
    return {**sandbox, "state": state, **times}


def info(
    context: typer.Context,
    sandbox_id: SandboxId,
    secrets: Annotated[bool, typer.Option("--show-secrets", help="Tokens too; JSON always has them.")] = False,
    as_json: Json = False,
) -> None:
    """Show one sandbox: a line for each fact, its tokens hidden; when piped, all about it as JSON."""
    detail = client_of(context).call("GET", "sandboxes", sandbox_id)
    if for_people() and not as_json:
        fields(detail, secrets=secrets)
    else:
        print_json(detail)


def execute(
    context: typer.Context,
    sandbox_id: SandboxId,
    command: Annotated[list[str], typer.Argument(help="Program and arguments.", show_default=False)],
    user: Annotated[str | None, typer.Option("--user", "-u", help="As this user of the sandbox.")] = None,
    cwd: Annotated[str | None, typer.Option("--cwd", "-w", help="In this directory.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE, repeatable.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass standard input on.")] = False,
) -> None:
    """Run a command in a sandbox; its output and exit code are this command's own."""
    if command[:1] == ["--"]:
        command = command[1:]
    elif command and command[0].startswith("-"):
        raise CliError(
            f"{command[0]} is no program",
            hint=NO_TERMINAL
            if command[0] in ("-it", "-ti", "-t", "--tty")
            else "options go before the sandbox id; a program of that name goes after --",
            code=USAGE,
        )
    if not command:
        raise CliError("which command?", code=USAGE)
    sandbox = client_of(context).sandbox(sandbox_id)
    code = process.execute(sandbox, command, user=user, cwd=cwd, env=pairs(env, "variable"), with_input=stdin)
    raise typer.Exit(code)


def shell(
    context: typer.Context,
    sandbox_id: SandboxId,
    user: Annotated[str | None, typer.Option("--user", "-u", help="As this user of the sandbox.")] = None,
    program: Annotated[str, typer.Option("--shell", help="The shell to run.")] = "/bin/bash",
) -> None:
    """Open an interactive shell in a sandbox."""
    raise typer.Exit(process.attach_shell(client_of(context).sandbox(sandbox_id), user=user, shell=program))


def pause(context: typer.Context, sandbox_id: SandboxId) -> None:
    """Pause a sandbox: memory, processes and files are kept, and cost no CPU or memory."""
    with working("pausing"):
        client_of(context).call("POST", "sandboxes", sandbox_id, "pause", json={})
    say("paused")


def resume(context: typer.Context, sandbox_id: SandboxId, timeout: Duration = "5m") -> None:  # type: ignore[assignment]
    """Let a paused sandbox go on; of a running one, only extend its life.

    A paused one ends --timeout from now, 5m if not given, however much time was left when it was paused;
    a running one ends then or when it would have ended anyway, whichever is later.
    """
    with working("resuming"):
        client_of(context).call("POST", "v2", "sandboxes", sandbox_id, "connect", json={"timeout": timeout})
    _say_until(context, sandbox_id)


def fork(
    context: typer.Context,
    sandbox_id: SandboxId,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many children.")] = 1,
    timeout: Duration = "5m",  # type: ignore[assignment]
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Copy a running sandbox; each copy goes on from the same instant.

    Prints the ids of the copies; when piped, all about them as JSON, unless -q.
    """
    with working(f"forking into {count}"):
        children = client_of(context).call_running(
            "POST", sandbox_id, "fork", json={"count": count, "timeout": timeout}
        )
    failed = [child["error"] for child in children if child.get("error")]
    if quiet or (for_people() and not as_json):
        for child in children:
            if child.get("sandbox"):
                print(child["sandbox"]["sandboxID"])
    else:
        print_json(children)
    for error in failed:
        complain("a child failed", *told(error))
    if failed:
        raise typer.Exit(1)


def timeout(
    context: typer.Context,
    sandbox_id: SandboxId,
    duration: Annotated[str, typer.Argument(metavar=DURATION_NAME, help="From now: 90, 5m, 1h30m, 1d.")],
) -> None:
    """Set when a sandbox ends, earlier or later than now planned."""
    client_of(context).call_running("POST", sandbox_id, "timeout", json={"timeout": parse_duration(duration)})
    _say_until(context, sandbox_id)


def _say_until(context: typer.Context, sandbox_id: str) -> None:
    """Say when the sandbox ends; nothing where it has ended already, as that is no failure of what was asked."""
    try:
        ends = client_of(context).call("GET", "sandboxes", sandbox_id).get("endAt")
    except CliError:
        return
    say("running" if not ends or brief(ends) == "-" else f"running until {clock(ends)}")


def logs(
    context: typer.Context,
    sandbox_id: SandboxId,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most this many lines.")] = 200,
    as_json: Json = False,
) -> None:
    """Print the last lines of a sandbox's console: text on a terminal, a JSON list elsewhere."""
    answer = client_of(context).call("GET", "sandboxes", sandbox_id, "logs", params={"limit": limit})
    if not answer["logEntries"] and not as_json:
        say("nothing on the console since the virtual machine was started")
    if as_json or not for_people():
        print_json(answer["logEntries"])
        return
    for entry in answer["logEntries"]:
        print(f"{entry['timestamp']} {entry['level']:5} {plain(entry['message'])}")
