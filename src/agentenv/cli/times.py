"""Instants as people read them: how far away, or what the clock says then."""

from datetime import UTC, datetime, timedelta
from typing import Final

UNITS: Final = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
NEVER: Final = timedelta(days=36500 // 2)  # the API gives what has no end an end a century on


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
