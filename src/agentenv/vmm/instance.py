"""One QEMU process, from start to stop: what a verb may do to it.

A guest can end by itself (power-off, reboot, panic) or be stopped by QEMU because
the host's disk is full. The first is read out and ended, so that its process exits
with status 0 and the console's last words are known; the second is let go on as
soon as there is space, as if nothing had happened.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

import structlog

from agentenv.aio.tasks import Tasks, to_its_end
from agentenv.model.errors import AgentEnvError, Bug, Conflict, Invalid, Unavailable
from agentenv.model.machine import BlockTarget, ProcessIdentity
from agentenv.vmm.console import Console, OutputLog, tail
from agentenv.vmm.contract import VmmExit, VmPlan
from agentenv.vmm.device_state import save_device_state
from agentenv.vmm.plan import DISK_DEVICE, block_node, monitor_path
from agentenv.vmm.process import Process, kill_all
from agentenv.vmm.qmp import Event, Monitor

KILL_TIMEOUT_S: Final = 10.0
_RETRY_S: Final = 1.0
_QUIT_TIMEOUT_S: Final = 2.0
_ENDED: Final = frozenset({"shutdown", "guest-panicked", "internal-error"})
_NO_STATE: Final = frozenset({"inmigrate", "prelaunch"})

_log = structlog.get_logger(__name__)


class QemuInstance:
    """See `agentenv.vmm.contract.Instance`."""

    def __init__(
        self, plan: VmPlan, process: Process, monitor: Monitor, output: OutputLog | None, tasks: Tasks
    ) -> None:
        self._plan = plan
        self._process = process
        self._monitor = monitor
        self._output = output
        self._console = Console(monitor)
        self._tasks = tasks
        self._run_lock = asyncio.Lock()  # whoever changes whether the guest runs
        self._wants_to_run = False
        self._retrying = False
        self._disk_errors = 0
        self._ending = False
        self._status_at_start = "inmigrate"
        self._last_words: str | None = None
        monitor.listen(self._on_event)
        process.on_end(self._on_end)

    def __repr__(self) -> str:
        return f"<QemuInstance {self._plan.sandbox_id} {self._process!r}>"

    @property
    def process(self) -> ProcessIdentity:
        return self._process.identity

    @property
    def plan(self) -> VmPlan:
        return self._plan

    async def begin(self) -> None:
        """Find out what the VMM is doing, and see to it. Called once, before anything else but `load`."""
        self._status_at_start = status = await self._status()
        self._wants_to_run = status in ("running", "io-error")
        if status in _ENDED:
            self._end_soon()
        elif status == "io-error":
            self._retry_soon()

    async def load(self, pipe: int, *, timeout_s: float) -> None:
        """Load the device state that comes out of *pipe*; the VM is paused then.

        Raises `Bug` if QEMU says that it does not take it; mostly it ends instead (`Unavailable`).
        """
        ended = self._monitor.expect(_migration_ended)
        try:
            await self._monitor.execute("getfd", {"fdname": "state"}, fds=(pipe,))
            await self._monitor.execute("migrate-incoming", {"uri": "fd:state"})
            async with asyncio.timeout(timeout_s):
                outcome = await ended
        except TimeoutError:
            raise Unavailable(f"QEMU did not load the device state within {timeout_s:g} s") from None
        finally:
            ended.cancel()
        if outcome.data["status"] != "completed":
            raise Bug(f"QEMU does not load the device state: {outcome.data['status']}")
        self._status_at_start = "paused"

    async def pause(self) -> None:
        self._check_usable()
        async with self._run_lock:
            await self._monitor.execute("stop")
            self._wants_to_run = False
        self._check_usable()

    async def resume(self) -> None:
        self._check_usable()
        async with self._run_lock:
            self._wants_to_run = True
            try:
                await self._monitor.execute("cont")
            except Bug:
                self._check_usable()
                raise

    async def save_device_state(self, path: Path) -> None:
        self._check_usable()
        if await self._status() == "running":
            raise Conflict("device state is saved of a paused VM, and this one runs")
        self._check_usable()
        await save_device_state(self._monitor, path)

    async def switch_disk(self, target: BlockTarget) -> None:
        if target.format != "qcow2":
            raise Invalid(f"a {target.format} file cannot stand on the present disk", hint="give a qcow2 overlay")
        self._check_usable()
        await to_its_end("switch disk", self._switch_disk(target))

    async def log_tail(self) -> str:
        if self._last_words is None and not self._monitor.is_lost:
            await self._console.drain()
        return self._last_words if self._last_words is not None else self._words()

    async def console(self) -> str:
        if not self._monitor.is_lost:
            await self._console.drain()
        return self._console.text()

    async def wait_exit(self) -> VmmExit:
        code = await self._process.wait()
        return VmmExit(code, self._last_words or "")

    async def stop(self) -> None:
        if not await self._kill():
            raise Unavailable(
                f"process {self.process.pid} has not ended {KILL_TIMEOUT_S:g} s after it was killed",
                hint="it waits in the kernel, for a disk or a file system that does not answer",
            )
        monitor_path(self._plan).unlink(missing_ok=True)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call *callback* from the loop once the process has ended."""
        self._process.on_end(callback)

    def release(self) -> None:
        """Let go of the VMM, which lives on. Idempotent."""
        self._monitor.close()
        self._process.close()
        if self._output is not None:
            self._output.close()

    async def _kill(self) -> bool:
        """Return whether the process is gone."""
        if not self._process.has_ended and not self._process.is_watched:
            left = await asyncio.to_thread(kill_all, [self.process], timeout_s=KILL_TIMEOUT_S)
            return not left
        self._process.kill()
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def _status(self) -> str:
        answer = await self._monitor.execute("query-status")
        match answer:
            case {"status": str(status)}:
                return status
            case _:
                raise Bug(f"QEMU does not say what it is doing: {answer!r}")

    def _check_usable(self) -> None:
        if self._status_at_start in _NO_STATE:
            raise Unavailable("the VMM never got its device state: the server ended while it was starting")
        # The event comes before the answer to any later command: nobody captures a guest that has powered off.
        if self._ending:
            raise Unavailable("the guest has ended itself")

    async def _switch_disk(self, target: BlockTarget) -> None:
        present = await self._disk_node()
        name = f"disk-{int(present.rpartition('-')[2]) + 1}"
        await self._monitor.execute("blockdev-add", block_node(name, target, without_backing=True))
        try:
            await self._monitor.execute("blockdev-snapshot", {"node": present, "overlay": name})
        except AgentEnvError:
            with contextlib.suppress(AgentEnvError):
                await self._monitor.execute("blockdev-del", {"node-name": name})
            raise

    async def _disk_node(self) -> str:
        """Return the name of the topmost node of the guest's disk: an earlier server may have switched it."""
        answer = await self._monitor.execute("query-block")
        for device in answer if isinstance(answer, list) else []:
            match device:
                case {"qdev": str(path), "inserted": {"node-name": str(name)}} if DISK_DEVICE in path.split("/"):
                    return name
        raise Bug("QEMU does not know the guest's disk")

    def _on_event(self, event: Event) -> None:
        match event:
            case Event("SHUTDOWN" | "GUEST_PANICKED"):
                self._end_soon()
            case Event("BLOCK_IO_ERROR", {"action": "stop"}):
                self._disk_errors += 1
                self._retry_soon()

    def _end_soon(self) -> None:
        if not self._ending:
            self._ending = True
            self._background("end", self._end())

    def _retry_soon(self) -> None:
        if not self._retrying:
            self._retrying = True
            self._background("retry disk", self._retry())

    def _background(self, name: str, work: Coroutine[object, object, None]) -> None:
        with contextlib.suppress(Unavailable):  # the driver is closed: the next server will look
            self._tasks.start(f"{name} {self._plan.sandbox_id}", work)

    async def _end(self) -> None:
        """The guest has ended itself: keep its last words and let the process go, with status 0."""
        await self._console.drain()
        with contextlib.suppress(AgentEnvError):
            await self._monitor.execute("quit", timeout_s=_QUIT_TIMEOUT_S)
        try:
            async with asyncio.timeout(_QUIT_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()

    async def _retry(self) -> None:
        """The host's disk is full, and QEMU holds the guest's writes: try again until they go through."""
        _log.warning("sandbox %s stands still: the host's disk is full or fails", self._plan.sandbox_id)
        try:
            while not self._process.has_ended:
                await asyncio.sleep(_RETRY_S)
                async with self._run_lock:
                    seen = self._disk_errors
                    stopped = await self._status() == "io-error"
                    if stopped and self._wants_to_run:
                        await self._monitor.execute("cont")
                    elif seen == self._disk_errors:  # else it was stopped again right after it answered
                        return
        except AgentEnvError as error:
            _log.warning("sandbox %s: cannot go on after a disk error: %s", self._plan.sandbox_id, error)
        finally:
            self._retrying = False

    def _words(self) -> str:
        said = [self._output.text() if self._output is not None else "", self._console.text()]
        return "\n".join(tail(text.strip()) for text in said if text.strip())

    def _on_end(self) -> None:
        self._last_words = self._words()
        self.release()


def _migration_ended(event: Event) -> bool:
    return event.name == "MIGRATION" and event.data.get("status") in ("completed", "failed", "cancelled")
