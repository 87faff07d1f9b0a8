"""The thread that may change its namespace."""

import asyncio
import threading
from pathlib import Path

import pytest

from agentenv.model.errors import Unavailable
from agentenv.network import netns
from agentenv.network.worker import NamespaceThread


def namespace() -> int:
    return Path("/proc/thread-self/ns/net").stat().st_ino


async def test_work_is_done_in_order_on_one_thread() -> None:
    worker = NamespaceThread("test")
    done: list[tuple[int, str]] = []

    def work(number: int) -> None:
        done.append((number, threading.current_thread().name))

    await asyncio.gather(*(worker.run(work, number) for number in range(20)))
    await worker.close()

    assert [number for number, _ in done] == list(range(20))
    assert {name for _, name in done} == {"test_0"}


async def test_an_error_is_the_callers() -> None:
    worker = NamespaceThread("test")
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 // 0)
    assert await worker.run(lambda: 7) == 7
    await worker.close()


async def test_a_cancelled_caller_hears_of_it_only_when_the_work_has_ended() -> None:
    worker = NamespaceThread("test")
    started, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    ended: list[bool] = []

    def work() -> None:
        loop.call_soon_threadsafe(started.set)
        go_on.wait(10)
        ended.append(True)

    caller = asyncio.create_task(worker.run(work))
    await started.wait()
    for _ in range(2):  # nor does impatience help
        caller.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not caller.done()
    go_on.set()

    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended == [True]
    await worker.close()


async def test_a_closed_worker_refuses() -> None:
    worker = NamespaceThread("test")
    await worker.close()
    await worker.close()

    with pytest.raises(Unavailable):
        await worker.run(namespace)


@pytest.mark.needs("root", "netns")
async def test_work_begins_at_home_even_after_work_that_got_lost() -> None:
    worker = NamespaceThread("test")
    home = namespace()

    await worker.run(netns.unshare)

    assert await worker.run(namespace) == home
    assert namespace() == home
    await worker.close()
