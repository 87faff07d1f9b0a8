"""A guest agent with no guest: for tests of verbs.

A `FakeGuest` stands for one address. Tests set ``fail`` to make a call raise and
``stall`` to make it hang until ``go`` is set; ``reached`` tells that it hangs.
"""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from ipaddress import IPv4Address

from agentenv.guest.contract import Agent, Completed, GuestMetrics, Identity
from agentenv.model.errors import AgentEnvError, DeadlineExceeded, Unavailable


@dataclass(slots=True)
class FakeGuests:
    """See `agentenv.guest.contract.Agents`. ``fail`` and ``stall`` are by name of the call."""

    fail: dict[str, AgentEnvError] = field(default_factory=dict)
    stall: set[str] = field(default_factory=set)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    identities: dict[str, list[Identity]] = field(default_factory=lambda: defaultdict(list))
    secrets: dict[str, str | None] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    open_agents: int = 0

    def agent(self, address: IPv4Address, *, secret: str) -> Agent:
        self.open_agents += 1
        return FakeAgent(self, str(address), secret)


@dataclass(slots=True)
class FakeAgent:
    guests: FakeGuests
    address: str
    secret: str
    closed: bool = False

    async def init(self, identity: Identity, *, secret: str | None, timeout_s: float) -> None:
        await self._step("init", timeout_s)
        self.guests.identities[identity.sandbox_id].append(identity)
        self.guests.secrets[identity.sandbox_id] = secret

    async def freeze(self, *, timeout_s: float) -> None:
        await self._step("freeze", timeout_s)

    async def thaw(self, *, timeout_s: float) -> None:
        await self._step("thaw", timeout_s)

    async def metrics(self, *, access_token: str | None, timeout_s: float) -> GuestMetrics:
        del access_token
        await self._step("metrics", timeout_s)
        return GuestMetrics(0, 1, 0.0, 1 << 29, 1 << 27, 0, 1 << 30, 1 << 28)

    async def run(self, command: list[str], *, user: str, access_token: str | None, timeout_s: float) -> Completed:
        del user, access_token
        await self._step(f"run {command[0]}", timeout_s)
        return Completed(0, b"", b"")

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.guests.open_agents -= 1

    async def _step(self, name: str, timeout_s: float) -> None:
        if self.closed:
            raise Unavailable("this agent is closed")
        self.guests.calls.append((self.address, name))
        if name in self.guests.stall:
            self.guests.reached.set()
            try:
                async with asyncio.timeout(timeout_s):
                    await self.guests.go.wait()
            except TimeoutError as error:
                raise DeadlineExceeded(f"{name} stalled") from error
        if name in self.guests.fail:
            raise self.guests.fail[name]
