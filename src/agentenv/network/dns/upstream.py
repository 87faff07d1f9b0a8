"""The resolvers that are asked on behalf of sandboxes: which they are, and one question to one of them.

Every question goes out from a socket of its own (a port the kernel picks at random)
connected to the resolver, under a random id; what comes from elsewhere or does not
fit the question is not an answer.
"""

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final

from agentenv.model.errors import Invalid
from agentenv.network.dns.message import LARGEST_BYTES, Query

RESOLV_CONF: Final = Path("/etc/resolv.conf")
_PORT: Final = 53
_MOST: Final = 4
_LARGEST_RESOLV_CONF_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Upstream:
    """One resolver."""

    address: IPv4Address | IPv6Address
    port: int = _PORT

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if self.address.version == 6 else f"{self.address}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Upstream":
        """From ``address``, ``address:port`` or ``[IPv6 address]:port``. Raises `Invalid`."""
        host, port = text, str(_PORT)
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            port = rest.removeprefix(":") if rest else port
            host = host if bracket and rest in ("", f":{port}") else text
        elif text.count(":") == 1:
            host, _, port = text.partition(":")
        try:
            upstream = cls(ip_address(host), int(port))
        except ValueError:
            raise Invalid(f"{text!r} is not the address of a name server") from None
        if not 1 <= upstream.port <= 65_535:
            raise Invalid(f"{text!r} has no valid port")
        return upstream


class Upstreams:
    """The resolvers to ask, the one that answered last first.

    Args:
        fixed: what the operator chose; empty to follow *resolv_conf*.
        own: an address that is never asked, because it is ours.
    """

    def __init__(self, fixed: Sequence[str], *, own: IPv4Address, resolv_conf: Path = RESOLV_CONF) -> None:
        self._resolv_conf = None if fixed else resolv_conf
        self._own = own
        self._seen: tuple[int, int, int] | None = None
        self._known = tuple(Upstream.parse(text) for text in fixed)
        self._preferred: Upstream | None = None

    def __repr__(self) -> str:
        return f"<Upstreams: {', '.join(map(str, self.in_order()))}>"

    def in_order(self) -> list[Upstream]:
        """All of them, the best first."""
        return sorted(self._known, key=lambda upstream: upstream != self._preferred)

    def answered(self, upstream: Upstream) -> None:
        self._preferred = upstream

    async def refresh(self) -> None:
        """Read the host's resolv.conf if it has changed. One that cannot be read changes nothing."""
        if self._resolv_conf is None:
            return
        changed = await asyncio.to_thread(_read_if_changed, self._resolv_conf, self._seen)
        if changed is not None:
            self._seen, text = changed
            self._known = parse_resolv_conf(text, own=self._own)


def parse_resolv_conf(text: str, *, own: IPv4Address) -> tuple[Upstream, ...]:
    """The name servers of a resolv.conf; the host itself if it names none, as the C library does."""
    found: list[Upstream] = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            with suppress(ValueError):
                address = ip_address(words[1])
                if address != own and Upstream(address) not in found:
                    found.append(Upstream(address))
    return tuple(found[:_MOST]) or (Upstream(IPv4Address("127.0.0.1")),)


async def ask_udp(upstream: Upstream, query: Query) -> bytes:
    """The first answer that fits. Waits for ever; raises `OSError` if the resolver's host says there is none."""
    query_id = secrets.token_bytes(2)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bytes] = loop.create_future()
    transport, _ = await loop.create_datagram_endpoint(
        lambda: _Asking(answer, lambda data: query.accepts(data, query_id)), sock=_connected(upstream)
    )
    try:
        transport.sendto(query.with_id(query_id))
        return await answer
    finally:
        transport.close()


async def ask_tcp(upstream: Upstream, query: Query) -> bytes:
    """The same over TCP. Raises `OSError`, also for an answer that does not fit."""
    query_id = secrets.token_bytes(2)
    reader, writer = await asyncio.open_connection(str(upstream.address), upstream.port, limit=LARGEST_BYTES + 2)
    try:
        writer.write(framed(query.with_id(query_id)))
        await writer.drain()
        try:
            (length,) = struct.unpack("!H", await reader.readexactly(2))
            answer = await reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the name server hung up") from error
    finally:
        writer.close()
    if not query.accepts(answer, query_id):
        raise ConnectionAbortedError("the name server answered another question")
    return answer


def framed(message: bytes) -> bytes:
    """*message* as it goes over TCP."""
    return struct.pack("!H", len(message)) + message


class _Asking(asyncio.DatagramProtocol):
    def __init__(self, answer: asyncio.Future[bytes], fits: Callable[[bytes], bool]) -> None:
        self._answer = answer
        self._fits = fits

    def datagram_received(self, data: bytes, addr: object) -> None:  # noqa: ARG002 - the socket is connected
        if not self._answer.done() and self._fits(data):
            self._answer.set_result(data)

    def error_received(self, exc: Exception) -> None:
        if not self._answer.done():
            self._answer.set_exception(exc)


def _connected(upstream: Upstream) -> socket.socket:
    family = socket.AF_INET6 if upstream.address.version == 6 else socket.AF_INET
    asking = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        asking.connect(_sockaddr(upstream))
    except BaseException:
        asking.close()
        raise
    return asking


def _sockaddr(upstream: Upstream) -> tuple[object, ...]:
    address = upstream.address
    if isinstance(address, IPv4Address):
        return str(address), upstream.port
    scope = 0
    if address.scope_id is not None:
        scope = int(address.scope_id) if address.scope_id.isdigit() else socket.if_nametoindex(address.scope_id)
    return str(address).partition("%")[0], upstream.port, 0, scope


def _read_if_changed(path: Path, seen: tuple[int, int, int] | None) -> tuple[tuple[int, int, int] | None, str] | None:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            now = status.st_ino, status.st_mtime_ns, status.st_size
            if now == seen:
                return None
            return now, file.read(_LARGEST_RESOLV_CONF_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return (None, "") if seen is None else None
    except OSError:
        return None
