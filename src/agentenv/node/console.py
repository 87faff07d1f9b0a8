"""The guest's console as log lines. The driver keeps the file within bounds."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from agentenv.model.errors import NotFound
from agentenv.model.ids import SandboxId
from agentenv.node.contract import LogLine

if TYPE_CHECKING:
    from agentenv.node.host import Host

CONSOLE = "console.log"
FOLLOW_EVERY_S = 0.5
MAX_READ_BYTES = 4 << 20
LEVELS = frozenset({"debug", "info", "warn", "error"})


async def tail(run_dir: Path, limit: int) -> list[LogLine]:
    """The last *limit* lines; none for a sandbox that has no VM now."""
    return await asyncio.to_thread(_read_lines, run_dir / CONSOLE, limit)


async def follow(host: "Host", sandbox_id: SandboxId) -> AsyncIterator[LogLine]:
    """Lines as they come, until the sandbox is deleted; a pause only makes it wait."""
    position = 0
    generation = None
    while True:
        try:
            sandbox = host.registry.get(sandbox_id)
        except NotFound:
            return
        if sandbox.generation != generation:
            position, generation = 0, sandbox.generation
        lines, position = await asyncio.to_thread(_read_from, host.run_dir(sandbox) / CONSOLE, position)
        for line in lines:
            yield line
        await host.clock.sleep(FOLLOW_EVERY_S)


def _read_lines(path: Path, limit: int) -> list[LogLine]:
    lines, _ = _read_from(path, max(0, _size(path) - MAX_READ_BYTES))
    return lines[-limit:] if limit > 0 else []


def _read_from(path: Path, position: int) -> tuple[list[LogLine], int]:
    try:
        with path.open("rb") as file:
            if position > _size(path):
                position = 0  # trimmed since
            file.seek(position)
            data = file.read(MAX_READ_BYTES)
            written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except FileNotFoundError:
        return [], 0
    whole = data[: data.rfind(b"\n") + 1]
    if not whole and len(data) == MAX_READ_BYTES:
        whole = data  # a guest may never end a line; whoever follows it goes on
    texts = whole.decode(errors="replace").splitlines()
    return [_line(text, written) for text in texts if text.strip()], position + len(whole)


def _line(text: str, written: datetime) -> LogLine:
    """A console line has no time of its own; lines of the agent are JSON and do. A guest writes what it likes."""
    try:
        match json.loads(text):
            case {"timestamp": str(timestamp), "level": str(level), "message": str(message)} if level in LEVELS:
                said = datetime.fromisoformat(timestamp)
                return LogLine(said if said.tzinfo else said.replace(tzinfo=UTC), level, message)
    except (ValueError, RecursionError):
        pass
    return LogLine(timestamp=written, level="info", message=text.rstrip("\r"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
