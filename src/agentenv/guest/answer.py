"""One answer of a guest, from bytes. No sockets here: feed it, then look at what it knows.

A guest runs code that nobody trusts. Whatever it sends is an answer or `GuestGarbage`,
and a head is of bounded size. The body comes out as it went in: nothing is decoded but
the framing, which belongs to the connection.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import httptools

from agentenv.model.errors import Unavailable

MAX_HEAD_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 256
MAX_INTERIM: Final = 16  # a guest could send 1xx answers for ever, and keep the loop busy with them

Headers = Sequence[tuple[bytes, bytes]]


class GuestGarbage(Unavailable):
    """What the guest sent is not HTTP, or has no bound."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The final head of an answer; names of *headers* are lower case."""

    status: int
    headers: Headers


class _TooMuch(Exception):
    """Raised inside the parser to stop it."""


class AnswerReader:
    """Reads the answer to one request.

    Attributes:
        head: the final head, once it is there.
        is_continued: ``100 Continue`` has come.
        is_complete: the last byte of the answer has come.
        is_switched: the answer was 101; what follows is in `rest`.
        keep_alive: another request may follow on the connection.
        buffered_bytes: of the body, waiting to be taken.
        rest: what came after the answer.
    """

    def __init__(self, *, head_only: bool) -> None:
        self.head: AnswerHead | None = None
        self.is_continued = False
        self.is_complete = False
        self.is_switched = False
        self.keep_alive = False
        self.buffered_bytes = 0
        self.rest = b""
        self._head_only = head_only
        self._ends_with_connection = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._field_bytes = 0
        self._interim = 0
        self._unread_bytes = 0  # fed since anything came of it; the parser holds on to unfinished fields
        self._body: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        # Only how a line ends is taken loosely: the answer is written anew, so nobody downstream is misled by it.
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True)

    def feed(self, data: bytes) -> None:
        """Take in *data*. Raises `GuestGarbage` if that cannot be part of an answer."""
        self._unread_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.is_switched = True
            self.rest = data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            if not self.is_complete:
                raise GuestGarbage(f"what the guest sent is not HTTP/1.1: {error.__context__ or error}") from error
            self.keep_alive = False  # the answer was whole, what follows it is not ours to understand
        if self._unread_bytes > MAX_HEAD_BYTES and not self.is_complete and not self.is_switched:
            raise GuestGarbage("the guest's answer has a head, a chunk's head or a trailer that is too large")

    def feed_eof(self) -> None:
        """The guest has closed: that is how a body without a length ends, and how any other breaks off."""
        if self._ends_with_connection and self.head is not None:
            self.is_complete = True
        self.keep_alive = False

    def take_body(self) -> bytes:
        """All of the body that is waiting."""
        body, self._body = self._body, []
        self.buffered_bytes = 0
        return body[0] if len(body) == 1 else b"".join(body)

    # Called by the parser

    def on_message_begin(self) -> None:
        if self.head is not None:
            raise _TooMuch("a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head is not None:
            return  # a trailer: each hop frames for itself
        if len(self._headers) >= MAX_HEADERS:
            raise _TooMuch("too many headers")
        self._field_bytes += len(name) + len(value)
        if self._field_bytes > MAX_HEAD_BYTES:
            raise _TooMuch("too large a head")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            self.is_continued = self.is_continued or status == 100
            self._interim += 1
            if self._interim > MAX_INTERIM:
                raise _TooMuch("too many answers that are none yet")
            self._headers = []
            self._unread_bytes = 0
            return
        if not 101 <= status <= 599:
            raise _TooMuch(f"{status} is not the status of an answer")
        has_length = any(name in (b"content-length", b"transfer-encoding") for name, _ in self._headers)
        self.keep_alive = self._parser.should_keep_alive()
        self._ends_with_connection = not has_length and status not in (101, 204, 304) and not self._head_only
        # The parser would wait for a body that HEAD does not get; every answer has a parser of its own.
        self.is_complete = self._head_only
        self.head = AnswerHead(status, self._headers)
        self._unread_bytes = 0

    def on_body(self, body: bytes) -> None:
        if self.is_complete:
            raise _TooMuch("a body where there can be none")
        self._body.append(body)
        self.buffered_bytes += len(body)
        self._unread_bytes = 0

    def on_message_complete(self) -> None:
        if self.head is not None and self.head.status != 101:
            self.is_complete = True
