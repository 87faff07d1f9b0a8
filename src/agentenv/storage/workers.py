"""Threads for blocking work, so that the event loop never waits for a disk.

A caller that is cancelled waits until its thread has stopped: nothing goes on
writing behind the back of whoever cleans up. Long work looks at its `Abort` between
steps, so the wait is short.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from agentenv.aio.failures import translated
from agentenv.model.errors import Unavailable

T = TypeVar("T")


class Aborted(Exception):
    """Nobody wants the result of this work any more."""


class Abort:
    """Tells a thread to stop; calling it raises `Aborted` once that has been asked."""

    __slots__ = ("_asked",)

    def __init__(self) -> None:
        self._asked = threading.Event()

    def __call__(self) -> None:
        if self._asked.is_set():
            raise Aborted

    def ask(self) -> None:
        self._asked.set()


class Workers:
    """A bounded set of threads.

    Args:
        name: what the threads are called.
        count: how many there are at most.
    """

    def __init__(self, name: str, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._running: set[Abort] = set()
        self._closed = False

    async def run(self, doing: str, work: Callable[[Abort], T], *, landed: Callable[[T], None] | None = None) -> T:
        """Return what *work* returns in a thread; *doing* names it in the messages of what it raises.

        *landed* is called with the result on the loop in the same step, also when the
        caller was cancelled and will never see it: to note down what now exists.
        Raises `Unavailable` after `close`.
        """
        if self._closed:
            raise Unavailable("storage is closed")
        abort = Abort()
        self._running.add(abort)
        future = asyncio.get_running_loop().run_in_executor(self._pool, _translated_work, doing, work, abort)
        try:
            result = await asyncio.shield(future)
        except asyncio.CancelledError:
            abort.ask()
            await _outlast(future)
            if landed is not None and future.exception() is None:
                landed(future.result())
            raise
        except Aborted:
            raise Unavailable("storage is closing") from None
        finally:
            self._running.discard(abort)
        if landed is not None:
            landed(result)
        return result

    async def close(self) -> None:
        """Take no more work, ask what runs to stop, and return when it has."""
        self._closed = True
        for abort in self._running:
            abort.ask()
        await asyncio.to_thread(self._pool.shutdown)


def _translated_work(doing: str, work: Callable[[Abort], T], abort: Abort) -> T:
    abort()  # it may have waited for a free thread in vain
    with translated(doing):
        return work(abort)


async def _outlast(future: asyncio.Future[T]) -> None:
    """Return when *future* is done, even if cancelled again and again meanwhile."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
