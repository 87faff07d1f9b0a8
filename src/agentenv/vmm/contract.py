"""What a verb may ask of a virtual machine monitor. QEMU and Firecracker give the same.

A driver starts VMM processes that outlive this server, finds them again after a
restart, and saves and loads *device* state. Guest memory and disks belong to
storage: a driver only opens the paths that a plan names.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from agentenv.model.ids import SandboxId
from agentenv.model.machine import BlockTarget, Fingerprint, Machine, ProcessIdentity


@dataclass(frozen=True, slots=True)
class VmPlan:
    """Everything that a VMM's command line is made from. Pure values, no I/O."""

    sandbox_id: SandboxId
    generation: int
    machine: Machine
    kernel: Path
    initramfs: Path
    memory_path: Path  # mapped privately: written pages stay in the VMM
    disk: BlockTarget
    netns: Path
    tap: str
    run_dir: Path  # of this generation: monitor socket and pid file; the driver makes it, the verb removes it
    balloon: bool = False  # only over memory whose path survives hole punches
    init: str | None = None  # the image's own init to run as PID 1 beside the agent


@dataclass(frozen=True, slots=True)
class SparePlan:
    """A VMM that is started before it is known for whom: all of a `VmPlan` that its first moments need."""

    name: str
    machine: Machine
    netns: Path
    tap: str
    run_dir: Path  # becomes that of the sandbox; beside it, so that the driver finds it in the same way
    balloon: bool = False

    def fits(self, plan: VmPlan) -> bool:
        """Whether a spare made by this plan can become the VMM of *plan*. Disks are of any size."""
        return (
            self.machine.vcpu_count == plan.machine.vcpu_count
            and self.machine.memory_mib == plan.machine.memory_mib
            and (self.netns, self.tap, self.balloon) == (plan.netns, plan.tap, plan.balloon)
        )


@dataclass(frozen=True, slots=True)
class VmmExit:
    """How a VMM ended: ``code`` is negative for a signal, 0 where the guest ended itself (power-off,
    reboot, panic), None where it was not our child.

    ``log_tail`` is what it last said.
    """

    code: int | None
    log_tail: str


Prepare: TypeAlias = Callable[[int], Awaitable[None]]


class Instance(Protocol):
    """One VMM process, from start to stop.

    Every call is bounded by the driver's own time-out and raises `Unavailable`
    when the VMM is gone or silent; none needs a healthy guest.
    """

    @property
    def process(self) -> ProcessIdentity: ...

    @property
    def plan(self) -> VmPlan: ...

    async def pause(self) -> None:
        """Stop the virtual CPUs and drain the disk; return when nothing in the guest moves. Idempotent."""
        ...

    async def resume(self) -> None:
        """Let the virtual CPUs run. Idempotent."""
        ...

    async def save_device_state(self, path: Path) -> None:
        """Write device state, without memory, to *path*. The VM is paused and stays so.

        Whoever keeps the file makes it durable; it is written once and lost with the host until then.
        Raises `Conflict` if it runs, `NoSpace` if the disk is full; then *path* is not there.
        """
        ...

    async def switch_disk(self, target: BlockTarget) -> None:
        """Make guest writes go to *target*, an empty file whose backing is the present disk.

        Works on a running and on a paused VM; when it raises, nothing was switched. Not
        cut short by cancelling.
        """
        ...

    async def log_tail(self) -> str:
        """Return what the VMM and the guest's console said last, a few KiB at most. Never raises."""
        ...

    async def console(self) -> str:
        """Return what is kept of the guest's console, 64 KiB at most. Never raises."""
        ...

    async def wait_exit(self) -> VmmExit:
        """Return when the process has ended, however it ended. Any number of callers."""
        ...

    async def stop(self) -> None:
        """Kill the VMM and return when the process is gone (pid and start time). Idempotent; never needs the guest."""
        ...


class Spare(Protocol):
    """A VMM without memory and disk, waiting in a network slot until a sandbox needs one."""

    @property
    def process(self) -> ProcessIdentity: ...

    @property
    def plan(self) -> SparePlan: ...

    @property
    def is_alive(self) -> bool:
        """As far as is known without asking it: one that hangs is found out when it is used."""
        ...

    async def wait_exit(self) -> None:
        """Return when it has ended, or has been given to a restore."""
        ...

    async def stop(self) -> None:
        """Kill it, remove its directory and return when the process is gone. Idempotent.

        Does nothing to a VMM that a restore has taken over. Raises `Unavailable` if it does not end.
        """
        ...


class Vmm(Protocol):
    """A driver."""

    async def fingerprint(self) -> Fingerprint:
        """What snapshots made here need in order to load. Probed once, then cached.

        Raises `Unsupported` when the VMM is missing or lacks what we need; the hint says what to install.
        """
        ...

    async def boot(self, plan: VmPlan) -> Instance:
        """Start a fresh VM on zeroed memory; return when it runs (not when the guest is ready)."""
        ...

    async def start_spare(self, plan: SparePlan) -> Spare:
        """Start a VMM ahead of need; return when it waits. Cancelled or failed, nothing of it is left."""
        ...

    async def restore(self, plan: VmPlan, device_state: Path, prepare: Prepare, spare: Spare | None = None) -> Instance:
        """Start a VMM, let *prepare* finish its memory, load *device_state*; return it paused.

        *spare*, one of this driver's whose plan fits, becomes that VMM, in *plan*'s
        directory, and from the call on it is no spare any more, also when this raises.
        One that turns out to be dead or silent is ended, and a VMM started as without it.

        *prepare* is called with the pid once the memory path is mapped and before any
        device state is loaded. Cancelled or failed, no process is left behind. Raises
        `NotFound` if there is no such state, `Bug` with the VMM's words if it does not load.
        """
        ...

    async def adopt(self, plan: VmPlan, process: ProcessIdentity) -> Instance:
        """Take over a VMM started by an earlier server; `NotFound` if that very process is gone."""
        ...

    async def reap(self, root: Path, keep: frozenset[int]) -> list[int]:
        """Kill every VMM whose run directory is below *root* and whose pid is not in *keep*; return their pids."""
        ...

    async def close(self) -> None:
        """Let go of every instance; the VMs run on. No call may follow. Idempotent."""
        ...
