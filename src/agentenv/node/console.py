"""What a guest's console said, as log lines. Pure.

A guest writes what it likes there. Lines of its agent are JSON and carry a time and a
level of their own; every other line gets those of the moment it is asked for.
"""

import json
from datetime import UTC, datetime
from typing import Final

from agentenv.node.contract import LogLine

LEVELS: Final = frozenset({"debug", "info", "warn", "error"})


def log_lines(text: str, now: datetime, limit: int) -> list[LogLine]:
    """The last *limit* lines of *text* that are not blank."""
    lines = [line.rstrip("\r") for line in text.splitlines() if line.strip()]
    return [_line(line, now) for line in lines[-limit:]] if limit > 0 else []


def _line(text: str, now: datetime) -> LogLine:
    try:
        match json.loads(text):
            case {"timestamp": str(timestamp), "level": str(level), "message": str(message)} if level in LEVELS:
                said = datetime.fromisoformat(timestamp)
                return LogLine(said if said.tzinfo else said.replace(tzinfo=UTC), level, message)
    except (ValueError, RecursionError):
        pass
    return LogLine(timestamp=now, level="info", message=text)
