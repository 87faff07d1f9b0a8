"""A thread that may change its network namespace, and how the event loop asks it to.

Which namespace a thread is in decides what its netlink calls and sysctls mean, so
such work is never done on a shared pool of threads, nor on the event loop.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

from agentenv.model.errors import Unavailable
from agentenv.network import netns

P = ParamSpec("P")
T = TypeVar("T")


class NamespaceThread:
    """Runs one function after another, each starting in the namespace the object was made in."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._home = netns.own_namespace()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._closed = False

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what *function* returns there.

        Cancelled, the function still runs to its end, and this waits for that before
        it raises: whoever undoes the work must not do so in the middle of it.
        """
        if self._closed:
            raise Unavailable(f"{self._name} is closed")
        future = self._executor.submit(self._at_home, partial(function, *args, **kwargs))
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            while not waiting.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([waiting])
            if not waiting.cancelled():
                waiting.exception()  # seen, so that nobody reports it as lost
            raise

    async def close(self) -> None:
        """Let what was asked for end; refuse what comes later. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._executor.shutdown)
        os.close(self._home)

    def _at_home(self, function: Callable[[], T]) -> T:
        netns.enter(self._home)  # also if a function before could not get back
        return function()
