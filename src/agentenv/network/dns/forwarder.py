"""Answers the name questions of sandboxes by asking the resolvers of the host.

A guest asks its gateway; its slot sends that here. The host's own resolver is often
a private address, which no sandbox can reach, and on the host nothing else listens
for sandboxes. Who asks is known by the address of the slot; how much may be in
progress is bounded for each slot and for all.
"""

import asyncio
import errno
import socket
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Final

import structlog

from agentenv.aio.clock import Clock
from agentenv.aio.tasks import Tasks
from agentenv.model.errors import Conflict, Unavailable
from agentenv.network.dns import message
from agentenv.network.dns.message import NotAQuestion, Query, Rcode, Unanswerable
from agentenv.network.dns.upstream import Upstream, Upstreams, ask_tcp, ask_udp, framed

_REFRESH_S: Final = 5.0
_IDLE_S: Final = 10.0  # how long a connection may stay silent
_CONNECTIONS_PER_SLOT: Final = 8
_CONNECTIONS: Final = 512
_FEWEST_TRIES: Final = 2
_TRY_THE_NEXT: Final = {Rcode.SERVER_FAILURE, Rcode.REFUSED, Rcode.NOT_IMPLEMENTED}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """``timeout_s`` is for one question in all; the others are questions in progress at a time."""

    timeout_s: float
    in_flight: int
    in_flight_per_slot: int


@dataclass(slots=True)
class DnsStatistics:
    """Counts since the start, except ``in_flight``."""

    in_flight: int = 0
    questions: int = 0
    answered: int = 0
    failed: int = 0  # no resolver answered: the guest was told so
    malformed: int = 0
    refused: int = 0  # from no slot, or from one that may not ask
    dropped: int = 0  # over a limit
    retried: int = 0  # a resolver did not answer, and was or another was asked again


class DnsForwarder:
    """One forwarder on one address.

    Args:
        admit: the slot that asks from an address, or None if it may not ask.
    """

    def __init__(
        self,
        address: IPv4Address,
        port: int,
        *,
        upstreams: Upstreams,
        admit: Callable[[IPv4Address], int | None],
        limits: Limits,
        clock: Clock,
    ) -> None:
        self._address = str(address)
        self._port = port
        self._upstreams = upstreams
        self._admit = admit
        self._limits = limits
        self._clock = clock
        self._tasks = Tasks("dns")
        self._in_flight: Counter[int] = Counter()
        self._connections: Counter[int] = Counter()
        self._statistics = DnsStatistics()
        self._transport: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None

    def __repr__(self) -> str:
        now = self._statistics
        return f"<DnsForwarder {self._address}:{self._port}: {now.in_flight} in flight, {now.questions} questions>"

    async def start(self) -> None:
        """Listen. Raises `Conflict` if the port is taken, `Unavailable` if the address cannot be listened on."""
        await self._upstreams.refresh()
        udp, tcp = self._bound()
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: _Listening(self._asked), sock=udp)
        self._server = await asyncio.start_server(self._connected, sock=tcp, limit=message.LARGEST_BYTES + 2)
        self._tasks.start("refresh", self._refresh())
        _log.info("names are resolved through %r", self._upstreams)

    def _bound(self) -> tuple[socket.socket, socket.socket]:
        # By hand, because event loops differ in what they say when an address cannot be had.
        with ExitStack() as opened:
            udp, tcp = (
                opened.enter_context(socket.socket(socket.AF_INET, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC))
                for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM)
            )
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                udp.bind((self._address, self._port))
                tcp.bind((self._address, self._port))
            except OSError as error:
                where = f"the name forwarder cannot listen on {self._address} port {self._port}"
                if error.errno == errno.EADDRINUSE:
                    raise Conflict(f"{where}: the port is taken", hint="choose another network dns_port") from error
                raise Unavailable(f"{where}: {error.strerror}") from error
            opened.pop_all()
        return udp, tcp

    async def close(self) -> None:
        """Stop listening and give up what is in progress. Idempotent."""
        if self._server is not None:
            self._server.close()
        await self._tasks.close()
        if self._transport is not None:
            self._transport.close()
        await asyncio.sleep(0)  # a transport lets go of its socket in the next pass of the loop

    def statistics(self) -> DnsStatistics:
        return self._statistics

    async def _refresh(self) -> None:
        while True:
            await self._clock.sleep(_REFRESH_S)
            await self._upstreams.refresh()

    # Over UDP

    def _asked(self, data: bytes, asker: tuple[str, int]) -> None:
        slot = self._admit(IPv4Address(asker[0]))
        if slot is None:
            self._statistics.refused += 1
            return
        try:
            query = message.parse_query(data)
        except NotAQuestion:
            self._statistics.malformed += 1
            return
        except Unanswerable as error:
            self._statistics.malformed += 1
            self._tell(error.reply, asker)
            return
        # Dropped rather than refused: the guest's resolver asks again, when there may be room.
        if self._enter(slot):
            try:
                self._tasks.start("question", self._answer_udp(query, slot, asker))
            except Unavailable:
                self._leave(slot)

    async def _answer_udp(self, query: Query, slot: int, asker: tuple[str, int]) -> None:
        try:
            self._tell(await self._resolve(query, over_tcp=False), asker)
        finally:
            self._leave(slot)

    def _tell(self, reply: bytes, asker: tuple[str, int]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.sendto(reply, asker)

    # Over TCP

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = IPv4Address(writer.get_extra_info("peername")[0])
        slot = self._admit(address)
        if slot is None:
            self._statistics.refused += 1
        elif self._connections[slot] >= _CONNECTIONS_PER_SLOT or self._connections.total() >= _CONNECTIONS:
            self._statistics.dropped += 1
        else:
            self._connections[slot] += 1
            try:
                self._tasks.start("connection", self._serve(address, slot, reader, writer))
            except Unavailable:  # closing
                _count_down(self._connections, slot)
            else:
                return
        writer.transport.abort()

    async def _serve(
        self, address: IPv4Address, slot: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        # Nothing stays in our buffer, so that a guest that does not read costs nothing once its time is up.
        writer.transport.set_write_buffer_limits(high=0)
        try:
            while True:
                async with asyncio.timeout(_IDLE_S):
                    (length,) = struct.unpack("!H", await reader.readexactly(2))
                    data = await reader.readexactly(length)
                if self._admit(address) != slot or (reply := await self._answer_tcp(slot, data)) is None:
                    break
                writer.write(framed(reply))
                async with asyncio.timeout(_IDLE_S):
                    await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            pass  # the guest went silent or away
        finally:
            _count_down(self._connections, slot)
            writer.transport.abort()

    async def _answer_tcp(self, slot: int, data: bytes) -> bytes | None:
        try:
            query = message.parse_query(data)
        except NotAQuestion:
            self._statistics.malformed += 1
            return None
        except Unanswerable as error:
            self._statistics.malformed += 1
            return error.reply
        if not self._enter(slot):
            return None
        try:
            return await self._resolve(query, over_tcp=True)
        finally:
            self._leave(slot)

    # Either way

    def _enter(self, slot: int) -> bool:
        now = self._statistics
        if now.in_flight >= self._limits.in_flight or self._in_flight[slot] >= self._limits.in_flight_per_slot:
            now.dropped += 1
            return False
        now.questions += 1
        now.in_flight += 1
        self._in_flight[slot] += 1
        return True

    def _leave(self, slot: int) -> None:
        self._statistics.in_flight -= 1
        _count_down(self._in_flight, slot)

    async def _resolve(self, query: Query, *, over_tcp: bool) -> bytes:
        """The answer, or that there was none in time."""
        upstreams = self._upstreams.in_order()
        tries = [upstreams[count % len(upstreams)] for count in range(max(len(upstreams), _FEWEST_TRIES))]
        failure: bytes | None = None
        for count, upstream in enumerate(tries):
            answer = await self._try(upstream, query, self._limits.timeout_s / len(tries), over_tcp=over_tcp)
            if answer is None:
                self._statistics.retried += count + 1 < len(tries)
                continue
            if message.rcode_of(answer) not in _TRY_THE_NEXT:
                self._upstreams.answered(upstream)
                self._statistics.answered += 1
                return query.answer(answer, udp=not over_tcp)
            failure = answer
            if len(upstreams) == 1:
                break
        self._statistics.failed += 1
        if failure is not None:
            return query.answer(failure, udp=not over_tcp)
        return query.failure(Rcode.SERVER_FAILURE)

    async def _try(self, upstream: Upstream, query: Query, timeout_s: float, *, over_tcp: bool) -> bytes | None:
        """One resolver's answer, or None. A question over TCP falls back to UDP, which some only speak."""
        try:
            async with asyncio.timeout(timeout_s):
                if over_tcp:
                    with suppress(OSError):
                        return await ask_tcp(upstream, query)
                return await ask_udp(upstream, query)
        except (TimeoutError, OSError):
            return None


class _Listening(asyncio.DatagramProtocol):
    def __init__(self, asked: Callable[[bytes, tuple[str, int]], None]) -> None:
        self._asked = asked

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._asked(data, addr)


def _count_down(counter: Counter[int], key: int) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
