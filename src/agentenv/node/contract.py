"""What the edges (API, proxy, command line) may ask of a node. One method per verb.

Every call that changes something runs in a task of its own: a caller that hangs up
abandons the wait, never the work; what was made then and nobody claims, the edge
deletes. A second pause, resume or kill of a sandbox joins the first; another verb waits
for the one in progress and then looks again.
All ids and names are text from outside: unknown ones raise `NotFound`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from ipaddress import IPv4Address
from typing import Protocol

from agentenv.guest.contract import GuestMetrics
from agentenv.model.policy import EgressPolicy
from agentenv.model.sandbox import CreateSandbox, Forked, Sandbox
from agentenv.model.snapshot import Snapshot, Source


@dataclass(frozen=True, slots=True)
class Route:
    """How the proxy reaches a running sandbox. Valid for this generation only."""

    sandbox: Sandbox
    address: IPv4Address
    envd_token: str | None
    traffic_token: str | None  # None: public

    @property
    def key(self) -> tuple[str, int]:
        """What connection pools are keyed by."""
        return self.sandbox.id, self.sandbox.generation


@dataclass(frozen=True, slots=True)
class Tokens:
    """Credentials of one sandbox; None where the sandbox does not use one."""

    envd: str | None
    traffic: str | None


@dataclass(frozen=True, slots=True)
class DiskUse:
    mount_point: str
    device: str
    filesystem: str
    used_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What GET /nodes and the metrics page show. Counts are of sandboxes."""

    id: str
    version: str
    status: str  # "ready" | "draining"
    driver: str
    accelerator: str
    cpu_architecture: str
    cpu_family: str
    cpu_model: str
    cpu_model_name: str
    cpu_count: int
    cpu_percent: float
    memory_total_bytes: int
    memory_used_bytes: int
    disks: tuple[DiskUse, ...]
    running: int
    starting: int
    paused: int
    errored: int
    create_successes: int
    create_fails: int
    allocated_cpu: int
    allocated_memory_bytes: int
    paused_allocated_cpu: int
    paused_allocated_memory_bytes: int


@dataclass(frozen=True, slots=True)
class LogLine:
    timestamp: datetime
    level: str  # debug | info | warn | error
    message: str


class Node(Protocol):
    """One host running sandboxes."""

    # Sandboxes
    async def create(self, request: CreateSandbox) -> Sandbox:
        """Return once the guest agent answers; the time to live starts then. Unknown template: `NotFound`."""
        ...

    async def pause(self, sandbox_id: str) -> Sandbox:
        """Return once the capture and its record are durable. `Conflict` if it is paused already or in error."""
        ...

    async def resume(self, sandbox_id: str, timeout_s: int, *, on_timeout_pause: bool | None = None) -> Sandbox:
        """Return once the agent answers. `Conflict` if it is running."""
        ...

    async def connect(self, sandbox_id: str, timeout_s: int) -> tuple[Sandbox, bool]:
        """Make it run and live at least *timeout_s* more; tell whether it had to be resumed. Never shortens."""
        ...

    async def wake(self, sandbox_id: str) -> Sandbox:
        """Resume a paused sandbox whose auto-resume is on, because traffic came; `Conflict` if it is off."""
        ...

    async def fork(self, sandbox_id: str, count: int, timeout_s: int) -> Sequence[Forked]:
        """*count* children with the same live state, each with its own outcome. The source runs on."""
        ...

    async def snapshot(self, sandbox_id: str, name: str | None) -> Snapshot:
        """Keep the live state as a snapshot; the sandbox runs on. A name in use moves to the new snapshot."""
        ...

    async def delete(self, sandbox_id: str) -> None:
        """Whatever its state, in bounded time."""
        ...

    async def set_timeout(self, sandbox_id: str, timeout_s: int) -> Sandbox:
        """The end is now + *timeout_s*, earlier or later. `Conflict` unless running."""
        ...

    async def extend(self, sandbox_id: str, duration_s: int) -> Sandbox:
        """The end is at least now + *duration_s*."""
        ...

    async def set_egress(self, sandbox_id: str, policy: EgressPolicy) -> Sandbox: ...

    def get(self, sandbox_id: str) -> Sandbox:
        """`NotFound` also while it is being killed."""
        ...

    def sandboxes(self) -> Sequence[Sandbox]:
        """All that are not being killed, newest first, then by id."""
        ...

    def tokens(self, sandbox: Sandbox) -> Tokens: ...

    def route(self, sandbox_id: str) -> Route:
        """`NotFound` if there is no such sandbox, `Conflict` if it has no running guest."""
        ...

    def find_by_signature(self, matches: "SignatureCheck") -> Sandbox | None:
        """The running sandbox whose envd token makes *matches* true (signed file links carry no id)."""
        ...

    async def metrics(self, sandbox_id: str) -> GuestMetrics: ...

    async def logs(self, sandbox_id: str, *, limit: int) -> Sequence[LogLine]:
        """The last *limit* lines of the guest's console; of a sandbox in error, why; of a paused one, none."""
        ...

    # Snapshots and templates
    def snapshots(self, source: Source | None = None) -> Sequence[Snapshot]:
        """Newest first, then by id."""
        ...

    def find_snapshot(self, id_or_name: str) -> Snapshot:
        """By id, name or ``name:default``; a namespace before a slash is ignored."""
        ...

    async def delete_snapshot(self, id_or_name: str) -> None:
        """Running and paused sandboxes made from it live on; what only it needs is collected."""
        ...

    # The node
    def info(self) -> NodeInfo: ...


class SignatureCheck(Protocol):
    def __call__(self, token: str) -> bool: ...
