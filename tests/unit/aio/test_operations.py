"""One operation per key: started once, joined by its name, waited out or cut by others."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from agentenv.aio.operations import Operations
from agentenv.aio.tasks import spawn
from agentenv.model.errors import Bug, Conflict, NoSpace, Unavailable


@pytest.fixture
async def reports() -> AsyncIterator[list[dict[str, Any]]]:
    """What the event loop complains about; must be empty in the end."""
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    yield seen
    gc.collect()
    await asyncio.sleep(0)
    assert seen == []


class Work:
    """An operation that can be observed and held."""

    def __init__(self, result: object = "done") -> None:
        self.result = result
        self.calls = 0
        self.active = 0
        self.most_active = 0
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.unwound = False

    async def __call__(self) -> object:
        self.calls += 1
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        self.begun.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.unwound = True
            raise
        finally:
            self.active -= 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


async def _passes(number: int = 10) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_the_result_comes_back_and_the_key_is_free_again() -> None:
    operations = Operations()
    work = Work(7)
    work.gate.set()

    assert await operations.run("a", "pause", work) == 7
    assert operations.current("a") is None
    assert operations.statistics().started == 1
    assert repr(operations) == "<Operations: none>"


async def test_the_same_operation_is_joined_by_a_thousand(reports: list[dict[str, Any]]) -> None:
    operations = Operations()
    work = Work("once")
    callers = [spawn("caller", operations.run("a", "pause", work)) for _ in range(1000)]
    await work.begun.wait()

    assert repr(operations) == "<Operations: pause a (1000 waiting)>"
    work.gate.set()

    assert await asyncio.gather(*callers) == ["once"] * 1000
    assert work.calls == 1
    assert operations.statistics().joined == 999
    assert operations.statistics().waiters == 0


async def test_a_failure_reaches_everyone_who_waits_and_not_the_log(
    reports: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    operations = Operations()
    work = Work(NoSpace("full"))
    callers = [spawn("caller", operations.run("a", "pause", work)) for _ in range(20)]
    await work.begun.wait()
    work.gate.set()

    outcomes = await asyncio.gather(*callers, return_exceptions=True)

    assert all(isinstance(outcome, NoSpace) for outcome in outcomes)
    assert work.calls == 1
    assert caplog.records == []


async def test_whoever_comes_as_it_ends_does_not_join_what_is_over() -> None:
    operations = Operations()
    ending = asyncio.Event()
    calls = 0

    async def step() -> int:
        nonlocal calls
        calls += 1
        ending.set()
        return calls

    async def latecomer() -> int:
        await ending.wait()
        return await operations.run("a", "pause", step)

    late = spawn("late", latecomer())
    await asyncio.sleep(0)

    assert await operations.run("a", "pause", step) == 1
    assert await late == 2


async def test_one_that_is_cancelled_before_its_first_step_frees_its_key() -> None:
    operations = Operations()
    work = Work()
    caller = spawn("caller", operations.run("a", "pause", work))
    await asyncio.sleep(0)
    operations._current["a"].task.cancel()

    with pytest.raises(Unavailable, match="was cancelled"):
        await caller

    assert operations.current("a") is None
    assert work.calls == 0


async def test_different_keys_do_not_wait_for_each_other() -> None:
    operations = Operations()
    held, free = Work(), Work()
    free.gate.set()
    waiting = spawn("held", operations.run("a", "pause", held))
    await held.begun.wait()

    assert await operations.run("b", "pause", free) == "done"

    held.gate.set()
    await waiting


@pytest.mark.parametrize("outcome", ["done", NoSpace("full")])
async def test_another_operation_waits_its_turn_whatever_the_outcome(
    outcome: object, reports: list[dict[str, Any]]
) -> None:
    operations = Operations()
    first, second = Work(outcome), Work("second")
    second.gate.set()
    pausing = spawn("pause", operations.run("a", "pause", first))
    await first.begun.wait()
    resuming = spawn("resume", operations.run("a", "resume", second))
    await _passes()
    assert second.calls == 0

    first.gate.set()

    assert await resuming == "second"
    await asyncio.wait([pausing])
    pausing.exception()


async def test_those_who_waited_the_same_way_then_share_one_operation() -> None:
    operations = Operations()
    first, second = Work(), Work("second")
    pausing = spawn("pause", operations.run("a", "pause", first))
    await first.begun.wait()
    resuming = [spawn("resume", operations.run("a", "resume", second)) for _ in range(50)]
    await _passes()

    first.gate.set()
    second.gate.set()

    assert await asyncio.gather(*resuming) == ["second"] * 50
    assert second.calls == 1
    await pausing


@pytest.mark.parametrize("passes", range(6))
async def test_a_caller_cancelled_at_any_point_leaves_the_work_going(
    passes: int, reports: list[dict[str, Any]]
) -> None:
    operations = Operations()
    work = Work()
    caller = spawn("caller", operations.run("a", "pause", work))
    await asyncio.sleep(0)  # has asked
    joiner = spawn("joiner", operations.run("a", "pause", work))
    await _passes(passes)

    caller.cancel()
    await asyncio.wait([caller])

    assert caller.cancelled()
    await work.begun.wait()
    work.gate.set()
    assert await joiner == "done"
    assert not work.unwound


@pytest.mark.parametrize("verb", ["run", "cut"])
async def test_work_goes_on_when_every_caller_has_left_and_its_failure_is_logged(
    verb: str, reports: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    operations = Operations()
    work = Work(NoSpace("full"))
    caller = spawn("caller", getattr(operations, verb)("a", "pause", work))
    await work.begun.wait()
    caller.cancel()
    await asyncio.wait([caller])
    assert operations.current("a") == "pause"

    work.gate.set()
    await operations.settle("a")
    await asyncio.sleep(0)

    assert not work.unwound
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (logging.WARNING, "pause a failed with nobody waiting")
    ]


async def test_a_caller_that_waits_for_its_turn_and_is_cancelled_starts_nothing() -> None:
    operations = Operations()
    first, second = Work(), Work()
    pausing = spawn("pause", operations.run("a", "pause", first))
    await first.begun.wait()
    resuming = spawn("resume", operations.run("a", "resume", second))
    await _passes()

    resuming.cancel()
    first.gate.set()
    await asyncio.wait([pausing, resuming])
    await _passes()

    assert second.calls == 0
    assert operations.statistics().in_progress == 0


async def test_a_cut_waits_until_what_it_cancelled_has_unwound(reports: list[dict[str, Any]]) -> None:
    operations = Operations()
    order: list[str] = []

    async def pause() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await _passes()
            order.append("unwound")

    async def kill() -> str:
        order.append("killed")
        return "gone"

    pausing = spawn("pause", operations.run("a", "pause", pause))
    await _passes()

    assert await operations.cut("a", "kill", kill) == "gone"
    assert order == ["unwound", "killed"]
    with pytest.raises(Conflict, match="pause of a was cut short by kill"):
        await pausing
    assert operations.statistics().cut == 1


async def test_a_cut_takes_the_place_at_once_and_the_same_cut_joins() -> None:
    operations = Operations()
    pause, kill = Work(), Work("gone")
    pausing = spawn("pause", operations.run("a", "pause", pause))
    await pause.begun.wait()

    killing = [spawn("kill", operations.cut("a", "kill", kill)) for _ in range(100)]
    killing.append(spawn("kill", operations.run("a", "kill", kill)))
    await asyncio.sleep(0)
    assert operations.current("a") == "kill"
    kill.gate.set()

    assert await asyncio.gather(*killing) == ["gone"] * 101
    assert kill.calls == 1
    with pytest.raises(Conflict):
        await pausing


async def test_a_cut_whose_caller_leaves_still_happens() -> None:
    operations = Operations()
    pause, kill = Work(), Work("gone")
    kill.gate.set()
    pausing = spawn("pause", operations.run("a", "pause", pause))
    await pause.begun.wait()
    killing = spawn("kill", operations.cut("a", "kill", kill))
    await asyncio.sleep(0)

    killing.cancel()
    await asyncio.wait([killing, pausing])
    await operations.settle("a")

    assert pause.unwound
    assert kill.calls == 1
    pausing.exception()


async def test_a_cut_of_something_that_has_not_begun_never_runs_it(reports: list[dict[str, Any]]) -> None:
    operations = Operations()
    pause, kill = Work(), Work("gone")
    kill.gate.set()
    pausing = spawn("pause", operations.run("a", "pause", pause))
    killing = spawn("kill", operations.cut("a", "kill", kill))

    assert await killing == "gone"
    with pytest.raises(Conflict):
        await pausing
    assert pause.calls == 0
    assert operations.statistics().in_progress == 0


async def test_a_cut_goes_on_without_what_does_not_unwind(caplog: pytest.LogCaptureFixture) -> None:
    operations = Operations(grace_s=0.01)
    release = asyncio.Event()
    kill = Work("gone")
    kill.gate.set()

    async def stubborn() -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    pausing = spawn("pause", operations.run("a", "pause", stubborn))
    await _passes()

    assert await operations.cut("a", "kill", kill) == "gone"
    assert operations.statistics().stuck == 1
    assert "pause a was cancelled and has not unwound" in caplog.text

    release.set()
    assert await pausing == "late"
    await asyncio.sleep(0)
    assert operations.statistics().stuck == 0


async def test_a_cut_of_a_cut_still_waits_for_the_first(reports: list[dict[str, Any]]) -> None:
    operations = Operations()
    may_unwind = asyncio.Event()
    unwound = False
    first_kill, second_kill = Work("first"), Work("second")
    second_kill.gate.set()

    async def pause() -> None:
        nonlocal unwound
        try:
            await asyncio.Event().wait()
        finally:
            await may_unwind.wait()
            unwound = True

    callers: list[asyncio.Task[object]] = [spawn("pause", operations.run("a", "pause", pause))]
    await _passes()
    callers.append(spawn("kill", operations.cut("a", "kill", first_kill)))
    await _passes()
    expiring = spawn("expire", operations.cut("a", "expire", second_kill))
    await _passes()
    assert second_kill.calls == 0

    may_unwind.set()

    assert await expiring == "second"
    assert unwound
    assert first_kill.calls == 0
    for caller in callers:
        with pytest.raises(Conflict):
            await caller


async def test_a_run_that_waited_for_what_was_cut_waits_for_the_cut_too() -> None:
    operations = Operations()
    pause, kill, resume = Work(), Work("gone"), Work("resumed")
    resume.gate.set()
    pausing = spawn("pause", operations.run("a", "pause", pause))
    await pause.begun.wait()
    resuming = spawn("resume", operations.run("a", "resume", resume))
    await _passes()
    killing = spawn("kill", operations.cut("a", "kill", kill))
    await kill.begun.wait()
    await _passes()
    assert resume.calls == 0

    kill.gate.set()

    assert await resuming == "resumed"
    assert await killing == "gone"
    await asyncio.wait([pausing])
    pausing.exception()


async def test_an_operation_that_waits_for_itself_is_a_bug() -> None:
    operations = Operations()

    async def recursive() -> None:
        await operations.run("a", "pause", recursive)

    with pytest.raises(Bug, match="waits for itself"):
        await operations.run("a", "pause", recursive)
    assert operations.current("a") is None


async def test_settle_waits_for_whatever_runs() -> None:
    operations = Operations()
    await operations.settle("a")
    work = Work()
    running = spawn("pause", operations.run("a", "pause", work))
    await work.begun.wait()
    settled = spawn("settle", operations.settle("a"))
    await _passes()
    assert not settled.done()

    work.gate.set()
    await settled
    assert await running == "done"


async def test_closing_lets_work_end_and_refuses_more() -> None:
    operations = Operations()
    work = Work()
    running = spawn("pause", operations.run("a", "pause", work))
    await work.begun.wait()
    closing = spawn("close", operations.close(grace_s=60))
    await asyncio.sleep(0)

    late: list[Coroutine[object, object, object]] = [
        operations.run("b", "pause", work),
        operations.cut("a", "kill", work),
    ]
    for attempt in late:
        with pytest.raises(Unavailable):
            await attempt
    work.gate.set()
    await closing

    assert await running == "done"
    assert not work.unwound
    await operations.close()


async def test_closing_cancels_what_does_not_end() -> None:
    operations = Operations()
    work = Work()
    running = spawn("pause", operations.run("a", "pause", work))
    await work.begun.wait()

    await operations.close(grace_s=0.01)

    with pytest.raises(Unavailable, match="pause of a was cancelled"):
        await running
    assert work.unwound
    assert operations.statistics().in_progress == 0


async def test_never_two_at_once_in_a_storm_of_callers_that_come_and_go(reports: list[dict[str, Any]]) -> None:
    operations = Operations()
    active = 0

    async def step() -> None:
        nonlocal active
        active += 1
        assert active == 1
        try:
            await _passes(3)
        finally:
            active -= 1

    async def caller(number: int) -> None:
        verb = operations.cut if number % 7 == 0 else operations.run
        name = "kill" if number % 7 == 0 else ("pause", "resume", "fork")[number % 3]
        await verb("a", name, step)

    callers = [spawn(f"caller-{n}", caller(n)) for n in range(300)]
    for n, task in enumerate(callers):
        if n % 5 == 0:
            await asyncio.sleep(0)
            task.cancel()
    outcomes = await asyncio.gather(*callers, return_exceptions=True)
    await operations.settle("a")

    assert {type(outcome) for outcome in outcomes} <= {type(None), Conflict, asyncio.CancelledError}
    assert operations.statistics().waiters == 0
