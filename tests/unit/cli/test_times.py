"""Instants as people read them."""

from datetime import UTC, datetime

import pytest

from agentenv.cli.times import brief, clock

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("instant", "text"),
    [
        ("2026-01-02T11:58:00.000Z", "2m ago"), ("2026-01-02T12:18:59.000Z", "in 18m"),
        ("2026-01-02T12:00:00Z", "0s ago"),
        ("2026-01-02T12:00:59Z", "in 59s"), ("2026-01-02T10:00:00Z", "2h ago"), ("2026-01-05T13:00:00Z", "in 3d"),
        ("2126-01-02T12:00:00Z", "-"), ("soon", "soon"),
    ],
)  # fmt: skip
def test_how_far_away(instant: str, text: str) -> None:
    assert brief(instant, NOW) == text


def test_what_the_clock_says_then() -> None:
    assert clock(NOW.isoformat(), NOW) == f"{NOW.astimezone():%H:%M:%S}"
    assert clock("2026-03-02T12:00:00Z", NOW).startswith("2026-03-02 ")
    assert clock("soon", NOW) == "soon"
