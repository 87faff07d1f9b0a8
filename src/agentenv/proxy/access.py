"""Who may pass: to an application port, to the guest agent, and who may wake a sandbox.

All of it is decided before a paused sandbox is touched. The guest agent checks its own
token; what the proxy adds is that the agent's control calls (``/init``, ``/freeze`` and
the like) do not exist on this side, however their path is spelled.
"""

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from agentenv.guest.contract import AGENT_PORT
from agentenv.node.contract import Tokens
from agentenv.proxy.signature import parse_signed

TRAFFIC_TOKEN: Final = b"e2b-traffic-access-token"
TRAFFIC_TOKEN_FIELD: Final = b"traffic_access_token"
AGENT_TOKEN: Final = b"x-access-token"

# Compared with the bytes on the wire. What must be decoded or tidied to match is not on the list,
# so there is nothing about decoding or tidying to disagree on with the agent.
_AGENT_PATHS: Final = frozenset((b"/health", b"/files", b"/metrics", b"/envs"))
_AGENT_CALL: Final = re.compile(rb"/(?:process\.Process|filesystem\.Filesystem)/[A-Za-z]{1,64}")


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a request shows, not yet compared with anything. Repeated headers count as none."""

    traffic: bytes | None
    agent: bytes | None


def credentials(headers: Iterable[tuple[bytes, bytes]], query: bytes, *, upgrade: bool) -> Credentials:
    """Collect what a request shows. A browser cannot add headers to a WebSocket, so *upgrade* may use the query."""
    traffic: list[bytes] = []
    agent: list[bytes] = []
    for name, value in headers:
        if name == TRAFFIC_TOKEN:
            traffic.append(value)
        elif name == AGENT_TOKEN:
            agent.append(value)
    if upgrade:
        traffic += [value for name, _, value in _fields(query) if name == TRAFFIC_TOKEN_FIELD]
    return Credentials(traffic[0] if len(traffic) == 1 else None, agent[0] if len(agent) == 1 else None)


def may_pass(port: int, traffic_token: str | None, shown: Credentials) -> bool:
    """Whether a request may reach *port* of a sandbox with this traffic token (None: public)."""
    return port == AGENT_PORT or traffic_token is None or _equal(traffic_token, shown.traffic)


def may_wake(port: int, tokens: Tokens, shown: Credentials, method: str, path: bytes, query: bytes) -> bool:
    """Whether a request that `may_pass` is worth waking a sandbox for: one the agent would turn away is not.

    ``/health`` needs no token and does wake a public sandbox, as clients ask it first.
    """
    if port != AGENT_PORT or tokens.envd is None or _equal(tokens.envd, shown.agent):
        return True
    if path == b"/health":
        return tokens.traffic is None
    signed = parse_signed(method, query) if path == b"/files" else None
    return signed is not None and signed.matches(tokens.envd)


def agent_serves(path: bytes) -> bool:
    """Whether *path* is one of those that the guest agent has for callers from outside."""
    return path in _AGENT_PATHS or _AGENT_CALL.fullmatch(path) is not None


def without_token(query: bytes) -> bytes:
    """*query* without the field that carries the traffic token; every other byte stays."""
    if TRAFFIC_TOKEN_FIELD not in query:
        return query
    return b"&".join(name + equals + value for name, equals, value in _fields(query) if name != TRAFFIC_TOKEN_FIELD)


def _fields(query: bytes) -> list[tuple[bytes, bytes, bytes]]:
    return [field.partition(b"=") for field in query.split(b"&")]


def _equal(token: str, shown: bytes | None) -> bool:
    return shown is not None and hmac.compare_digest(token.encode(), shown)
