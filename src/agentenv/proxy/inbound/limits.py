"""How much a client may take before it has shown who it is. Lengths are seconds, sizes bytes."""

from dataclasses import dataclass
from typing import Final

from agentenv.config.schema import Limits

_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """
    Attributes:
        max_connections: open at once; one more is answered with 503.
        max_head_bytes: of one request: its line and headers.
        max_headers: in one request.
        max_pipelined: requests that may wait on one connection while another is answered.
        head_timeout_s: from the first byte of a head (or the connection) to its last.
        keep_alive_s: how long a connection may do nothing between requests.
        drain_s: how long the rest of a body that nobody wants is read, so that the client gets its answer; and how
            long a client may take nothing of what it was told before its next request is looked at, or before the end.
        stop_timeout_s: how long requests in progress may go on once the server stops.
    """

    max_connections: int = _LIMITS.max_connections
    max_head_bytes: int = _LIMITS.max_head_bytes
    max_headers: int = _LIMITS.max_headers
    max_pipelined: int = 16
    head_timeout_s: float = _LIMITS.head_timeout_s
    keep_alive_s: float = _LIMITS.keep_alive_s
    drain_s: float = 30.0
    stop_timeout_s: float = _LIMITS.stop_timeout_s
