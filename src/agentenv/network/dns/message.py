"""As much of the DNS message format as a forwarder needs (RFC 1035, RFC 6891). Pure.

Messages are passed on as they are, except for the id. Only the header, the one
question and the size that the asker takes are looked at.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

HEADER_BYTES: Final = 12
PLAIN_LIMIT_BYTES: Final = 512
LARGEST_BYTES: Final = 65_535

_RESPONSE: Final = 0x8000
_OPCODE: Final = 0x7800
_TRUNCATED: Final = 0x0200
_RECURSION_DESIRED: Final = 0x0100
_RECURSION_AVAILABLE: Final = 0x0080
_RCODE: Final = 0x000F
_OPT: Final = 41
_ZONE_TRANSFERS: Final = {251, 252}
_LONGEST_LABEL: Final = 63
_LONGEST_NAME: Final = 255


class Rcode(IntEnum):
    """What an answer says about how it went."""

    OK = 0
    FORMAT_ERROR = 1
    SERVER_FAILURE = 2
    NO_SUCH_NAME = 3
    NOT_IMPLEMENTED = 4
    REFUSED = 5


class NotAQuestion(ValueError):
    """Not a message that anything can be answered to."""


class Unanswerable(ValueError):
    """A question that gets an error for an answer. `reply` is that answer."""

    def __init__(self, reply: bytes) -> None:
        super().__init__()
        self.reply = reply


@dataclass(frozen=True, slots=True)
class Query:
    """One question. ``limit_bytes`` is how long an answer over UDP may be."""

    data: bytes
    name: bytes  # as on the wire
    kind: bytes  # type and class
    limit_bytes: int

    @property
    def id(self) -> bytes:
        return self.data[:2]

    def with_id(self, query_id: bytes) -> bytes:
        """The message to send on, under an id that the asker did not choose."""
        return query_id + self.data[2:]

    def failure(self, rcode: Rcode) -> bytes:
        """The answer when there is none."""
        return _reply(self.data, rcode, self.name + self.kind)

    def truncated(self) -> bytes:
        """The answer to one over UDP whose answer is too long for it: ask again over TCP."""
        return _reply(self.data, Rcode.OK, self.name + self.kind, flags=_TRUNCATED)

    def accepts(self, answer: bytes, query_id: bytes) -> bool:
        """Whether *answer* is one to the message sent under *query_id*.

        Some servers leave the question out of an error; then the id alone has to do.
        """
        if len(answer) < HEADER_BYTES or answer[:2] != query_id:
            return False
        flags, questions = struct.unpack_from("!HH", answer, 2)
        (asked,) = struct.unpack_from("!H", self.data, 2)
        if not flags & _RESPONSE or flags & _OPCODE != asked & _OPCODE:
            return False
        if questions == 0:
            return bool(flags & _RCODE)
        end = HEADER_BYTES + len(self.name)
        echoed = answer[HEADER_BYTES:end]
        return questions == 1 and echoed.lower() == self.name.lower() and answer[end : end + 4] == self.kind

    def answer(self, answer: bytes, *, udp: bool) -> bytes:
        """What the asker is told when *answer* has been accepted."""
        (questions,) = struct.unpack_from("!H", answer, 4)
        if questions == 0:
            return _reply(self.data, rcode_of(answer), self.name + self.kind)
        if udp and len(answer) > self.limit_bytes:
            return self.truncated()
        return self.id + answer[2:]


def rcode_of(answer: bytes) -> int:
    return answer[3] & _RCODE


def is_truncated(answer: bytes) -> bool:
    return bool(answer[2] << 8 & _TRUNCATED)


def parse_query(data: bytes) -> Query:
    """Raises `NotAQuestion` for what gets no answer, `Unanswerable` for what gets an error."""
    if len(data) < HEADER_BYTES:
        raise NotAQuestion
    flags, questions, answers, authorities, extras = struct.unpack_from("!HHHHH", data, 2)
    if flags & _RESPONSE:
        raise NotAQuestion
    if flags & _OPCODE:
        raise Unanswerable(_reply(data, Rcode.NOT_IMPLEMENTED))
    end = _name_end(data)
    if questions != 1 or answers or authorities or end is None or len(data) < end + 4:
        raise Unanswerable(_reply(data, Rcode.FORMAT_ERROR))
    name, kind = data[HEADER_BYTES:end], data[end : end + 4]
    if int.from_bytes(kind[:2], "big") in _ZONE_TRANSFERS:
        raise Unanswerable(_reply(data, Rcode.REFUSED, name + kind))
    return Query(data, name, kind, _limit(data, end + 4) if extras else PLAIN_LIMIT_BYTES)


def _name_end(data: bytes) -> int | None:
    """Where the name of the question ends; None if it is not one. Nothing before it could be pointed at."""
    offset = HEADER_BYTES
    while offset < len(data) and offset - HEADER_BYTES < _LONGEST_NAME:
        length = data[offset]
        if length == 0:
            return offset + 1
        if length > _LONGEST_LABEL:
            return None
        offset += 1 + length
    return None


def _limit(data: bytes, offset: int) -> int:
    """The size in the first additional record, where askers put their OPT record."""
    if len(data) < offset + 11 or data[offset] != 0:
        return PLAIN_LIMIT_BYTES
    kind, size = struct.unpack_from("!HH", data, offset + 1)
    return max(size, PLAIN_LIMIT_BYTES) if kind == _OPT else PLAIN_LIMIT_BYTES


def _reply(data: bytes, rcode: int, question: bytes = b"", *, flags: int = 0) -> bytes:
    (asked,) = struct.unpack_from("!H", data, 2)
    flags |= _RESPONSE | asked & (_OPCODE | _RECURSION_DESIRED) | _RECURSION_AVAILABLE | rcode
    return data[:2] + struct.pack("!HHHHH", flags, bool(question), 0, 0, 0) + question
