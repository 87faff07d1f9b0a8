"""Requests, from bytes. No sockets here: feed it, and it returns what happened, in order.

Stricter than the parser it is built on wherever two readers could disagree about where
a request ends or whom it is for: one Host, one framing, no transfer coding but chunked,
no fields after the body. What it refuses ends the connection, as nothing after it can be trusted.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import httptools

from agentenv.proxy.headers import Framing, framing, upgrade_wanted
from agentenv.proxy.inbound.limits import ServerLimits

_ABSOLUTE: Final = re.compile(rb"(?i:https?)://([^/?#]+)(.*)")


@dataclass(frozen=True, slots=True)
class Head:
    """A request up to its empty line. *path* and *query* are the raw bytes; names of *headers* are lower case."""

    method: str
    path: bytes
    query: bytes
    http_version: str
    headers: Sequence[tuple[bytes, bytes]]
    body: Framing
    keep_alive: bool
    may_upgrade: bool  # nothing more is parsed until `resume` or `leave` is called


@dataclass(frozen=True, slots=True)
class Data:
    """A part of the body of the request whose head came last."""

    content: bytes


@dataclass(frozen=True, slots=True)
class End:
    """The request whose head came last is complete."""


@dataclass(frozen=True, slots=True)
class Broken:
    """No request any more. Nothing follows."""

    status: int
    message: str


Event: TypeAlias = Head | Data | End | Broken


class _Refuse(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class RequestReader:
    """Reads the requests of one connection, one after the other.

    After a `Head` with ``may_upgrade`` and its `End`, bytes are only kept: `resume`
    reads them as the next request, `leave` gives them back as they came.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._events: list[Event] = []
        self._kept: bytes | None = None  # not None: waiting for resume or leave
        self._is_broken = False
        self._parser = httptools.HttpRequestParser(self)
        self._begin()

    @property
    def is_in_head(self) -> bool:
        """Whether a head has begun and is not complete."""
        return self._in_head and self._unread_bytes > 0

    def feed(self, data: bytes) -> list[Event]:
        """Take in *data* and return what it completes."""
        if self._kept is not None:
            self._kept += data
            return []
        if not self._is_broken:
            self._parse(data)
        events, self._events = self._events, []
        return events

    def resume(self) -> list[Event]:
        """The upgrade was not taken: go on with HTTP."""
        kept, self._kept = self._kept, None
        self._parser = httptools.HttpRequestParser(self)
        self._begin()
        return self.feed(kept) if kept else []

    def leave(self) -> bytes:
        """The upgrade was taken: return what came after the request."""
        kept = self._kept or b""
        self._kept = b""
        return kept

    def _begin(self) -> None:
        self._in_head = True
        self._unread_bytes = 0  # fed since anything came of it; the parser holds on to unfinished fields
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._field_bytes = 0
        self._skips_head = False  # reads a head of our own making, for the sake of what follows it

    def _parse(self, data: bytes) -> None:
        self._unread_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, _Refuse):
                self._break(cause.status, cause.message)
            else:
                self._break(400, f"this is not an HTTP/1.1 request: {error}")
        else:
            if self._unread_bytes > self._limits.max_head_bytes:
                self._break(431, "the request has a head, a chunk's head or a trailer that is too large")

    def _break(self, status: int, message: str) -> None:
        self._is_broken = True
        self._events.append(Broken(status, message))

    def _upgrade(self, rest: bytes) -> None:
        """The parser stops at the end of a head that asks to switch protocols, whether we do or not."""
        head = next((event for event in reversed(self._events) if isinstance(event, Head)), None)
        if head is None or self._in_head:
            self._break(400, "only GET may ask to switch protocols")
        elif head.may_upgrade:
            self._events.append(End())
            self._kept = rest
        else:
            # Not for us (h2c, mostly): its body, which the parser would take for the next request, follows.
            self._parser = httptools.HttpRequestParser(self)
            self._skips_head = True
            self._in_head = True
            if head.body.chunked:
                self._parser.feed_data(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
            else:
                self._parser.feed_data(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (head.body.length or 0))
            if rest:
                self._parse(rest)

    # Called by the parser

    def on_message_begin(self) -> None:
        if not self._skips_head:
            self._begin()
            self._unread_bytes = 1

    def on_url(self, part: bytes) -> None:
        if not self._skips_head:
            self._target += part
            self._hold(len(self._target))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._skips_head or not self._in_head:
            return  # after the body: fields that nobody has checked
        if len(self._headers) >= self._limits.max_headers:
            raise _Refuse(431, "the request has too many headers")
        self._headers.append((name.lower(), value))
        self._field_bytes += len(name) + len(value)
        self._hold(self._field_bytes)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._unread_bytes = 0
        if self._skips_head:
            return
        head = self._checked()
        self._events.append(head)

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        self._events.append(Data(body))

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return  # see _upgrade
        self._skips_head = False
        self._in_head = True
        self._unread_bytes = 0
        self._events.append(End())

    def _hold(self, size_bytes: int) -> None:
        if size_bytes > self._limits.max_head_bytes:
            raise _Refuse(431, "the head of the request is too large")

    def _checked(self) -> Head:
        version = self._parser.get_http_version()
        upgrade = upgrade_wanted(self._headers)
        if version not in ("1.0", "1.1"):
            raise _Refuse(505, "only HTTP/1.1 is spoken here")
        method = self._parser.get_method().decode("ascii")
        if method == "CONNECT":
            raise _Refuse(405, "this is not a forward proxy")
        hosts = [value for name, value in self._headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            raise _Refuse(400, "a request has one Host")
        body = framing(self._headers)
        if body is None or (body.chunked and version == "1.0"):
            raise _Refuse(400, "the length of the body is given twice, or in an unknown way")
        target = self._origin_form(self._target)
        path, _, query = target.partition(b"?")
        return Head(
            method,
            path,
            query,
            version,
            self._headers,
            body,
            keep_alive=version == "1.1" and self._parser.should_keep_alive(),
            may_upgrade=self._parser.should_upgrade()
            and method == "GET"
            and not body.has_body
            and upgrade is not None
            and upgrade.lower() != b"h2c",  # cannot be passed on: it speaks of this very connection
        )

    def _origin_form(self, target: bytes) -> bytes:
        if target.startswith(b"/") or target == b"*":
            if b"#" in target:
                raise _Refuse(400, "a request has no fragment")
            return target
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None or b"#" in target:
            raise _Refuse(400, "the target of the request is neither a path nor a URL")
        # The authority of the target is the host that is meant, whatever Host says (RFC 9112 3.2.2).
        self._headers = [pair for pair in self._headers if pair[0] != b"host"]
        self._headers.insert(0, (b"host", absolute[1]))
        rest = absolute[2]
        return rest if rest.startswith(b"/") else b"/" + rest
