"""Connections to guests, by sandbox and generation: one made to an old VM is never used for a new one.

Addresses are used again, so a connection is tied to the generation it was made to and
checked to be still of that one after it was made, before a byte is sent. When a sandbox
stops running its connections are cut: the node says so (`Pool.forget`), and a sweep
finds out where nobody did.
"""

import asyncio
import errno
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from agentenv.aio.failures import USED_UP
from agentenv.guest.connection import GuestConnection, GuestGone
from agentenv.model.errors import AgentEnvError, Conflict, Exhausted, NotFound, Unavailable
from agentenv.node.contract import Node, Route
from agentenv.proxy.errors import GuestSilent, PortClosed
from agentenv.proxy.settings import ProxySettings

_OURS_TO_BLAME: Final = USED_UP | {errno.EADDRNOTAVAIL}


class RouteChanged(Conflict):
    """The sandbox stopped running, or runs anew, while it was being connected to."""


@dataclass(eq=False, slots=True)
class _Guest:
    """All connections to one VM."""

    sandbox_id: str
    generation: int
    opening: int = 0
    connections: dict[GuestConnection, int] = field(default_factory=dict)  # to its port
    idle: defaultdict[int, list[GuestConnection]] = field(default_factory=lambda: defaultdict(list))

    @property
    def idle_count(self) -> int:
        return sum(len(connections) for connections in self.idle.values())

    def drop_idle(self, connection: GuestConnection) -> None:
        port = self.connections[connection]
        if connection in self.idle.get(port, ()):
            self.idle[port].remove(connection)
            if not self.idle[port]:
                del self.idle[port]


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """``guests``, ``busy`` and ``idle`` are now; the rest counts since the start."""

    guests: int
    busy: int
    idle: int
    opened: int
    reused: int
    cut: int


class Pool:
    """Gives out connections to guests and takes them back."""

    def __init__(self, node: Node, settings: ProxySettings) -> None:
        self._node = node
        self._settings = settings
        self._guests: dict[str, _Guest] = {}
        self._homes: dict[GuestConnection, _Guest] = {}
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._opened = 0
        self._reused = 0
        self._cut = 0

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<Pool: {now.busy} busy, {now.idle} idle, {now.guests} guests>"

    def reuse_nowait(self, route: Route, port: int, *, repeatable: bool) -> GuestConnection | None:
        """An idle connection, if there is one that may carry the request.

        A server may close a connection just when we send on it. What is *repeatable*
        can then be sent again; the rest only goes where the server has been heard of lately.
        """
        guest = self._guest(route)
        idle = guest.idle.get(port, [])
        max_idle_s = self._settings.max_idle_s if repeatable else self._settings.max_idle_unsafe_s
        now = asyncio.get_running_loop().time()
        for connection in reversed(idle):  # the youngest first
            if connection.is_open:
                if now - connection.idle_since > max_idle_s:
                    return None
                guest.drop_idle(connection)
                self._reused += 1
                return connection
        return None

    async def connect(self, route: Route, port: int) -> GuestConnection:
        """A new connection to *port* of the VM that *route* leads to.

        Raises `PortClosed` if nothing listens, `GuestSilent` if nothing answers in
        time, `RouteChanged` if the VM is another one by now, `Exhausted` at the limit
        of connections or descriptors, `Unavailable` for any other failure.
        """
        guest = self._guest(route)
        self._make_room(guest)
        guest.opening += 1
        try:
            connection = await self._open(str(route.address), port)
        except AgentEnvError as error:
            if not self._is_current(guest):
                raise RouteChanged("the sandbox stopped running before it could be connected to") from error
            raise
        finally:
            guest.opening -= 1
        if not self._is_current(guest):
            connection.abort()
            raise RouteChanged("the sandbox stopped running while it was being connected to")
        if not connection.is_open:
            raise GuestGone(f"port {port} closed the connection at once")
        guest.connections[connection] = port
        self._homes[connection] = guest
        self._opened += 1
        self._sweep_later()
        return connection

    def give_back(self, connection: GuestConnection) -> None:
        """Keep *connection* for another exchange, or close it if it is no good for one."""
        guest = self._homes.get(connection)
        if guest is None or self._guests.get(guest.sandbox_id) is not guest:
            connection.abort()
        elif not connection.is_reusable or guest.idle_count >= self._settings.max_idle_per_sandbox:
            connection.close()
        else:
            connection.retire()
            connection.idle_since = asyncio.get_running_loop().time()
            guest.idle[guest.connections[connection]].append(connection)

    def forget(self, sandbox_id: str) -> None:
        """Cut every connection to *sandbox_id*, busy ones too: it has stopped running. Unknown ids are fine."""
        guest = self._guests.pop(sandbox_id, None)
        if guest is None:
            return
        for connection in list(guest.connections):
            self._cut += 1
            connection.abort(GuestGone("the sandbox stopped running"))

    def close(self) -> None:
        """Cut everything. The pool may be used again."""
        for sandbox_id in list(self._guests):
            self.forget(sandbox_id)
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None

    def statistics(self) -> PoolStatistics:
        idle = sum(guest.idle_count for guest in self._guests.values())
        return PoolStatistics(
            guests=len(self._guests),
            busy=len(self._homes) - idle,
            idle=idle,
            opened=self._opened,
            reused=self._reused,
            cut=self._cut,
        )

    async def _open(self, address: str, port: int) -> GuestConnection:
        timeout_s = self._settings.connect_timeout_s
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(lambda: GuestConnection(self._lost), address, port)
        except ConnectionRefusedError as error:
            raise PortClosed(f"nothing listens on port {port}") from error
        except TimeoutError as error:
            raise GuestSilent(f"no connection to port {port} in {timeout_s:g} s") from error
        except OSError as error:
            kind = Exhausted if error.errno in _OURS_TO_BLAME else Unavailable
            raise kind(f"no connection to port {port}: {error.strerror}") from error
        return connection

    def _guest(self, route: Route) -> _Guest:
        sandbox_id, generation = route.key
        guest = self._guests.get(sandbox_id)
        if guest is not None and guest.generation != generation:
            self.forget(sandbox_id)
            guest = None
        if guest is None:
            guest = self._guests[sandbox_id] = _Guest(sandbox_id, generation)
        return guest

    def _make_room(self, guest: _Guest) -> None:
        if len(guest.connections) + guest.opening < self._settings.max_connections_per_sandbox:
            return
        for idle in list(guest.idle.values()):
            oldest = idle[0]
            guest.drop_idle(oldest)
            oldest.abort()
            return
        raise Exhausted("too many connections to this sandbox are open")

    def _is_current(self, guest: _Guest) -> bool:
        """Whether *guest* is still the one VM of its sandbox: nobody else has its address then."""
        return self._guests.get(guest.sandbox_id) is guest and self._is_alive(guest)

    def _is_alive(self, guest: _Guest) -> bool:
        try:
            sandbox = self._node.get(guest.sandbox_id)
        except NotFound:
            return False
        return sandbox.generation == guest.generation and sandbox.state.has_guest

    def _lost(self, connection: GuestConnection) -> None:
        guest = self._homes.pop(connection, None)
        if guest is None:
            return
        guest.drop_idle(connection)
        del guest.connections[connection]

    def _sweep_later(self) -> None:
        if self._sweep_timer is None:
            loop = asyncio.get_running_loop()
            self._sweep_timer = loop.call_later(self._settings.sweep_interval_s, self._sweep)

    def _sweep(self) -> None:
        self._sweep_timer = None
        too_old = asyncio.get_running_loop().time() - self._settings.max_idle_s
        for guest in list(self._guests.values()):
            if not self._is_alive(guest):
                self.forget(guest.sandbox_id)
            elif not guest.connections and not guest.opening:
                del self._guests[guest.sandbox_id]
            else:
                for connection in [c for idle in guest.idle.values() for c in idle if c.idle_since < too_old]:
                    guest.drop_idle(connection)
                    connection.close()
        if self._guests:
            self._sweep_later()
