"""Tasks are named, held, owned, and never fail in silence."""

import asyncio
import gc
import logging
import weakref
from typing import Any

import pytest

from agentenv.aio.tasks import Tasks, spawn
from agentenv.model.errors import Unavailable


async def _fail() -> None:
    raise ValueError("boom")


async def test_a_spawned_task_has_its_name_and_gives_its_result() -> None:
    async def answer() -> int:
        return 42

    task = spawn("answer", answer())

    assert task.get_name() == "answer"
    assert await task == 42


async def test_a_spawned_task_that_nobody_holds_is_not_collected_while_it_works() -> None:
    gate = asyncio.Event()
    done = asyncio.Event()

    async def work() -> None:
        await gate.wait()
        done.set()

    held = weakref.ref(spawn("work", work()))
    gc.collect()
    assert held() is not None

    gate.set()
    await done.wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
    assert held() is None


async def test_an_exception_that_nobody_retrieves_is_reported_with_the_name() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    await asyncio.wait([spawn("doomed", _fail())])
    gc.collect()

    (context,) = reported
    assert "doomed" in repr(context["future"])
    assert isinstance(context["exception"], ValueError)


async def test_leaving_an_owner_cancels_and_awaits_everything() -> None:
    unwound = []

    async def work(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            unwound.append(number)

    async with Tasks("owner") as tasks:
        started = [tasks.start(f"work-{n}", work(n)) for n in range(3)]
        await asyncio.sleep(0)
        assert tasks.statistics().running == 3
        assert repr(tasks) == "<Tasks owner: 3 running, 0 of 3 failed>"

    assert sorted(unwound) == [0, 1, 2]
    assert all(task.cancelled() for task in started)
    assert started[0].get_name() == "owner/work-0"


async def test_a_failed_task_is_logged_at_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async with Tasks("owner") as tasks:
        other = tasks.start("other", asyncio.Event().wait())
        await asyncio.wait([tasks.start("doomed", _fail())])
        await asyncio.sleep(0)

        assert not other.done()
        assert tasks.statistics().failed == 1
        assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.ERROR, "task owner/doomed failed")]


async def test_a_closed_owner_starts_nothing() -> None:
    tasks = Tasks("owner")
    await tasks.close()

    with pytest.raises(Unavailable):
        tasks.start("late", _fail())

    assert tasks.statistics().started == 0


async def test_a_task_that_will_not_end_does_not_hold_up_closing(caplog: pytest.LogCaptureFixture) -> None:
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    tasks = Tasks("owner")
    task = tasks.start("stubborn", stubborn())
    await asyncio.sleep(0)
    await tasks.close(grace_s=0.01)

    assert "owner/stubborn did not end" in caplog.text
    release.set()
    await task


async def test_a_task_may_close_its_own_owner() -> None:
    tasks = Tasks("owner")
    other = tasks.start("other", asyncio.Event().wait())

    await tasks.start("closer", tasks.close())

    assert other.cancelled()
