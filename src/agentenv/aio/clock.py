"""Time as something a test can move. Nothing else in the project reads a clock to decide.

Wall-clock instants are aware UTC datetimes: they are stored, and compared after a
restart. Lengths are seconds of a monotonic clock.
"""

import asyncio
import time
from datetime import UTC, datetime
from typing import Final, Protocol

RECHECK_S: Final = 30.0


class Clock(Protocol):
    """Where the time comes from."""

    def now(self) -> datetime:
        """The wall clock, aware, in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that only grow; the start is arbitrary."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when *seconds* have passed; at once, but not before others ran, for zero or less."""
        ...

    async def sleep_until(self, instant: datetime) -> None:
        """Return when the wall clock shows *instant* or later, even if it is set meanwhile."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def sleep_until(self, instant: datetime) -> None:
        """See `Clock`. A wall clock that is set is noticed within `RECHECK_S` seconds."""
        while (left_s := (instant - self.now()).total_seconds()) > 0:
            await self.sleep(min(left_s, RECHECK_S))
