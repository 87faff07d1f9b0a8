"""A QEMU process that was started ahead of need: its machine is not built, and fits any memory and disk.

It stands in QEMU's "preconfig" state: started, in its namespace, its monitor open, and
nothing of a guest in it. What is left to do when a sandbox comes takes a third of the
time, and none of it depends on which snapshot that sandbox starts from.
"""

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from typing import Final

import structlog

from agentenv.aio.failpoints import failpoint
from agentenv.aio.failures import FULL
from agentenv.aio.tasks import Tasks, to_its_end
from agentenv.model.errors import AgentEnvError, Bug, Invalid, NoSpace, NotFound, Unavailable
from agentenv.model.machine import ProcessIdentity
from agentenv.vmm.console import OutputLog
from agentenv.vmm.contract import SparePlan, VmPlan
from agentenv.vmm.instance import KILL_TIMEOUT_S, QemuInstance
from agentenv.vmm.plan import furnishing
from agentenv.vmm.process import Process, kill_all
from agentenv.vmm.qmp import Monitor

ANSWER_TIMEOUT_S: Final = 1.0
"""For the first command: a spare that has hung since it was started costs a restore no more than this."""

_log = structlog.get_logger(__name__)


class QemuSpare:
    """See `agentenv.vmm.contract.Spare`."""

    def __init__(self, plan: SparePlan, process: Process, monitor: Monitor, output: OutputLog) -> None:
        self._plan = plan
        self._process = process
        self._monitor = monitor
        self._output = output
        self._taken = False
        self._done = asyncio.Event()  # ended, or taken
        self._stopping = asyncio.Lock()
        process.on_end(self._on_end)

    def __repr__(self) -> str:
        return f"<QemuSpare {self._plan.name} {self._process!r}{' taken' if self._taken else ''}>"

    @property
    def process(self) -> ProcessIdentity:
        return self._process.identity

    @property
    def plan(self) -> SparePlan:
        return self._plan

    @property
    def is_alive(self) -> bool:
        return not (self._taken or self._process.has_ended or self._monitor.is_lost)

    async def wait_exit(self) -> None:
        await self._done.wait()

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call *callback* from the loop once the process has ended; at once if it has."""
        self._process.on_end(callback)

    async def furnish(self, plan: VmPlan, tasks: Tasks) -> QemuInstance:
        """Make it the VMM of *plan*, which waits for device state then.

        Whatever is raised: it is no VMM of anything, and `stop` ends it. `NotFound` and
        `Invalid` are about the plan, and no other VMM will do better with it.
        """
        if not self.is_alive:
            raise Unavailable(f"the spare {self._plan.name} has ended")
        if not self._plan.fits(plan):
            raise Bug(f"the spare {self._plan.name} was made for another machine or slot")
        await to_its_end("take over run directory", asyncio.to_thread(_take_run_dir, self._plan, plan))
        await failpoint("spare.renamed")
        timeout_s: float | None = ANSWER_TIMEOUT_S
        for command, arguments in furnishing(plan):
            await self._monitor.execute(command, arguments, timeout_s=timeout_s)
            timeout_s = None
        await failpoint("spare.furnished")
        self._taken = True
        self._done.set()
        return QemuInstance(plan, self._process, self._monitor, self._output, tasks)

    async def stop(self) -> None:
        if self._taken:
            return
        async with self._stopping:
            if not await to_its_end(f"stop spare {self._plan.name}", self._stop()):
                raise Unavailable(f"the spare VMM {self.process.pid} has not ended after it was killed")

    async def _stop(self) -> bool:
        self._process.kill()
        gone = True
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            gone = False
        except Unavailable:  # no longer watched: the driver is closed
            gone = not await asyncio.to_thread(kill_all, [self.process], timeout_s=KILL_TIMEOUT_S)
        self.release()
        await asyncio.to_thread(shutil.rmtree, self._plan.run_dir, ignore_errors=True)
        return gone

    def release(self) -> None:
        """Let go of it; the process lives on, and the next server reaps it. Idempotent."""
        if not self._taken:
            self._monitor.close()
            self._process.close()
            self._output.close()

    def _on_end(self) -> None:
        self._done.set()
        self.release()


def check_memory(plan: VmPlan) -> None:
    """Raises `NotFound` or `Invalid` unless the memory of *plan* is there, and large enough."""
    try:
        size = plan.memory_path.stat().st_size
    except OSError as error:
        raise NotFound(f"guest memory {plan.memory_path}: {error.strerror}") from error
    if size < plan.machine.memory_bytes:
        # QEMU would make the file longer, and it may be shared.
        raise Invalid(f"guest memory {plan.memory_path} has {size} bytes, not {plan.machine.memory_bytes}")


def _take_run_dir(spare: SparePlan, plan: VmPlan) -> None:
    """Give the directory the sandbox's name, in one step: a crash leaves it under the old name or the new one."""
    check_memory(plan)
    try:
        spare.run_dir.rename(plan.run_dir)
    except OSError as error:
        message = f"cannot make {plan.run_dir}: {error.strerror}"
        raise NoSpace(message) if error.errno in FULL else Bug(message) from error


async def ended(spare: QemuSpare, why: AgentEnvError) -> None:
    """End a spare that could not be used, and say so; raises nothing but cancellation."""
    _log.warning("the spare VMM %s is of no use (%s): one is started instead", spare.plan.name, why)
    with contextlib.suppress(Unavailable):
        await spare.stop()
