"""Framing of Connect streams: one flag byte, a big-endian length, a JSON message.

Pure: bytes in, messages out. Source: the Connect protocol as the E2B clients use it
(JSON codec, no compression, an end-of-stream frame with the outcome).
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from agentenv.model.errors import Unavailable

END_OF_STREAM: Final = 0x02
STREAM_TYPE: Final = "application/connect+json"
MAX_FRAME_BYTES: Final = 1 << 20  # the agent cuts output into pieces of 32 KiB; JSON unpacks to many times its length


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame: a message, or the outcome of the stream when ``end`` is set."""

    end: bool
    message: dict[str, Any]


def encode_frame(message: dict[str, Any], *, end: bool = False) -> bytes:
    payload = json.dumps(message, separators=(",", ":")).encode()
    return struct.pack(">BI", END_OF_STREAM if end else 0, len(payload)) + payload


class FrameReader:
    """Cuts a byte stream into frames, wherever the network has split it."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield every frame that *data* completes. `Unavailable` when the peer does not speak Connect."""
        self._buffer += data
        while len(self._buffer) >= 5:
            flags, length = struct.unpack_from(">BI", self._buffer)
            if length > MAX_FRAME_BYTES:
                raise Unavailable(f"the guest agent sent a frame of {length} bytes")
            if len(self._buffer) < 5 + length:
                return
            payload = bytes(self._buffer[5 : 5 + length])
            del self._buffer[: 5 + length]
            try:
                message = json.loads(payload)
            except (ValueError, RecursionError) as error:
                raise Unavailable("the guest agent sent a frame that is not JSON") from error
            yield Frame(end=bool(flags & END_OF_STREAM), message=message)
