"""Ending a connection so that the other side knows that it was cut."""

import asyncio
import socket
import struct
from typing import Final

_AT_ONCE: Final = struct.pack("ii", 1, 0)


def cut(transport: asyncio.WriteTransport | None) -> None:
    """Drop what is buffered and reset the connection (RST). None and closed transports are fine.

    An abort by itself ends in a FIN, which a reader takes for the end of what was said.
    """
    if transport is None:
        return
    if not transport.is_closing():
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    transport.abort()
