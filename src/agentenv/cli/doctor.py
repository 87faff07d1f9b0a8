"""`aenv doctor`: what this host can do, and what follows from it."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from agentenv.cli.output import for_people, out

MARKS = {True: "[green]ok[/green]", None: "[yellow]limited[/yellow]", False: "[red]missing[/red]"}


def doctor(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="The server's TOML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on a terminal too.")] = False,
) -> None:
    """Examine this host. Exit code 1 if something is missing without which no sandbox runs."""
    # Imported here: every other command starts without the server's libraries.
    from agentenv.config.resolve import resolve  # noqa: PLC0415
    from agentenv.doctor import Finding, Places, examine  # noqa: PLC0415
    from agentenv.logs import only_problems  # noqa: PLC0415

    settings = resolve({}, os.environ, config).settings
    only_problems()
    findings = examine(
        Places(
            home=settings.paths.home,
            guest_dir=settings.guest_dir,
            qemu=settings.vmm.qemu_binary,
            daemon=settings.storage.daemon_binary,
            back_end=settings.storage.backend,
            ca_bundle=settings.guest.ca_bundle,
        )
    )

    def table() -> Table:
        shown = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("", "WHAT", "FOUND", "WHAT FOLLOWS"):
            shown.add_column(title, overflow="fold")
        for finding in findings:
            shown.add_row(MARKS[finding.ok], finding.name, escape(finding.detail), escape(follows(finding)))
        return shown

    def follows(finding: Finding) -> str:
        return f"{finding.consequence} ({finding.hint})" if finding.hint else finding.consequence

    missing = [finding.name for finding in findings if finding.ok is False]
    if as_json or not for_people():
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        out.print(table())
        out.print("sandboxes can run here" if not missing else f"[red]not ready:[/red] {', '.join(missing)}")
    if missing:
        raise typer.Exit(1)
