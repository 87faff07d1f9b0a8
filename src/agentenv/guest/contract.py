"""What a verb may ask of the agent inside a guest (`envd`). Only the node calls these."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from ipaddress import IPv4Address
from typing import Final, Protocol

AGENT_PORT: Final = 49983  # where the agent listens in every guest


@dataclass(frozen=True, slots=True)
class CaBundle:
    """Certificates that guests trust beside their own.

    ``digest`` names the text, which is too long to send each time.
    """

    pem: str
    digest: str

    @classmethod
    def of(cls, pem: str) -> "CaBundle":
        return cls(pem, hashlib.sha256(pem.encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything that must be new before user code runs in a started, resumed or forked guest."""

    sandbox_id: str
    template_id: str
    access_token: str | None
    control_secret: str
    timestamp: datetime
    hostname: str
    machine_id: str  # 32 hex digits
    entropy: bytes  # at least 32
    env: Mapping[str, str] = field(default_factory=dict)
    default_user: str | None = None
    default_workdir: str | None = None
    ca_bundle: CaBundle | None = None


@dataclass(frozen=True, slots=True)
class GuestMetrics:
    """As the agent reports them; bytes and per cent of all its CPUs."""

    timestamp: int
    cpu_count: int
    cpu_used_pct: float
    memory_total: int
    memory_used: int
    memory_cache: int
    disk_total: int
    disk_used: int


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that has ended. ``exit_code`` is -1 when a signal ended it."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class Agent(Protocol):
    """The agent of one VM generation. Raises `Unavailable` (no answer), `DeadlineExceeded`,
    or `Bug` (it answered that a step failed). Connections are never shared between generations."""

    async def init(self, identity: Identity, *, secret: str | None, timeout_s: float) -> None:
        """Wait until the agent answers, give it *identity*, and let user code run.

        *secret* is what the agent holds now (None on a fresh boot). Waiting is one
        connection that is tried again at once, not a poll with pauses.
        """
        ...

    async def freeze(self, *, timeout_s: float) -> None:
        """Stop all user processes; return when they stand still."""
        ...

    async def thaw(self, *, timeout_s: float) -> None: ...

    async def metrics(self, *, access_token: str | None, timeout_s: float) -> GuestMetrics: ...

    async def run(self, command: list[str], *, user: str, access_token: str | None, timeout_s: float) -> Completed:
        """Run one command to its end, for builds and boot tests; output is bounded.

        `Invalid` if there is no such program, or none that runs.
        """
        ...

    async def close(self) -> None: ...


class Agents(Protocol):
    """Makes agents. The real one talks HTTP; the fake one is in `agentenv.testing`."""

    def agent(self, address: IPv4Address, *, secret: str) -> Agent:
        """A new agent client for one VM generation. *secret* is its control secret once initialised."""
        ...
