"""One server per name prefix and address range of a host: a lock that the kernel drops with its holder.

The lock is an abstract Unix socket whose name says what is taken and by whom, so
every server of this network namespace can read what the others hold.
"""

import errno
import os
import re
import socket
import time
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final, Self

from agentenv.model.errors import Conflict, Unavailable
from agentenv.network.plan import NetworkPlan

_SOCKETS: Final = Path("/proc/thread-self/net/unix")
_GATE: Final = "\0agentenv-network"
_GATE_TIMEOUT_S: Final = 5.0
_GATE_RETRY_S: Final = 0.01
_CLAIM: Final = re.compile(
    r"@agentenv-network prefix=(?P<prefix>\w+) addresses=(?P<addresses>[\d./]+) links=(?P<links>[\d./]+)"
    r" pid=(?P<pid>\d+)"
)


@dataclass(frozen=True, slots=True)
class Claim:
    """What one server holds."""

    prefix: str
    ranges: tuple[IPv4Network, IPv4Network]
    pid: int

    def name(self) -> str:
        addresses, links = self.ranges
        return f"\0agentenv-network prefix={self.prefix} addresses={addresses} links={links} pid={self.pid}"

    def conflict(self, other: "Claim") -> str | None:
        """What *other* has that this one wants."""
        if self.prefix == other.prefix:
            return f"name prefix {self.prefix}"
        shared = (mine for mine in self.ranges for theirs in other.ranges if mine.overlaps(theirs))
        taken = next(shared, None)
        return f"range {taken}" if taken is not None else None


class NetworkLock:
    """Held from `take` until `release`, or until the process ends, however it ends."""

    def __init__(self, holder: socket.socket) -> None:
        self._holder = holder

    @classmethod
    def take(cls, plan: NetworkPlan) -> Self:
        """Raises `Conflict` naming the server that has the prefix or an overlapping range. Blocks for a moment."""
        claim = Claim(plan.prefix, (plan.addresses, plan.links), os.getpid())
        gate = _pass_gate()
        try:
            for other in _claims():
                if (taken := claim.conflict(other)) is not None:
                    raise Conflict(
                        f"network {taken} is in use by another server (process {other.pid}, prefix {other.prefix})",
                        hint="stop that server, or give this one another name_prefix, address_cidr and veth_cidr",
                    )
            return cls(_bound(claim.name()))
        finally:
            gate.close()

    def release(self) -> None:
        """Idempotent."""
        self._holder.close()


def _pass_gate() -> socket.socket:
    """Only one server at a time looks and then takes."""
    give_up = time.monotonic() + _GATE_TIMEOUT_S
    while True:
        try:
            return _bound(_GATE)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        if time.monotonic() > give_up:
            raise Unavailable("another server is taking its network range and does not come to an end")
        time.sleep(_GATE_RETRY_S)


def _bound(name: str) -> socket.socket:
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        holder.bind(name)
    except BaseException:
        holder.close()
        raise
    return holder


def _claims() -> list[Claim]:
    found = []
    for line in _SOCKETS.read_text(errors="replace").splitlines():
        if (match := _CLAIM.search(line)) is not None:
            ranges = IPv4Network(match["addresses"]), IPv4Network(match["links"])
            found.append(Claim(match["prefix"], ranges, int(match["pid"])))
    return found
