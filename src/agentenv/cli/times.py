"""Time as people read and write it: an instant as how far away or what the clock says then, a length as ``1h30m``."""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

import typer

UNITS: Final = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
NEVER: Final = timedelta(days=36500 // 2)  # the API gives what has no end an end a century on

DURATION: Final = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")
DURATION_NAME: Final = "DURATION"  # in help


def parse_duration(text: str) -> int:
    """Seconds of ``90``, ``90s``, ``5m``, ``1h30m`` or ``1d``; `typer.BadParameter` for anything else."""
    match = DURATION.fullmatch(text.strip())
    if not match or not any(match.groups()):
        raise typer.BadParameter(no_duration(text))
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + seconds


def no_duration(text: str) -> str:
    return f"{text!r} is not a length of time like 90, 90s, 5m, 1h30m or 1d"


def brief(instant: str, now: datetime | None = None) -> str:
    """``2m ago`` or ``in 18m`` for an RFC 3339 *instant*; ``-`` for one that never comes, and no instant as it is."""
    away = _parsed(instant)
    if away is None:
        return instant
    distance = away - (now or datetime.now(UTC))
    if distance > NEVER:
        return "-"
    seconds = round(abs(distance.total_seconds()))
    unit, length = next(((unit, length) for unit, length in UNITS if seconds >= length), UNITS[-1])
    text = f"{seconds // length}{unit}"
    return f"in {text}" if distance > timedelta(0) else f"{text} ago"


def clock(instant: str, now: datetime | None = None) -> str:
    """The local time of *instant*, with the date where that is not today's; what is no instant as it is."""
    when = _parsed(instant)
    if when is None:
        return instant
    when, today = when.astimezone(), (now or datetime.now(UTC)).astimezone().date()
    return f"{when:%H:%M:%S}" if when.date() == today else f"{when:%Y-%m-%d %H:%M:%S}"


def _parsed(instant: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(instant)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
