"""A VMM driver with no VMs, for tests of verbs. It passes the same contract suite as QEMU.

A `FakeHypervisor` is the host: the processes on it live on when a driver is closed,
and another driver of it adopts or reaps them, as after a restart of the server. Pids
are made up; no process of the real host is ever touched.
"""

import asyncio
import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agentenv.aio.tasks import spawn
from agentenv.model.errors import Bug, Conflict, NotFound, Unavailable
from agentenv.model.machine import BlockTarget, Fingerprint, ProcessIdentity
from agentenv.vmm.contract import Prepare, Spare, SparePlan, VmmExit, VmPlan

FINGERPRINT: Final = Fingerprint("fake", "1.0", "none", "none", "0" * 64)
KILLED: Final = -9

_NO_DISK: Final = BlockTarget(Path("/nonexistent"), "raw")  # of a spare
_FIRST_PID: Final = 10_000_000  # above what a kernel gives out


@dataclass(eq=False, slots=True)
class FakeProcess:
    """One VMM on a `FakeHypervisor`. ``code`` is set once it has ended, ``started_as`` is a spare's at first."""

    identity: ProcessIdentity
    started_as: VmPlan | SparePlan
    disk: BlockTarget
    running: bool = False
    loaded: bool = True
    code: int | None = None
    words: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def plan(self) -> VmPlan:
        assert isinstance(self.started_as, VmPlan), "a spare"
        return self.started_as

    @property
    def alive(self) -> bool:
        return not self.ended.is_set()

    def end(self, code: int, words: str = "") -> None:
        """Let it end, as by a signal (negative), by itself (0), or of a failure."""
        if self.alive:
            self.code, self.words, self.running = code, words, False
            self.ended.set()


@dataclass(slots=True)
class FakeHypervisor:
    """Every VMM process of a made-up host, ended ones too."""

    processes: dict[int, FakeProcess] = field(default_factory=dict)
    _pids: Iterator[int] = field(default_factory=lambda: itertools.count(_FIRST_PID))

    @property
    def alive(self) -> list[FakeProcess]:
        return [process for process in self.processes.values() if process.alive]

    def start(self, plan: VmPlan | SparePlan, *, running: bool) -> FakeProcess:
        pid = next(self._pids)
        disk = plan.disk if isinstance(plan, VmPlan) else _NO_DISK
        process = FakeProcess(ProcessIdentity(pid, start_time=pid), plan, disk, running)
        self.processes[pid] = process
        return process

    def require(self, process: FakeProcess) -> None:
        """Raises `Unavailable` if it has ended."""
        if not process.alive:
            raise Unavailable(f"process {process.identity.pid} is gone")

    def find(self, identity: ProcessIdentity) -> FakeProcess:
        """Raises `NotFound` if that very process is gone."""
        process = self.processes.get(identity.pid)
        if process is None or process.identity != identity or not process.alive:
            raise NotFound(f"process {identity.pid} is gone")
        return process


@dataclass(slots=True)
class FakeVmm:
    """See `agentenv.vmm.contract.Vmm`.

    Tests set ``fail`` to make a call raise and ``stall`` to make it hang until ``go``
    is set; ``reached`` tells that it hangs. Both are by name of the call, those of
    instances included, and last until taken back. A call fails before it does
    anything, except that "restore" has started its process by then, and "prepared" is
    the point in a restore after its memory was prepared.
    """

    hypervisor: FakeHypervisor = field(default_factory=FakeHypervisor)
    fail: dict[str, Exception] = field(default_factory=dict)
    stall: set[str] = field(default_factory=set)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[tuple[str, str]] = field(default_factory=list)
    closed: bool = False

    async def fingerprint(self) -> Fingerprint:
        await self.step("fingerprint", "")
        return FINGERPRINT

    async def boot(self, plan: VmPlan) -> "FakeInstance":
        await self.step("boot", plan.sandbox_id)
        _make_run_dir(plan)
        return FakeInstance(self, self.hypervisor.start(plan, running=True))

    async def start_spare(self, plan: SparePlan) -> "FakeSpare":
        await self.step("start_spare", plan.name)
        _make_run_dir(plan)
        return FakeSpare(self, plan, self.hypervisor.start(plan, running=False))

    async def restore(
        self, plan: VmPlan, device_state: Path, prepare: Prepare, spare: Spare | None = None
    ) -> "FakeInstance":
        try:
            _check_device_state(device_state)
            process = await self._waiting(plan, spare)
        except BaseException:
            if spare is not None:
                await spare.stop()
            raise
        process.loaded = False
        try:
            await self.step("restore", plan.sandbox_id)
            await prepare(process.identity.pid)
            await self.step("prepared", plan.sandbox_id)
            self.hypervisor.require(process)
        except BaseException:
            process.end(KILLED)
            raise
        process.loaded = True
        return FakeInstance(self, process)

    async def _waiting(self, plan: VmPlan, spare: Spare | None) -> FakeProcess:
        if isinstance(spare, FakeSpare):
            if spare.is_alive and spare.plan.fits(plan) and "furnish" not in self.fail:
                return spare.become(plan)
            await spare.stop()
        _make_run_dir(plan)
        return self.hypervisor.start(plan, running=False)

    async def adopt(self, plan: VmPlan, process: ProcessIdentity) -> "FakeInstance":
        await self.step("adopt", plan.sandbox_id)
        return FakeInstance(self, self.hypervisor.find(process))

    async def reap(self, root: Path, keep: frozenset[int]) -> list[int]:
        await self.step("reap", "")
        strays = [
            process
            for process in self.hypervisor.alive
            if process.started_as.run_dir.is_relative_to(root) and process.identity.pid not in keep
        ]
        for process in strays:
            process.end(KILLED)
        return [process.identity.pid for process in strays]

    async def close(self) -> None:
        self.closed = True

    async def step(self, name: str, sandbox_id: str) -> None:
        """Note a call, then hang or fail if that is wanted of it."""
        self.calls.append((name, sandbox_id))
        await asyncio.sleep(0)  # a real call always lets others run
        if name in self.stall:
            self.reached.set()
            await self.go.wait()
        if name in self.fail:
            raise self.fail[name]


@dataclass(eq=False, slots=True)
class FakeSpare:
    """See `agentenv.vmm.contract.Spare`. A failure of "furnish" is found out when it is used."""

    vmm: FakeVmm
    plan: SparePlan
    vm: FakeProcess
    taken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def process(self) -> ProcessIdentity:
        return self.vm.identity

    @property
    def is_alive(self) -> bool:
        return self.vm.alive and not self.taken.is_set()

    def become(self, plan: VmPlan) -> FakeProcess:
        self.plan.run_dir.rename(plan.run_dir)
        self.vm.started_as, self.vm.disk = plan, plan.disk
        self.taken.set()
        return self.vm

    async def wait_exit(self) -> None:
        ended, taken = spawn("ended", self.vm.ended.wait()), spawn("taken", self.taken.wait())
        try:
            await asyncio.wait((ended, taken), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            taken.cancel()

    async def stop(self) -> None:
        if not self.taken.is_set():
            self.vm.end(KILLED)
            shutil.rmtree(self.plan.run_dir, ignore_errors=True)


@dataclass(eq=False, slots=True)
class FakeInstance:
    """See `agentenv.vmm.contract.Instance`. ``vm`` is the process behind it."""

    vmm: FakeVmm
    vm: FakeProcess

    @property
    def process(self) -> ProcessIdentity:
        return self.vm.identity

    @property
    def plan(self) -> VmPlan:
        return self.vm.plan

    async def pause(self) -> None:
        await self._call("pause")
        self.vm.running = False

    async def resume(self) -> None:
        await self._call("resume")
        self.vm.running = True

    async def save_device_state(self, path: Path) -> None:
        await self._call("save_device_state")
        if self.vm.running:
            raise Conflict("device state is saved of a paused VM, and this one runs")
        state = {"fake": "device state", "sandbox": self.plan.sandbox_id, "generation": self.plan.generation}
        await asyncio.to_thread(_write, path, json.dumps(state))

    async def switch_disk(self, target: BlockTarget) -> None:
        await self._call("switch_disk")
        if not target.path.exists():
            raise Bug(f"no disk {target.path}")
        self.vm.disk = target

    async def log_tail(self) -> str:
        return self.vm.words

    async def console(self) -> str:
        return self.vm.words

    async def wait_exit(self) -> VmmExit:
        await self.vm.ended.wait()
        return VmmExit(self.vm.code, self.vm.words)

    async def stop(self) -> None:
        await self.vmm.step("stop", self.plan.sandbox_id)
        self.vm.end(KILLED)

    async def _call(self, name: str) -> None:
        await self.vmm.step(name, self.plan.sandbox_id)
        self.vmm.hypervisor.require(self.vm)
        if not self.vm.loaded:
            raise Unavailable("the VMM never got its device state")


def _make_run_dir(plan: VmPlan | SparePlan) -> None:
    plan.run_dir.mkdir(parents=True, exist_ok=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise Bug(f"cannot write {path}: {error.strerror}") from error


def _check_device_state(path: Path) -> None:
    try:
        state = json.loads(path.read_text())
    except OSError as error:
        raise NotFound(f"device state {path}: {error.strerror}") from error
    except ValueError:
        state = None
    if not isinstance(state, dict) or state.get("fake") != "device state":
        raise Bug(f"{path} is not a device state")
