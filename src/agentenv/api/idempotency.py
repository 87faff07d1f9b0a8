"""A create that a client sends twice under one ``Idempotency-Key`` happens once.

Outcomes are kept in memory: after a restart of the server a key is unknown again.
Only successes are kept, so that a create that failed can be tried again with its key.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from agentenv.aio.clock import Clock
from agentenv.api.errors import HttpError
from agentenv.model.errors import Exhausted, Invalid

T = TypeVar("T")

_KEY: Final = re.compile(r"[A-Za-z0-9_-]{1,255}")
CAPACITY: Final = 10_000
KEEP_S: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    digest: bytes  # of the request that the key came with first
    future: asyncio.Future[T]
    expires_at: float


class Replays(Generic[T]):
    """Remembers outcomes by key for *keep_s* seconds, the latest *capacity* of them."""

    def __init__(self, clock: Clock, *, capacity: int = CAPACITY, keep_s: float = KEEP_S) -> None:
        self._clock = clock
        self._capacity = capacity
        self._keep_s = keep_s
        self._outcomes: OrderedDict[str, _Outcome[T]] = OrderedDict()

    async def run(
        self, key: str, digest: bytes, work: Callable[[], Awaitable[T]], *, is_current: Callable[[T], bool]
    ) -> tuple[T, bool]:
        """The outcome of *work*, or of the earlier call with *key*, waited for if need be; and whether it is replayed.

        An earlier outcome that *is_current* denies is forgotten, key and all.

        Raises `Invalid` for a key that cannot be one, `HttpError` 422 if the earlier call
        was for another *digest*, `Exhausted` if *capacity* calls are in progress.
        """
        if not _KEY.fullmatch(key):
            raise Invalid("Idempotency-Key must be 1 to 255 letters, digits, underscores and hyphens")
        self._expire()
        earlier = self._outcomes.get(key)
        if earlier is not None and earlier.future.done() and not is_current(earlier.future.result()):
            del self._outcomes[key]
            earlier = None
        if earlier is not None:
            if earlier.digest != digest:
                message = "this Idempotency-Key was used with another request"
                raise HttpError(422, "idempotency_request_mismatch", message)
            return await asyncio.shield(earlier.future), True
        self._make_room()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._outcomes[key] = _Outcome(digest, future, self._clock.monotonic() + self._keep_s)
        try:
            result = await work()
        except BaseException as error:
            del self._outcomes[key]
            if isinstance(error, Exception):
                future.set_exception(error)
                future.exception()  # retrieved: there may be no second caller to do it
            else:
                future.cancel()
            raise
        future.set_result(result)
        return result, False

    def _expire(self) -> None:
        now = self._clock.monotonic()
        while self._outcomes:
            key, oldest = next(iter(self._outcomes.items()))
            if oldest.expires_at > now or not oldest.future.done():
                return
            del self._outcomes[key]

    def _make_room(self) -> None:
        if len(self._outcomes) < self._capacity:
            return
        for key, outcome in self._outcomes.items():
            if outcome.future.done():
                del self._outcomes[key]
                return
        raise Exhausted(f"{self._capacity} creates with an Idempotency-Key are in progress")
