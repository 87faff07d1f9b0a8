"""Two connections joined into one once they have left HTTP: WebSocket, or whatever both ends agreed on.

Bytes go through as they are, so frames, fragments, pings, compression and close codes
are between the two ends, and a message of any size takes the memory of two buffers. A
side that ends its half (FIN) ends the other's; a side that breaks (RST, a paused
sandbox) breaks the other.
"""

import asyncio
from typing import Final, cast

from agentenv.aio.cut import cut
from agentenv.model.errors import Bug

_BUFFER_BYTES: Final = 256 * 1024


class Tunnel:
    """Both ends, and the rule that ties them. `wait_closed` returns when both connections are gone.

    Args:
        half_closed_timeout_s: how long, in seconds, the half that is left may be silent after the other ended.
            A client that was killed looks like one that has only finished sending.
    """

    def __init__(self, *, half_closed_timeout_s: float) -> None:
        self.client = End(self)
        self.guest = End(self)
        self.client.other, self.guest.other = self.guest, self.client
        self._half_closed_timeout_s = half_closed_timeout_s
        self._loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._moved_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, from_client: bytes, from_guest: bytes) -> None:
        """Begin, with what either side sent before both were taken over."""
        if from_client:
            self.client.data_received(from_client)
        if from_guest:
            self.guest.data_received(from_guest)
        self.client.resume()
        self.guest.resume()

    def abort(self) -> None:
        """Cut both connections now; what is buffered is lost."""
        self.client.abort()
        self.guest.abort()

    async def wait_closed(self) -> None:
        """Cancelled, both connections are cut."""
        try:
            await asyncio.shield(self._closed)
        except asyncio.CancelledError:
            self.abort()
            raise

    def moved(self) -> None:
        if self._timer is not None:
            self._moved_at = self._loop.time()

    def half_closed(self) -> None:
        if self._timer is None:
            self._moved_at = self._loop.time()
            self._timer = self._loop.call_later(self._half_closed_timeout_s, self._check_half_closed)

    def end_closed(self) -> None:
        if self.client.is_closed and self.guest.is_closed:
            if self._timer is not None:
                self._timer.cancel()
            if not self._closed.done():
                self._closed.set_result(None)

    def _check_half_closed(self) -> None:
        due = self._moved_at + self._half_closed_timeout_s
        if self._loop.time() >= due:
            self.abort()
        else:
            self._timer = self._loop.call_at(due, self._check_half_closed)


class End(asyncio.Protocol):
    """One side. What it hears the other says; what the other cannot take it stops listening to."""

    other: "End"

    def __init__(self, tunnel: Tunnel) -> None:
        self.is_closed = False
        self.has_ended = False  # has said its last byte
        self._tunnel = tunnel
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        self._tunnel.moved()
        self.other.write(data)

    def eof_received(self) -> bool:
        self.has_ended = True
        self.other.write_eof()
        if self.other.has_ended:
            return False  # both halves are done: the transport closes once it is flushed
        self._tunnel.half_closed()
        return True

    def pause_writing(self) -> None:
        self.other.pause()

    def resume_writing(self) -> None:
        self.other.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if exc is not None or not self.has_ended:
            self.other.abort()  # broken, or cut from this side: never a clean end for the other
        else:
            self.other.close()
        self._tunnel.end_closed()

    def write(self, data: bytes) -> None:
        if not self.is_closed:
            self._connected().write(data)

    def write_eof(self) -> None:
        transport = self._connected()
        if not self.is_closed and not transport.is_closing() and transport.can_write_eof():
            transport.write_eof()

    def pause(self) -> None:
        if not self.is_closed and not self.has_ended:
            self._connected().pause_reading()

    def resume(self) -> None:
        if not self.is_closed and not self.has_ended:
            self._connected().resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        cut(self._transport)

    def _connected(self) -> asyncio.Transport:
        if self._transport is None:
            raise Bug("a tunnel was used before both its ends were connected")
        return self._transport
