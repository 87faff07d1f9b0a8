"""One connection of one client: its requests are answered in turn, and it is bounded in size and time."""

import asyncio
import json
import socket
from collections import deque
from collections.abc import Callable, MutableSet
from typing import Any, Final, Protocol, cast

from agentenv.aio.cut import cut
from agentenv.aio.tasks import spawn
from agentenv.proxy.asgi import ASGIApp
from agentenv.proxy.inbound.exchange import BUFFER_BYTES, Exchange, scope_of
from agentenv.proxy.inbound.limits import ServerLimits
from agentenv.proxy.inbound.reader import Broken, Data, End, Event, Head, RequestReader

# A client that vanished without a word is found out in about two minutes, whatever its streams are silent for.
_TCP_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))


class Server(Protocol):
    """What uvicorn's server keeps for all its connections."""

    connections: MutableSet[Any]
    tasks: MutableSet[Any]
    total_requests: int
    default_headers: list[tuple[bytes, bytes]]


class ClientConnection(asyncio.Protocol):
    """
    Args:
        app: what answers.
        server: where this connection counts itself in and out.
        state: of the application's lifespan; every request gets a copy.
        limits: see `ServerLimits`.
    """

    def __init__(self, app: ASGIApp, server: Server, state: dict[str, object], limits: ServerLimits) -> None:
        self._app = app
        self._server = server
        self._state = state
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(limits)
        self._exchanges: deque[Exchange] = deque()  # the first is being answered; all but the last have been read
        self._broken: Broken | None = None  # why nothing more is read
        self._raw: asyncio.Protocol | None = None  # who has the connection since it left HTTP
        self._transport: asyncio.Transport | None = None
        self._addresses: tuple[tuple[str, int] | None, tuple[str, int] | None] = (None, None)
        self._timer: asyncio.TimerHandle | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._is_answering = False
        self._reading_paused = False
        self._is_stopping = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self._addresses = (_address(transport, "peername"), _address(transport, "sockname"))
        _notice_the_dead(transport)
        if len(self._server.connections) >= self._limits.max_connections:
            self._refuse(503, "too many connections are open")
            return
        self._server.connections.add(self)
        self._set_timer(self._limits.head_timeout_s, self._time_out)

    def data_received(self, data: bytes) -> None:
        if self._raw is not None:
            self._raw.data_received(data)
        elif self._broken is None:
            was_in_head = self._reader.is_in_head
            self._handle(self._reader.feed(data))
            if self._reader.is_in_head and not was_in_head and not self._exchanges:
                self._set_timer(self._limits.head_timeout_s, self._time_out)

    def eof_received(self) -> bool:
        # A client that ended its half of an HTTP connection looks like one that was killed: nobody waits for it.
        return bool(self._raw.eof_received()) if self._raw is not None else False

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self._server.connections.discard(self)
        if self._raw is not None:
            self._raw.connection_lost(exc)
        for exchange in self._exchanges:
            exchange.leave()
        self._may_write.set()

    def pause_writing(self) -> None:
        self._may_write.clear()
        if self._raw is not None:
            self._raw.pause_writing()

    def resume_writing(self) -> None:
        self._may_write.set()
        if self._raw is not None:
            self._raw.resume_writing()
        elif not self._is_closing:
            self._go_on()

    def shutdown(self) -> None:
        """The server stops: end after the answer that is being given. Called by uvicorn."""
        self._is_stopping = True
        if self._raw is not None:
            self.cut()
        elif self._exchanges:
            self._exchanges[0].keep_alive = False
        else:
            self._close()

    # What the client sends

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Head():
                    self._begin(Exchange(self, event))
                case Data(content):
                    self._exchanges[-1].feed(content)
                case End():
                    self._end(self._exchanges[-1])
                case Broken():
                    self._break(event)
            if self._broken is not None or self._is_closing:
                break
        self._pace()

    def _begin(self, exchange: Exchange) -> None:
        if len(self._exchanges) >= self._limits.max_pipelined:
            self._break(Broken(429, "too many requests at once on one connection"))
            return
        self._exchanges.append(exchange)
        self._go_on()

    def _go_on(self) -> None:
        """Start on the first request that waits; not while the client takes nothing of the answers before it."""
        if self._is_answering or not self._exchanges:
            return
        if self._may_write.is_set():
            self._start(self._exchanges[0])
        else:
            self._cut_unless_taken()

    def _start(self, exchange: Exchange) -> None:
        self._set_timer(None)
        self._is_answering = True
        self._server.total_requests += 1
        exchange.keep_alive = exchange.keep_alive and not self._is_stopping
        task = spawn("request", exchange.run(self._app, scope_of(exchange.head, *self._addresses, self._state)))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def _end(self, exchange: Exchange) -> None:
        exchange.end()
        if exchange.is_over:
            self._next()

    def _break(self, broken: Broken) -> None:
        """Answer what was read whole, then say why nothing more is read."""
        self._broken = broken
        if self._exchanges and not self._exchanges[-1].is_ended:
            unread = self._exchanges.pop()
            unread.leave()  # to its application, the client is gone
            if unread.is_started:
                self.cut()  # too late for another answer
        if not self._exchanges and not self._is_closing:
            self._refuse(broken.status, broken.message)

    def _next(self) -> None:
        """The first request is read and answered: on to the next, or wait for one."""
        done = self._exchanges.popleft()
        self._is_answering = False
        if not done.keep_alive or self._is_stopping:
            self._close()
        elif self._exchanges:
            self._go_on()
        elif self._broken is not None:
            self._refuse(self._broken.status, self._broken.message)
        else:
            self._set_timer(self._limits.keep_alive_s, self._time_out)
            if done.head.may_upgrade:
                self._handle(self._reader.resume())
        self._pace()

    # What an exchange asks for (see `Wire`)

    def write(self, *parts: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(parts)

    async def drain(self) -> None:
        while not self._may_write.is_set() and not self._is_closing:
            await self._may_write.wait()

    def may_read(self) -> None:
        self._pace()

    def over(self, exchange: Exchange) -> None:
        if exchange.is_ended:
            self._next()
            return
        # The client is still sending a body that nobody wants, and may look for its answer only after it.
        if not exchange.keep_alive and self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()
        self._set_timer(self._limits.drain_s, self.cut)
        self._pace()

    def take_over(self, head: bytes, end: asyncio.Protocol) -> bytes:
        assert self._transport is not None
        self._set_timer(None)
        self._exchanges.clear()
        self._pause_reading()
        self.write(head)
        self._raw = end
        end.connection_made(self._transport)
        return self._reader.leave()

    def cut(self) -> None:
        cut(self._transport)

    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return self._server.default_headers

    # Inside

    @property
    def _is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def _pace(self) -> None:
        """Stop reading only where a body must wait: who does not read does not see the client leave, either."""
        if self._raw is not None or self._transport is None or self._transport.is_closing():
            return
        if self._exchanges and self._exchanges[-1].is_full:
            self._pause_reading()
        elif self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()

    def _pause_reading(self) -> None:
        if not self._reading_paused and self._transport is not None and not self._transport.is_closing():
            self._reading_paused = True
            self._transport.pause_reading()

    def _set_timer(self, seconds: float | None, then: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None and then is not None:
            self._timer = self._loop.call_later(seconds, then)

    def _time_out(self) -> None:
        if self._reader.is_in_head:
            self._refuse(408, "the head of the request did not come")
        else:
            self._close()

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps({"code": status, "message": message, "error_code": "invalid"}).encode()
        head = b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.write(head % (status, len(body)), body)
        self._close()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._cut_unless_taken()

    def _cut_unless_taken(self) -> None:
        """Cut the connection if the client takes nothing of what waits for it; begin anew as long as it does."""
        if self._transport is None or not (waits := self._transport.get_write_buffer_size()):
            return

        def look() -> None:
            if self._transport is None or self._transport.get_write_buffer_size() >= waits:
                self.cut()
            else:
                self._cut_unless_taken()

        self._set_timer(self._limits.drain_s, look)


def _address(transport: asyncio.BaseTransport, which: str) -> tuple[str, int] | None:
    address = transport.get_extra_info(which)
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None


def _notice_the_dead(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _TCP_KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
