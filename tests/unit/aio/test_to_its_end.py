"""Work that is never cut short, whoever asked for it and however often that one is cancelled."""

import asyncio
import logging

import pytest

from agentenv.aio.tasks import to_its_end


class Work:
    """Something that takes until `go` is set, and tells whether it got to its end."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.ended = False
        self._error = error

    async def __call__(self) -> str:
        self.begun.set()
        await self.go.wait()
        self.ended = True
        if self._error is not None:
            raise self._error
        return "done"


async def test_its_result_is_the_callers() -> None:
    work = Work()
    work.go.set()

    assert await to_its_end("work", work()) == "done"


async def test_its_exception_is_the_callers() -> None:
    work = Work(ValueError("boom"))
    work.go.set()

    with pytest.raises(ValueError, match="boom"):
        await to_its_end("work", work())


@pytest.mark.parametrize("times", [1, 2, 5])
async def test_a_caller_cancelled_any_number_of_times_ends_after_the_work(times: int) -> None:
    work = Work()
    caller = asyncio.create_task(to_its_end("work", work()))
    await work.begun.wait()

    for _ in range(times):
        caller.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not caller.done()
    work.go.set()
    with pytest.raises(asyncio.CancelledError):
        await caller

    assert work.ended


async def test_a_deadline_that_passes_meanwhile_is_still_a_deadline() -> None:
    work = Work()

    async def bounded() -> None:
        async with asyncio.timeout(0):
            await to_its_end("work", work())

    caller = asyncio.create_task(bounded())
    await work.begun.wait()
    await asyncio.sleep(0)
    work.go.set()

    with pytest.raises(TimeoutError):
        await caller
    assert work.ended


async def test_a_failure_after_the_caller_was_cancelled_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    work = Work(ValueError("boom"))
    caller = asyncio.create_task(to_its_end("odd job", work()))
    await work.begun.wait()
    caller.cancel()
    await asyncio.sleep(0)

    with caplog.at_level(logging.WARNING):
        work.go.set()
        with pytest.raises(asyncio.CancelledError):
            await caller

    assert "odd job failed" in caplog.text
