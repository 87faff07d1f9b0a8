"""A clock that stands still until a test moves it."""

import asyncio
import heapq
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Final

START: Final = datetime(2026, 1, 1, tzinfo=UTC)
_PASSES: Final = 50  # of the event loop, for what was woken to reach its next wait


@dataclass(order=True, slots=True)
class _Sleeper:
    due_s: float
    order: int
    woken: asyncio.Future[None] = field(compare=False)
    looks_at_wall: bool = field(compare=False)


class JumpingClock:
    """A `Clock` whose time passes only in `advance`.

    Sleepers wake in the order of their instants, equal ones in the order in which
    they went to sleep, and each runs to its next wait before the next one wakes.
    """

    def __init__(self, start: datetime = START) -> None:
        self._start = start
        self._elapsed_s = 0.0
        self._wall_step = timedelta()
        self._order = count()
        self._sleepers: list[_Sleeper] = []
        self._observers: list[tuple[int, asyncio.Future[None]]] = []

    def __repr__(self) -> str:
        return f"<JumpingClock at {self.now().isoformat()}, {self.sleepers} asleep>"

    def now(self) -> datetime:
        return self._start + timedelta(seconds=self._elapsed_s) + self._wall_step

    def monotonic(self) -> float:
        return self._elapsed_s

    @property
    def sleepers(self) -> int:
        """How many tasks are asleep."""
        return sum(not sleeper.woken.done() for sleeper in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
        else:
            await self._sleep(seconds, looks_at_wall=False)

    async def sleep_until(self, instant: datetime) -> None:
        while (left_s := (instant - self.now()).total_seconds()) > 0:
            await self._sleep(left_s, looks_at_wall=True)

    async def advance(self, seconds: float) -> None:
        """Let *seconds* pass, waking whoever is due on the way, and return when they have run."""
        if seconds < 0:
            raise ValueError("time does not go back; step_wall sets the wall clock")
        await self._let_others_run()
        end_s = self._elapsed_s + seconds
        while self._sleepers and self._sleepers[0].due_s <= end_s:
            sleeper = heapq.heappop(self._sleepers)
            if sleeper.woken.done():  # cancelled, or woken by a step of the wall clock
                continue
            self._elapsed_s = max(self._elapsed_s, sleeper.due_s)
            sleeper.woken.set_result(None)
            await self._let_others_run()
        self._elapsed_s = end_s
        await self._let_others_run()

    async def step_wall(self, seconds: float) -> None:
        """Set the wall clock ahead by *seconds* (back, if negative). No monotonic time passes."""
        self._wall_step += timedelta(seconds=seconds)
        for sleeper in self._sleepers:
            if sleeper.looks_at_wall and not sleeper.woken.done():
                sleeper.woken.set_result(None)
        await self._let_others_run()

    async def wait_sleepers(self, number: int) -> None:
        """Return when at least *number* tasks are asleep."""
        if self.sleepers < number:
            enough = asyncio.get_running_loop().create_future()
            self._observers.append((number, enough))
            await enough

    async def _sleep(self, seconds: float, *, looks_at_wall: bool) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, _Sleeper(self._elapsed_s + seconds, next(self._order), woken, looks_at_wall))
        asleep = self.sleepers
        for number, enough in self._observers:
            if asleep >= number and not enough.done():
                enough.set_result(None)
        self._observers = [(number, enough) for number, enough in self._observers if not enough.done()]
        await woken

    async def _let_others_run(self) -> None:
        for _ in range(_PASSES):
            await asyncio.sleep(0)
