"""The QEMU driver: VMMs started, found again, and ended.

A VMM is started with its monitor's socket already listening, so that connecting
needs no polling; it belongs to nobody's process group and outlives this server.
See `agentenv.vmm.plan` for what is started, `agentenv.vmm.instance` for what it can do.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
from pathlib import Path
from typing import Final, Literal

import structlog

from agentenv.aio.failures import FULL
from agentenv.aio.tasks import Tasks, to_its_end
from agentenv.config import schema
from agentenv.model.errors import AgentEnvError, Bug, Exhausted, Invalid, NoSpace, NotFound, Unavailable, Unsupported
from agentenv.model.machine import Fingerprint, ProcessIdentity
from agentenv.vmm.accelerator import probe_accelerator
from agentenv.vmm.console import OutputLog, tail
from agentenv.vmm.contract import Prepare, Spare, SparePlan, VmPlan
from agentenv.vmm.fingerprint import probe
from agentenv.vmm.instance import KILL_TIMEOUT_S, QemuInstance
from agentenv.vmm.plan import PID_FILE, Engine, argv, check, check_shape, monitor_path, spare_argv
from agentenv.vmm.process import Process, is_alive, kill_all, read_identity
from agentenv.vmm.qmp import Monitor, by_text
from agentenv.vmm.spare import QemuSpare, check_memory, ended
from agentenv.vmm.spawn import FIRST_INHERITED, Spawner
from agentenv.vmm.tsc import tsc_khz

MAX_STATE_BYTES: Final = 1 << 20
"""As much as a pipe can be made to hold: the whole state is put in before QEMU reads."""

_EXPLAIN_S: Final = 1.0
_VMM: Final = schema.Vmm()

_log = structlog.get_logger(__name__)


class QemuVmm:
    """See `agentenv.vmm.contract.Vmm`."""

    def __init__(
        self,
        *,
        binary: str | Path = _VMM.qemu_binary,
        accelerator: Literal["auto", "kvm", "tcg"] = _VMM.accelerator,
        guest_digest: str,
        tb_size_mib: int = _VMM.tb_size_mib,
        command_timeout_s: float = _VMM.command_timeout_s,
    ) -> None:
        """*binary*: name on the PATH, or path. *guest_digest*: of the kernel and initramfs that plans name."""
        self._binary = str(binary)
        self._asked_for = accelerator
        self._guest_digest = guest_digest
        self._tb_size_mib = tb_size_mib
        self._timeout_s = command_timeout_s
        self._spawner = Spawner()
        self._tasks = Tasks("vmm")
        self._instances: set[QemuInstance] = set()
        self._spares: set[QemuSpare] = set()
        self._probing = asyncio.Lock()
        self._engine: Engine | None = None
        self._fingerprint: Fingerprint | None = None

    def __repr__(self) -> str:
        return f"<QemuVmm {self._binary}: {len(self._instances)} instances>"

    async def close(self) -> None:
        """Let go of every instance; the VMs run on. No call may follow."""
        await self._tasks.close()
        for spare in list(self._spares):
            spare.release()
        self._spares.clear()
        for instance in list(self._instances):
            instance.release()
        self._instances.clear()
        await asyncio.to_thread(self._spawner.close)

    async def fingerprint(self) -> Fingerprint:
        async with self._probing:
            if self._fingerprint is None:
                self._fingerprint = await probe(
                    self._find_binary(),
                    await self._choose_engine(),
                    guest_digest=self._guest_digest,
                    spawner=self._spawner,
                    timeout_s=self._timeout_s,
                )
            return self._fingerprint

    async def boot(self, plan: VmPlan) -> QemuInstance:
        engine = await self._choose_engine()
        if engine.accelerator == "tcg":
            engine = Engine(engine.accelerator, engine.tb_size_mib, await asyncio.to_thread(tsc_khz))
        instance = await self._start(plan, engine, incoming=False)
        try:
            await instance.begin()
        except BaseException:
            await to_its_end("stop VMM", instance.stop())
            raise
        return instance

    async def start_spare(self, plan: SparePlan) -> QemuSpare:
        check_shape(plan)
        line = spare_argv(self._find_binary(), plan, await self._choose_engine(), monitor_fd=FIRST_INHERITED)
        try:
            spare = QemuSpare(plan, *await self._spawn(plan, line))
        except BaseException:
            await to_its_end("remove run directory", asyncio.to_thread(shutil.rmtree, plan.run_dir, True))
            raise
        self._spares.add(spare)
        spare.on_done(lambda: self._spares.discard(spare))
        return spare

    async def restore(
        self, plan: VmPlan, device_state: Path, prepare: Prepare, spare: Spare | None = None
    ) -> QemuInstance:
        """See `Vmm`. `Bug` if QEMU does not take the state, with what it says; `NotFound` if there is no state."""
        try:
            return await self._restore(plan, device_state, prepare, spare)
        except BaseException:
            if spare is not None:
                await to_its_end("stop spare VMM", spare.stop())
            raise

    async def _restore(self, plan: VmPlan, device_state: Path, prepare: Prepare, spare: Spare | None) -> QemuInstance:
        engine = await self._choose_engine()
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                fill = asyncio.to_thread(_fill_pipe, device_state, writer)
                await to_its_end("read device state", fill)
            finally:
                os.close(writer)
            instance = await self._waiting(plan, engine, spare)
            try:
                await prepare(instance.process.pid)
                await self._load(instance, reader)
            except BaseException:
                await to_its_end("stop VMM", instance.stop())
                raise
            return instance
        finally:
            os.close(reader)

    async def adopt(self, plan: VmPlan, process: ProcessIdentity) -> QemuInstance:
        watched = Process(process)
        output = OutputLog.of(process.pid)
        try:
            monitor = await Monitor.connect(monitor_path(plan), timeout_s=self._timeout_s)
        except BaseException as error:
            watched.close()
            if output is not None:
                output.close()
            if isinstance(error, Unavailable) and not is_alive(process):
                raise NotFound(f"process {process.pid} is gone") from error
            raise
        instance = self._hold(QemuInstance(plan, watched, monitor, output, self._tasks))
        try:
            await instance.begin()
        except BaseException:
            instance.release()
            raise
        return instance

    async def reap(self, root: Path, keep: frozenset[int]) -> list[int]:
        return await asyncio.to_thread(_reap, root, keep)

    def _find_binary(self) -> Path:
        found = shutil.which(self._binary)
        if found is None:
            raise Unsupported(f"there is no program {self._binary}", hint="on Debian, install qemu-system-x86")
        return Path(found)

    async def _choose_engine(self) -> Engine:
        if self._engine is None:
            kind = self._asked_for
            if kind == "auto":
                found = await asyncio.to_thread(probe_accelerator)
                _log.info("accelerator %s: %s", found.kind, found.reason)
                kind = found.kind
            self._engine = Engine(kind, self._tb_size_mib)
        return self._engine

    def _hold(self, instance: QemuInstance) -> QemuInstance:
        self._instances.add(instance)
        instance.on_end(lambda: self._instances.discard(instance))
        return instance

    async def _waiting(self, plan: VmPlan, engine: Engine, spare: Spare | None) -> QemuInstance:
        """Return a VMM that waits for device state: *spare*, or a new one if that is no good."""
        if isinstance(spare, QemuSpare):
            try:
                check(plan)
                instance = await spare.furnish(plan, self._tasks)
            except (NotFound, Invalid):
                raise
            except AgentEnvError as error:
                await ended(spare, error)
            else:
                self._spares.discard(spare)
                return self._hold(instance)
        return await self._start(plan, engine, incoming=True)

    async def _start(self, plan: VmPlan, engine: Engine, *, incoming: bool) -> QemuInstance:
        """Start a VMM and shake hands with it; *incoming*: one that waits for device state."""
        check(plan)
        await asyncio.to_thread(check_memory, plan)
        line = argv(self._find_binary(), plan, engine, monitor_fd=FIRST_INHERITED, incoming=incoming)
        process, monitor, output = await self._spawn(plan, line)
        return self._hold(QemuInstance(plan, process, monitor, output, self._tasks))

    async def _spawn(self, plan: VmPlan | SparePlan, line: list[str]) -> tuple[Process, Monitor, OutputLog]:
        output = OutputLog.create()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                await to_its_end("make run directory", asyncio.to_thread(_make_run_dir, plan, listener))
                started = await self._spawner.spawn(
                    line, netns=plan.netns, output=output.fileno(), inherit=[listener.fileno()], interface=plan.tap
                )
        except BaseException:
            output.close()
            raise
        process = Process(started.identity, pidfd=started.pidfd)
        try:
            monitor = await Monitor.connect(monitor_path(plan), timeout_s=self._timeout_s)
        except BaseException as error:
            why = await to_its_end("end VMM", _end(process, output, error))
            if why is error:
                raise
            raise why from error
        return process, monitor, output

    async def _load(self, instance: QemuInstance, state: int) -> None:
        try:
            await instance.load(state, timeout_s=self._timeout_s)
        except Unavailable as error:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXPLAIN_S):
                    ended = await instance.wait_exit()
                    if ended.code is not None and ended.code > 0:
                        raise by_text(f"QEMU does not load the device state: {ended.log_tail}") from error
            raise


async def _end(process: Process, output: OutputLog, error: BaseException) -> BaseException:
    """Make sure that a VMM which did not come up is gone; return the error that says why it did not."""
    try:
        if isinstance(error, Unavailable):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXPLAIN_S):
                    await process.wait()
        ended_by_itself = process.has_ended
        process.kill()
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            _log.error("process %d has not ended after it was killed", process.identity.pid)
        if ended_by_itself and isinstance(error, Unavailable):
            said = tail(output.text().strip()) or "it said nothing"
            return by_text(f"QEMU ended with status {process.code}: {said}", otherwise=Unavailable)
        return error
    finally:
        process.close()
        output.close()


def _make_run_dir(plan: VmPlan | SparePlan, listener: socket.socket) -> None:
    """Make the directory, and *listener* the socket in it that the VMM's monitor will answer."""
    try:
        plan.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = monitor_path(plan)
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(1)
        # Two threads of QEMU may wake up for one connection while it starts: the one that finds it taken must
        # not wait in the kernel for the next, with the whole VMM behind it (seen once in 2500 starts).
        listener.setblocking(False)
    except OSError as error:
        message = f"cannot make {plan.run_dir}: {error.strerror}"
        raise NoSpace(message) if error.errno in FULL else Bug(message) from error


def _fill_pipe(device_state: Path, writer: int) -> None:
    try:
        data = device_state.read_bytes()
    except OSError as error:
        raise NotFound(f"device state {device_state}: {error.strerror}") from error
    if not data:
        raise Bug(f"device state {device_state} is empty")
    if len(data) > MAX_STATE_BYTES:
        raise Unsupported(f"device state {device_state} has {len(data)} bytes, and may have {MAX_STATE_BYTES}")
    try:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, max(len(data), 4096))
    except OSError as error:
        raise Exhausted(f"cannot get a pipe for device state: {error.strerror}") from error
    written = os.write(writer, data)
    if written != len(data):
        raise Bug(f"a pipe took {written} of {len(data)} bytes")


def _reap(root: Path, keep: frozenset[int]) -> list[int]:
    found = [identity for identity in _vmms_below(root) if identity.pid not in keep]
    for stuck in kill_all(found, timeout_s=KILL_TIMEOUT_S):
        _log.error("VMM %d has not ended after it was killed", stuck.pid)
    return [identity.pid for identity in found]


def _vmms_below(root: Path) -> list[ProcessIdentity]:
    """Every VMM of ours is known by the pid file that its command line names."""
    base = Path(os.path.abspath(root))  # noqa: PTH100 - lexically: the directory may be gone
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        identity = read_identity(int(entry.name))
        with contextlib.suppress(OSError, ValueError):
            words = Path(entry.path, "cmdline").read_bytes().split(b"\0")
            pid_file = Path(os.path.abspath(os.fsdecode(words[words.index(b"-pidfile") + 1])))  # noqa: PTH100
            if identity is not None and pid_file.name == PID_FILE and pid_file.is_relative_to(base):
                found.append(identity)
    return found
