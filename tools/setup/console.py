"""What set-up shows, and how it runs a command: log in a file, one moving line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

TICK_S = 0.2
PLAIN_LINE_EVERY_S = 20.0
LIMIT_S = 2400.0
TAIL_LINES = 25
LINE_CHARACTERS = 100
UNREACHABLE = re.compile(
    r"could ?n[o']t resolve|temporary failure (in name )?resolv|name or service not known|network is unreachable"
    r"|connection (timed out|refused|reset)|failed to establish a new connection|no route to host|proxy tunnel"
    r"|failed to (download|fetch|get successful)|unable to connect|read timed out|certificate verify failed",
    re.IGNORECASE,
)


class SetupError(Exception):
    """Set-up cannot go on; the message says what is missing, the hint what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def run(
    what: str, registry: str, command: list[str], log: Path, *, cwd: Path, env: dict[str, str] | None = None
) -> None:
    """Run *command* to its end, its output in *log*. Raises `SetupError` with the last of it when it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("wb") as out:
        child = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _watch(child, what, log, started)
    except BaseException:
        _kill_group(child)
        raise
    if child.returncode != 0:
        raise _failure(what, registry, child.returncode, log)
    say(f"  {what}: {time.monotonic() - started:.0f} s")


def _watch(child: subprocess.Popen[bytes], what: str, log: Path, started: float) -> None:
    moving = sys.stderr.isatty()
    told = started
    while True:
        try:
            child.wait(TICK_S)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            if now - started > LIMIT_S:
                raise SetupError(f"{what} did not end within {LIMIT_S / 60:.0f} minutes", f"see {log}") from None
            if moving:
                _moving_line(f"  {what}: {now - started:.0f} s  {_last_line(log)}")
            elif now - told > PLAIN_LINE_EVERY_S:
                told = now
                say(f"  {what}: {now - started:.0f} s so far; {_last_line(log)}")
        else:
            if moving:
                _moving_line("")
            return


def _moving_line(text: str) -> None:
    sys.stderr.write("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1])
    sys.stderr.flush()


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 4000))
        lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip()[:LINE_CHARACTERS] for line in reversed(lines) if line.strip()), "")


def _failure(what: str, registry: str, status: int, log: Path) -> SetupError:
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    shown = "\n".join(f"    {line}" for line in lines)
    if any(UNREACHABLE.search(line) for line in lines):
        return SetupError(
            f"{what} failed: the registry ({registry}) cannot be reached\n{shown}",
            "check the network, the proxy settings, and try again",
        )
    return SetupError(f"{what} failed with status {status}\n{shown}", f"the whole of it is in {log}")


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()
