"""The jumping clock wakes who is due, in order; the system clock is what it says."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from agentenv.aio.clock import Clock, SystemClock
from agentenv.aio.tasks import Tasks
from agentenv.testing.clock import START, JumpingClock


async def test_sleepers_wake_in_the_order_of_their_instants() -> None:
    clock = JumpingClock()
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.monotonic()))

    async with Tasks("sleepers") as tasks:
        for name, seconds in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("b2", 2.0), ("late", 9.0)):
            tasks.start(name, sleeper(name, seconds))
        await clock.wait_sleepers(5)
        await clock.advance(5)

        assert woken == [("a", 1.0), ("b", 2.0), ("b2", 2.0), ("c", 3.0)]
        assert clock.sleepers == 1
        assert clock.monotonic() == 5.0
        assert repr(clock) == "<JumpingClock at 2026-01-01T00:00:05+00:00, 1 asleep>"


async def test_a_loop_that_sleeps_again_wakes_as_often_as_time_allows() -> None:
    clock = JumpingClock()
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await clock.sleep(10)
            ticks.append(clock.monotonic())

    async with Tasks("ticks") as tasks:
        tasks.start("tick", tick())
        await clock.advance(35)

    assert ticks == [10.0, 20.0, 30.0]


async def test_a_cancelled_sleeper_is_not_woken() -> None:
    clock = JumpingClock()
    async with Tasks("sleepers") as tasks:
        tasks.start("sleeper", clock.sleep(1))
        await clock.wait_sleepers(1)
    assert clock.sleepers == 0

    await clock.advance(2)

    assert clock.monotonic() == 2.0


async def test_a_stepped_wall_clock_moves_instants_but_not_lengths() -> None:
    clock = JumpingClock()
    async with Tasks("sleepers") as tasks:
        until = tasks.start("until", clock.sleep_until(START + timedelta(hours=1)))
        length = tasks.start("length", clock.sleep(3600))
        await clock.wait_sleepers(2)

        await clock.step_wall(-1800)
        await clock.advance(3600)
        assert length.done()
        assert not until.done()

        await clock.step_wall(1800)
        assert until.done()
        assert clock.now() == START + timedelta(hours=1)


async def test_no_time_at_all_still_lets_others_run() -> None:
    clock = JumpingClock()
    ran = asyncio.Event()

    async def other() -> None:
        ran.set()

    async with Tasks("other") as tasks:
        tasks.start("other", other())
        await clock.sleep(0)
    await clock.sleep_until(START - timedelta(days=1))
    assert ran.is_set()


async def test_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="does not go back"):
        await JumpingClock().advance(-1)


async def test_the_system_clock_is_aware_and_monotonic() -> None:
    clock: Clock = SystemClock()

    before = clock.monotonic()
    await clock.sleep(0.001)
    await clock.sleep_until(clock.now() + timedelta(milliseconds=1))
    await clock.sleep_until(datetime(2000, 1, 1, tzinfo=UTC))

    assert clock.monotonic() > before
    assert clock.now().tzinfo is UTC
