"""Where a request goes: a function of its head, decided before any route of the control API is looked at.

The same paths (``/health``, ``/files``, ``/metrics``) exist on both sides, so what names
a sandbox always wins. It can be named by E2B's headers, by the host, by AgentENV's
headers, or, for ``/files``, by nothing but a signature. Places that disagree are an
error: whoever sends two names means one of them, and only they know which.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from agentenv.guest.contract import AGENT_PORT
from agentenv.proxy.signature import SignedFile, parse_signed

E2B_ID: Final = b"e2b-sandbox-id"
E2B_PORT: Final = b"e2b-sandbox-port"
AGENTENV_ID: Final = b"x-agentenv-sandbox-id"
AGENTENV_PORT: Final = b"x-agentenv-target-port"
ROUTING_HEADERS: Final = frozenset((E2B_ID, E2B_PORT, AGENTENV_ID, AGENTENV_PORT))

PREFIX: Final = b"/proxy"

_LOOKED_AT: Final = ROUTING_HEADERS | {b"host"}
_PORT: Final = re.compile(rb"[1-9][0-9]{0,4}")
# Only a UUID makes a host name one of ours: 10-244-1-5.pod.cluster.local is the control API by address.
_HOST: Final = re.compile(
    rb"(?P<port>[0-9]+)-(?P<id>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.[^\s:/?#@\[\]]+(?::[0-9]*)?",
    re.IGNORECASE,
)
_LONGEST_ID: Final = 64


class Family(StrEnum):
    """Whose conventions the caller follows; decides what errors look like."""

    E2B = "e2b"
    AGENTENV = "agentenv"


class Via(StrEnum):
    """How the sandbox was named; a label of the metrics."""

    HEADER = "proxy_header"
    HOST = "proxy_host"
    PREFIX = "proxy_prefix"
    SIGNATURE = "proxy_signature"


@dataclass(frozen=True, slots=True)
class ToControl:
    """No sandbox is named: the control API answers."""


@dataclass(frozen=True, slots=True)
class ToSandbox:
    """*path* is what the guest is to see: raw bytes, as they came."""

    sandbox_id: str
    port: int
    family: Family
    via: Via
    path: bytes


@dataclass(frozen=True, slots=True)
class ToSigned:
    """The running sandbox whose token makes the signature right, whichever that is."""

    file: SignedFile
    path: bytes


@dataclass(frozen=True, slots=True)
class Refuse:
    status: int
    message: str


Decision: TypeAlias = ToControl | ToSandbox | ToSigned | Refuse

_CONTROL: Final = ToControl()


def route(method: str, headers: Iterable[tuple[bytes, bytes]], path: bytes, query: bytes) -> Decision:
    """Decide by the head of a request. Names of *headers* are lower case, *path* and *query* as on the wire."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _LOOKED_AT:
            if name in found:
                return Refuse(400, f"the header {name.decode()} may be given once")
            found[name] = value
    host = found.pop(b"host", None)
    in_host = _HOST.fullmatch(host) if host is not None else None
    under_prefix = path == PREFIX or path.startswith(PREFIX + b"/")
    if in_host is None and not found:
        if under_prefix:
            return Refuse(
                400, f"{PREFIX.decode()} needs the headers {AGENTENV_ID.decode()} and {AGENTENV_PORT.decode()}"
            )
        signed = parse_signed(method, query) if path == b"/files" else None
        return _CONTROL if signed is None else ToSigned(signed, path)
    return _to_sandbox(found, in_host, path, under_prefix=under_prefix)


def _to_sandbox(
    found: dict[bytes, bytes], in_host: "re.Match[bytes] | None", path: bytes, *, under_prefix: bool
) -> ToSandbox | Refuse:
    ids = {found[name].lower() for name in (E2B_ID, AGENTENV_ID) if name in found}
    ports = {found[name] for name in (E2B_PORT, AGENTENV_PORT) if name in found}
    if in_host is not None:
        ids.add(in_host["id"].lower())
        ports.add(in_host["port"])
    if len(ids) > 1 or len(ports) > 1:
        return Refuse(400, "the host and the routing headers name different sandboxes or ports")
    if not ids:
        return Refuse(400, "a port is named, but no sandbox")
    sandbox_id = ids.pop().decode("latin-1")
    if not 0 < len(sandbox_id) <= _LONGEST_ID:
        return Refuse(400, "the header with the id of the sandbox is empty or too long")
    if not ports and E2B_ID not in found:
        return Refuse(400, f"the header {AGENTENV_PORT.decode()} is missing")
    port = parse_port(ports.pop()) if ports else AGENT_PORT
    if port is None:
        return Refuse(400, "the port is not a number from 1 to 65535")
    via = Via.HOST if in_host is not None else Via.PREFIX if under_prefix else Via.HEADER
    return ToSandbox(
        sandbox_id,
        port,
        Family.E2B if in_host is not None or E2B_ID in found else Family.AGENTENV,
        via,
        # A host of its own is a whole origin, and its application may well have a /proxy.
        (path[len(PREFIX) :] or b"/") if via is Via.PREFIX else path,
    )


def parse_port(text: bytes) -> int | None:
    """The one spelling of a TCP port (no sign, no zero in front), or None."""
    if not _PORT.fullmatch(text):
        return None
    port = int(text)
    return port if port <= 0xFFFF else None
