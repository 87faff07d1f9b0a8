"""What of a head is passed on, in either direction.

Each hop frames its own messages, so what belongs to one connection (RFC 9110 7.6.1,
and whatever ``Connection`` names) never crosses. What would hand a guest a credential
of the platform or of another port is taken out. Everything else goes through in its
order and spelling, repeated headers included.
"""

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from agentenv.guest.answer import Headers
from agentenv.guest.contract import AGENT_PORT
from agentenv.model.errors import Bug
from agentenv.proxy.access import AGENT_TOKEN, TRAFFIC_TOKEN
from agentenv.proxy.route import ROUTING_HEADERS

CONTROL_SECRET: Final = b"x-agentenv-control"  # only the node may speak to the agent as the node

_HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_FORWARDED_FOR: Final = b"x-forwarded-for"
_FORWARDED_HOST: Final = b"x-forwarded-host"
_FORWARDED_PROTO: Final = b"x-forwarded-proto"
_FORWARDED: Final = frozenset((_FORWARDED_FOR, _FORWARDED_HOST, _FORWARDED_PROTO))
_NEVER_TO_GUEST: Final = (
    _HOP_BY_HOP | ROUTING_HEADERS | _FORWARDED | {TRAFFIC_TOKEN, CONTROL_SECRET, b"host", b"expect"}
)
# What a Connection header may not take away: a message without its length is another message.
_NOT_NAMEABLE: Final = frozenset((b"content-length", b"host"))


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks, as far as this server can tell."""

    address: str | None
    scheme: str


@dataclass(frozen=True, slots=True)
class Framing:
    """How long the body of a request is. ``length`` None and not ``chunked``: there is none."""

    length: int | None
    chunked: bool

    @property
    def has_body(self) -> bool:
        return self.chunked or bool(self.length)


def framing(headers: Headers) -> Framing | None:
    """Read the one framing that *headers* give, or None if there are two, or one that we do not speak."""
    lengths = [value for name, value in headers if name == b"content-length"]
    encodings = [value for name, value in headers if name == b"transfer-encoding"]
    if encodings:
        good = len(encodings) == 1 and encodings[0].strip().lower() == b"chunked" and not lengths
        return Framing(None, chunked=True) if good else None
    if not lengths:
        return Framing(None, chunked=False)
    if len(lengths) > 1 or not lengths[0].isdigit():
        return None
    return Framing(int(lengths[0]), chunked=False)


def upgrade_wanted(headers: Headers) -> bytes | None:
    """The protocol that a request offers to switch to, if it does so properly."""
    if b"upgrade" not in _named_by_connection(headers):
        return None
    offers = [value for name, value in headers if name == b"upgrade"]
    return offers[0] if len(offers) == 1 else None


def expects_continue(headers: Headers) -> bool:
    return any(name == b"expect" and value.strip().lower() == b"100-continue" for name, value in headers)


def request_head(
    method: str,
    target: bytes,
    headers: Headers,
    body: Framing,
    client: Client,
    *,
    port: int,
    host: bytes,
    api_key: str | None = None,
    upgrade: bytes | None = None,
    expect_continue: bool = False,
) -> bytes:
    """The head of the request as the guest gets it, up to and with the empty line.

    *host* is used when the request has none (HTTP/1.0) or when it is to be masked;
    see `guest_host`.
    """
    connection = _named_by_connection(headers) - _NOT_NAMEABLE
    lines = [b"%b %b HTTP/1.1\r\nhost: %b" % (method.encode("ascii"), target, host)]
    for name, value in headers:
        if name in _NEVER_TO_GUEST or name in connection:
            continue
        if name == AGENT_TOKEN and port != AGENT_PORT:
            continue
        if name == b"x-api-key" and api_key is not None and hmac.compare_digest(api_key.encode(), value):
            continue
        lines.append(b"%b: %b" % (name, value))
    lines += _forwarded(headers, client)
    if body.chunked:
        lines.append(b"transfer-encoding: chunked")
    if expect_continue:
        lines.append(b"expect: 100-continue")
    if upgrade is not None:
        lines.append(b"connection: Upgrade\r\nupgrade: %b" % upgrade)
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def guest_host(headers: Headers, mask: str | None, *, address: str, port: int) -> bytes:
    """The Host that the guest is to see: the mask with its ``${PORT}``, else the client's, else its own address."""
    if mask is not None:
        host = mask.replace("${PORT}", str(port))
        if not host.isascii() or not host.isprintable() or " " in host:
            raise Bug("the host that masks the real one has characters that no host has")
        return host.encode()
    return next((value for name, value in headers if name == b"host"), b"%b:%d" % (address.encode(), port))


def answer_headers(headers: Headers, status: int) -> list[tuple[bytes, bytes]]:
    """The headers of a guest's answer as the client gets them."""
    dropped = _HOP_BY_HOP | (_named_by_connection(headers) - _NOT_NAMEABLE)
    if status in (204, 304):
        dropped |= {b"content-length"}  # of the body that is not there; allowed, and often misread
    return [pair for pair in headers if pair[0] not in dropped]


def _named_by_connection(headers: Headers) -> set[bytes]:
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
    return named


def _forwarded(headers: Headers, client: Client) -> Iterable[bytes]:
    """What a proxy in front of this one said stays: it ended TLS and knows the client."""
    seen: dict[bytes, bytes] = {}
    for name, value in headers:
        if name == _FORWARDED_FOR and name in seen:
            seen[name] += b", " + value
        elif name in _FORWARDED or name == b"host":
            seen[name] = value
    if client.address is not None:
        before = seen.get(_FORWARDED_FOR)
        chain = [before] if before else []
        yield b"x-forwarded-for: " + b", ".join([*chain, client.address.encode()])
    elif _FORWARDED_FOR in seen:
        yield b"x-forwarded-for: " + seen[_FORWARDED_FOR]
    host = seen.get(_FORWARDED_HOST) or seen.get(b"host")
    if host:
        yield b"x-forwarded-host: " + host
    yield b"x-forwarded-proto: " + (seen.get(_FORWARDED_PROTO) or client.scheme.encode())
