"""The parts of a node, joined: what every verb is given as its first argument.

No behaviour of its own beyond naming things: verbs are functions in modules of
their own, and the parts know nothing of each other.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from agentenv.aio.clock import Clock
from agentenv.aio.operations import Operations
from agentenv.aio.tasks import Tasks
from agentenv.config import schema
from agentenv.guest.contract import Agent, Agents, CaBundle
from agentenv.model.ids import SandboxId
from agentenv.model.machine import BlockTarget, Fingerprint
from agentenv.model.sandbox import Sandbox
from agentenv.network.contract import Slot, Slots
from agentenv.node.catalogue import Catalogue
from agentenv.node.collect import Collector
from agentenv.node.registry import Registry
from agentenv.node.spares import Spares
from agentenv.node.timings import Timings
from agentenv.state.contract import Quarantined, Store
from agentenv.storage.contract import Storage
from agentenv.vmm.contract import Instance, Vmm, VmPlan

_SANDBOX: Final = schema.Sandbox()
_GUEST: Final = schema.Guest()


class Credentials(Protocol):
    """Makes the secrets of a sandbox from its id, the same ones each time."""

    def envd_token(self, sandbox_id: str) -> str: ...

    def traffic_token(self, sandbox_id: str) -> str: ...

    def control_secret(self, sandbox_id: str) -> str: ...


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Limits and places of one node. Times in seconds, sizes in MiB."""

    runtime_dir: Path
    work_dir: Path  # for builds: large files, on the file system of the storage
    kernel: Path
    initramfs: Path
    node_id: str = "node"
    ca_bundle: CaBundle | None = None
    max_sandboxes: int = _SANDBOX.max_sandboxes
    max_timeout_s: int = _SANDBOX.max_timeout_s
    min_free_disk_mib: int = _SANDBOX.min_free_disk_mib
    auto_resume_timeout_s: int = _SANDBOX.auto_resume_min_timeout_s
    fork_max: int = _SANDBOX.fork_max
    agent_timeout_s: float = _GUEST.init_timeout_s  # for a restored or booted guest to answer
    freeze_timeout_s: float = _GUEST.freeze_timeout_s
    operation_timeout_s: float = _SANDBOX.operation_timeout_s  # of every transitional state


@dataclass(frozen=True, slots=True)
class Live:
    """What a sandbox with a running VM holds on this node."""

    instance: Instance
    agent: Agent
    slot: Slot


@dataclass(slots=True)
class Host:
    """One node's parts."""

    settings: NodeSettings
    clock: Clock
    store: Store
    registry: Registry
    catalogue: Catalogue
    storage: Storage
    slots: Slots
    vmm: Vmm
    fingerprint: Fingerprint  # of this host's VMM and guest, probed at start
    agents: Agents
    credentials: Credentials
    operations: Operations
    tasks: Tasks
    timings: Timings
    collector: Collector
    spares: Spares
    # Every VM that takes up a slot, from the start of its process until the slot is given back.
    held: dict[SandboxId, Live] = field(default_factory=dict)
    # Those of them that serve: neither still starting nor being ended.
    live: dict[SandboxId, Live] = field(default_factory=dict)
    # Those that did not end when they were told to: the sweeper tries again.
    unended: set[SandboxId] = field(default_factory=set)
    # Records that this release cannot read: what they may refer to is left alone until someone has looked.
    quarantined: tuple[Quarantined, ...] = ()

    def run_dir(self, sandbox: Sandbox) -> Path:
        """Sockets and logs of one VM generation; short, because socket paths are."""
        return self.settings.runtime_dir / "vm" / f"{sandbox.id}.{sandbox.generation}"

    def plan(self, sandbox: Sandbox, slot: Slot, memory: Path, disk: BlockTarget) -> VmPlan:
        return VmPlan(
            sandbox_id=sandbox.id,
            generation=sandbox.generation,
            machine=sandbox.machine,
            kernel=self.settings.kernel,
            initramfs=self.settings.initramfs,
            memory_path=memory,
            disk=disk,
            netns=slot.netns,
            tap=slot.tap,
            run_dir=self.run_dir(sandbox),
            balloon=self.storage.balloon_safe,
        )
