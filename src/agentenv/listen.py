"""How the server begins and ends to be reached: its sockets, and the signals that stop it."""

import asyncio
import errno
import signal
import socket
from types import FrameType

import structlog
import uvicorn

from agentenv.model.errors import Conflict, Invalid

log = structlog.get_logger(__name__)


async def bind(host: str, port: int, *, backlog: int) -> list[socket.socket]:
    """Listen on every address of *host*; *port* 0 takes a free one.

    Raises `Conflict` if the port is in use, `Invalid` if nothing can listen there.
    """
    bound: list[socket.socket] = []
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listening = socket.socket(family, kind, protocol)
            bound.append(listening)
            listening.setblocking(False)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(address)
            listening.listen(backlog)
    except OSError as error:
        for listening in bound:
            listening.close()
        if error.errno == errno.EADDRINUSE:
            raise Conflict(f"port {port} of {host} is in use", hint="set server.listen_port") from error
        raise Invalid(
            f"nothing can listen on port {port} of {host}: {error.strerror}",
            hint="set server.listen_host and server.listen_port",
        ) from error
    return bound


def heed_signals(server: uvicorn.Server, stop_timeout_s: float) -> None:
    """Stop *server* at SIGINT and SIGTERM, and log that it stops and how long that may take, in s."""
    loop = asyncio.get_running_loop()
    exits = server.handle_exit

    def heed(number: int, frame: FrameType | None) -> None:
        if not server.should_exit:
            # Not from here: the signal may have come in the middle of a line of the log.
            loop.call_soon_threadsafe(log.info, f"stopping; requests under way get {stop_timeout_s:g} s")
        exits(number, frame)

    # uvicorn puts its own handlers in the place of these for as long as it serves, and sends itself the signal after.
    server.handle_exit = heed  # type: ignore[method-assign, assignment]
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, setattr, server, "should_exit", True)
