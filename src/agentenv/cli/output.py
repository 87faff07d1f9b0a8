"""What commands print: tables for people, JSON for programs, chosen by where it goes."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

out = Console()
err = Console(stderr=True)
# An id in two parts cannot be copied; the other columns here are narrow enough.
UNBROKEN = {"SANDBOX", "SNAPSHOT", "STATE", "STARTED", "ENDS", "CPU", "MIB", "CREATED"}
HIDDEN_ENDING = "Token"  # of the names by which the API gives what opens a sandbox
HIDDEN = "(hidden; --show-secrets)"


def for_people() -> bool:
    return sys.stdout.isatty()


def show(value: Any, columns: Sequence[tuple[str, str]], *, as_json: bool = False) -> None:
    """Print a dict or a list of dicts: the chosen (title, key) columns on a terminal, all of it as JSON elsewhere."""
    if as_json or not for_people():
        print_json(value)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for title, _ in columns:
        table.add_column(title, overflow="fold", no_wrap=title in UNBROKEN, min_width=len(title))
    for row in value if isinstance(value, list) else [value]:
        table.add_row(*(escape(plain(_cell(row.get(key)))) for _, key in columns))
    out.print(table)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def fields(value: Mapping[str, Any], *, secrets: bool = False, within: str = "") -> None:
    """A line for each thing that *value* says, on a terminal; what is in parts has a line for each of them.

    Tokens are hidden without *secrets*: a terminal is looked at by others, and kept by what records it.
    """
    for key, one in value.items():
        name = f"{within}{key}"
        match one:
            case None | "" | []:
                continue
            case dict():
                fields(one, secrets=secrets, within=f"{name}.")
                continue
            case bool():
                text = "yes" if one else "no"
            case str() if key.endswith(HIDDEN_ENDING) and not secrets:
                text = HIDDEN
            case _:
                text = _cell(one)
        out.print(f"[bold]{escape(plain(name))}[/bold]: {escape(plain(text))}", highlight=False, soft_wrap=True)


def complain(about: str, message: str, hint: str | None = None) -> None:
    """Tell of a failure, and what to do about it."""
    about, message = escape(plain(about)), escape(plain(message))
    err.print(f"[bold red]{about}:[/bold red] {message}", highlight=False, soft_wrap=True)
    if hint:
        err.print(f"[dim]hint: {escape(plain(hint))}[/dim]", highlight=False, soft_wrap=True)


def plain(text: str) -> str:
    """*text* without what a terminal obeys: a guest writes it, and may not move the cursor or set a title."""
    return "".join(one if one.isprintable() or one in "\t\n" else "\N{REPLACEMENT CHARACTER}" for one in text)


def say(message: str) -> None:
    """A remark that is not the command's output."""
    err.print(message, highlight=False)


def remark(message: str) -> None:
    """A line on what was done, for somebody who watches; nothing elsewhere, where success is silent."""
    if for_people():
        out.print(escape(plain(message)), highlight=False, soft_wrap=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner with the time while something long goes on; nothing where nobody watches."""
    with progress_bar() as progress:
        progress.add_task(what, total=None)
        yield


def progress_bar() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


def _cell(value: Any) -> str:
    match value:
        case None | "" | []:
            return "-"
        case list():
            return ", ".join(map(str, value))
        case dict():
            return " ".join(f"{key}={item}" for key, item in value.items()) or "-"
        case _:
            return str(value)
