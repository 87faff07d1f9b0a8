"""One TCP connection to a port of one guest, for one exchange at a time.

The guest is not read from while the client does not keep up, and the client not while
the guest does not: each way holds `BUFFER_BYTES` and a little.
"""

import asyncio
from collections.abc import Callable
from typing import Final, cast

from agentenv.aio.cut import cut
from agentenv.guest.answer import AnswerHead, AnswerReader, GuestGarbage
from agentenv.model.errors import Unavailable

BUFFER_BYTES: Final = 256 * 1024


class GuestGone(Unavailable):
    """The connection to the guest ended before it had said all."""


class GuestConnection(asyncio.Protocol):
    """Begin an exchange with `begin`, send with `write`, read with `read_head` and then `read_body`.

    Afterwards `is_reusable` tells whether another exchange may begin. A read raises
    `GuestGone`, `GuestGarbage`, or what `abort` was given, once the answer cannot be had.
    """

    def __init__(self, on_lost: "Callable[[GuestConnection], None]") -> None:
        self.idle_since = 0.0  # by the clock of the loop
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._answer: AnswerReader | None = None  # None between exchanges: the guest has nothing to say
        self._raw: asyncio.Protocol | None = None  # who has the connection since it left HTTP
        self._error: Exception | None = None
        self._on_broken: Callable[[], None] | None = None
        self._is_heard = False
        self._may_write = True
        self._reading_paused = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = "closed" if not self.is_open else "idle" if self._answer is None else "busy"
        return f"<GuestConnection {state}>"

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        """Whether the last exchange ended so that the guest's next byte can only begin another answer."""
        answer = self._answer
        return self.is_open and answer is not None and answer.is_complete and answer.keep_alive

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer has been read."""
        return self._answer is not None and self._answer.is_complete and not self._answer.buffered_bytes

    @property
    def has_answered(self) -> bool:
        """Whether any byte of the answer came: if not, the request may never have arrived."""
        return self._is_heard

    def begin(self, *, head_only: bool, on_broken: Callable[[], None] | None = None) -> None:
        """Expect a new answer, without a body if *head_only* (the request is HEAD).

        *on_broken* is called if the connection is lost before the answer is complete.
        """
        self._answer = AnswerReader(head_only=head_only)
        self._on_broken = on_broken
        self._is_heard = False

    def write(self, *parts: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(parts)

    async def drain(self) -> None:
        """Return when the guest has taken enough to be given more, or is lost."""
        while not self._may_write and self.is_open:
            self._writer = self._loop.create_future()
            await self._writer

    async def wait_continue(self, timeout_s: float) -> bool:
        """Whether the guest wants the body: it said so, or said nothing for *timeout_s* seconds."""
        answer = self._begun()
        try:
            async with asyncio.timeout(timeout_s):
                while not answer.is_continued and answer.head is None and self.is_open:
                    self._writer = self._loop.create_future()
                    await self._writer
        except TimeoutError:
            return True
        return answer.head is None and self.is_open

    async def read_head(self) -> AnswerHead:
        answer = self._begun()
        while answer.head is None or (answer.head.status == 101 and not answer.is_switched):
            await self._wait()
        return answer.head

    async def read_body(self) -> bytes:
        """What has come of the body; b"" only when it is complete."""
        answer = self._begun()
        while not answer.buffered_bytes:
            if answer.is_complete:
                return b""
            await self._wait()
        body = answer.take_body()
        if self._reading_paused:
            self._reading_paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        return body

    def take_over(self, end: asyncio.Protocol) -> bytes:
        """After an answer with 101: let *end* have the connection, which is not read until it says so.

        Returns what the guest has sent beyond the head. Raises as a read does.
        """
        answer = self._begun()
        if not answer.is_switched or self._transport is None or not self.is_open:
            raise self._failure()
        self._raw = end
        end.connection_made(self._transport)
        return answer.rest

    def retire(self) -> None:
        """Between exchanges: whatever the guest says now was not asked for and ends the connection."""
        self._answer = None
        self._on_broken = None

    def abort(self, error: Exception | None = None) -> None:
        """Cut the connection now. Whoever reads gets *error*."""
        self._error = self._error or error
        cut(self._transport)
        self._wake_all()

    def close(self) -> None:
        """Close a connection whose exchange is over."""
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # the loop has set TCP_NODELAY
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        if self._raw is not None:
            self._raw.data_received(data)
            return
        answer = self._answer
        if answer is None or (answer.is_complete and not answer.is_switched):
            self.abort(GuestGarbage("the guest spoke out of turn"))
            return
        self._is_heard = True
        try:
            answer.feed(data)
        except GuestGarbage as error:
            self.abort(error)
            return
        if answer.is_switched or answer.buffered_bytes >= BUFFER_BYTES:
            self._pause_reading()
        self._wake_all()

    def eof_received(self) -> bool:
        if self._raw is not None:
            return bool(self._raw.eof_received())
        if self._answer is not None:
            self._answer.feed_eof()
        return False  # the transport closes

    def connection_lost(self, exc: Exception | None) -> None:
        if self._raw is not None:
            self._raw.connection_lost(exc)
        if self._error is None:
            self._error = GuestGone("the guest closed the connection before its answer was complete")
            self._error.__cause__ = exc
        self._wake_all()
        self._on_lost(self)
        if self._on_broken is not None and self._answer is not None and not self._answer.is_complete:
            self._on_broken()

    def pause_writing(self) -> None:
        self._may_write = False
        if self._raw is not None:
            self._raw.pause_writing()

    def resume_writing(self) -> None:
        self._may_write = True
        if self._raw is not None:
            self._raw.resume_writing()
        self._wake(self._writer)

    def _begun(self) -> AnswerReader:
        assert self._answer is not None, "begin() comes first"
        return self._answer

    def _pause_reading(self) -> None:
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    async def _wait(self) -> None:
        if not self.is_open:
            raise self._failure()
        self._reader = self._loop.create_future()
        await self._reader

    def _failure(self) -> Exception:
        return self._error or GuestGone("the connection to the guest was lost")

    def _wake_all(self) -> None:
        self._wake(self._reader)
        self._wake(self._writer)

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
