"""Threads that never outlive the wish for their work."""

import asyncio
import errno
import threading

import pytest

from agentenv.model.errors import AgentEnvError, Bug, Exhausted, NoSpace, NotFound, Unavailable
from agentenv.storage.workers import Abort, Aborted, Workers


async def test_a_result_comes_back_and_is_noted() -> None:
    workers = Workers("test", 1)
    noted: list[int] = []
    assert await workers.run("count", lambda _: 7, landed=noted.append) == 7
    assert noted == [7]
    await workers.close()


async def test_a_cancelled_caller_waits_for_its_thread_and_the_result_is_noted() -> None:
    workers = Workers("test", 1)
    started, finish = threading.Event(), threading.Event()
    noted: list[str] = []

    def work(_: Abort) -> str:
        started.set()
        finish.wait()
        return "made"

    task = asyncio.create_task(workers.run("make", work, landed=noted.append))
    await asyncio.to_thread(started.wait)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    finish.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert noted == ["made"]
    await workers.close()


async def test_a_cancelled_caller_stops_its_thread() -> None:
    workers = Workers("test", 1)
    started = threading.Event()

    def work(abort: Abort) -> None:
        started.set()
        while True:
            abort()

    task = asyncio.create_task(workers.run("spin", work))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await workers.close()


async def test_work_that_was_never_started_never_is() -> None:
    workers = Workers("test", 1)
    started, finish = threading.Event(), threading.Event()
    ran: list[str] = []

    def first(_: Abort) -> None:
        started.set()
        finish.wait()

    holding = asyncio.create_task(workers.run("hold", first))
    await asyncio.to_thread(started.wait)
    waiting = asyncio.create_task(workers.run("wait", lambda _: ran.append("second")))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    finish.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await holding
    assert ran == []
    await workers.close()


async def test_closing_stops_what_runs_and_takes_no_more() -> None:
    workers = Workers("test", 2)
    started = threading.Event()

    def work(abort: Abort) -> None:
        started.set()
        while True:
            abort()

    task = asyncio.create_task(workers.run("spin", work))
    await asyncio.to_thread(started.wait)
    await workers.close()
    with pytest.raises(Unavailable):
        await task
    with pytest.raises(Unavailable):
        await workers.run("more", lambda _: None)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "full"), NoSpace),
        (OSError(errno.EDQUOT, "quota"), NoSpace),
        (OSError(errno.EMFILE, "files"), Exhausted),
        (OSError(errno.ENOMEM, "memory"), Exhausted),
        (FileNotFoundError(errno.ENOENT, "gone"), NotFound),
        (OSError(errno.EIO, "disk"), Unavailable),
        (PermissionError(errno.EACCES, "no"), Unavailable),
        (OSError(errno.EROFS, "read-only"), Unavailable),
        (OSError("odd"), Unavailable),
        (EOFError("ends early"), Bug),
        (ValueError("ours"), ValueError),
    ],
)
async def test_a_failure_says_what_was_tried_and_is_of_a_kind(error: Exception, kind: type[Exception]) -> None:
    workers = Workers("test", 1)

    def work(_: Abort) -> None:
        raise error

    with pytest.raises(kind) as caught:
        await workers.run("write the thing", work)
    assert type(caught.value) is kind
    if isinstance(caught.value, AgentEnvError):
        assert caught.value.message.startswith("write the thing: ")
        assert caught.value.__cause__ is error
    await workers.close()


def test_an_abort_raises_once_asked() -> None:
    abort = Abort()
    abort()
    abort.ask()
    with pytest.raises(Aborted):
        abort()
