"""Write down a running VM: user code frozen, CPUs stopped, state and memory saved.

User processes are frozen by the agent first, so that whatever starts from the
capture can be given its clock, its entropy and its identity before they move.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import structlog

from agentenv.aio.failpoints import failpoint
from agentenv.model.errors import AgentEnvError, Bug, Conflict, DeadlineExceeded, Unavailable
from agentenv.model.ids import BlobId, LayerId, SandboxId
from agentenv.model.lifecycle import Event, State
from agentenv.model.sandbox import Sandbox
from agentenv.model.snapshot import Capture
from agentenv.node.alive import GuestUnresponsive, VmEnded, while_alive
from agentenv.node.host import Host, Live
from agentenv.node.lose import lose

KILL = "kill"  # the name of the operation that deletes
INSIST_AFTER_S = (1.0, 5.0, 15.0, 45.0)
log = structlog.get_logger(__name__)


def live_of(host: Host, sandbox_id: SandboxId) -> Live:
    """The VM of a running sandbox; `Conflict` if it is not running."""
    sandbox = host.registry.get(sandbox_id)
    live = host.live.get(sandbox_id)
    if sandbox.state is not State.RUNNING or live is None:
        raise Conflict(f"the sandbox is {sandbox.state}" + (f": {sandbox.reason}" if sandbox.reason else ""))
    return live


@asynccontextmanager
async def captured(
    host: Host, sandbox: Sandbox, live: Live, *, verb: str, freeze_timeout_s: float | None = None
) -> AsyncIterator[Capture]:
    """The guest stands still inside, and all that it was is written down; its parts are pinned.

    The caller decides what follows: end the VM, or `go_on`. The disk so far is part of the
    capture; the sandbox goes on above it, if it does. `GuestUnresponsive` if the guest
    does not stand still within *freeze_timeout_s* (by default the node's), `VmEnded` as soon
    as its VM has ended.
    """
    parts = _Parts()
    try:
        freeze_timeout_s = freeze_timeout_s or host.settings.freeze_timeout_s
        work = _write_down(host, sandbox, live, parts, verb=verb, freeze_timeout_s=freeze_timeout_s)
        yield await while_alive(live.instance, f"write down {sandbox.id}", work, doing=verb)
    finally:
        host.storage.unpin(parts.layers, parts.blobs)


@dataclass(slots=True)
class _Parts:
    """What came pinned from storage, of a capture that may not be finished."""

    layers: list[LayerId] = field(default_factory=list)
    blobs: list[BlobId] = field(default_factory=list)


async def _write_down(
    host: Host, sandbox: Sandbox, live: Live, parts: _Parts, *, verb: str, freeze_timeout_s: float
) -> Capture:
    with host.timings.stage(verb, "freeze"), _as_told():
        await live.agent.freeze(timeout_s=freeze_timeout_s)
    with host.timings.stage(verb, "stop"), _as_told():
        await live.instance.pause()
    await failpoint(f"{verb}.stopped")

    state_file = host.run_dir(sandbox) / "device.state"
    with host.timings.stage(verb, "device_state"):
        await live.instance.save_device_state(state_file)
        parts.blobs.append(blob := await host.storage.put_blob(state_file))
    await failpoint(f"{verb}.state_saved")

    with host.timings.stage(verb, "memory"):
        memory = await host.storage.capture_memory(sandbox.id, live.instance.process.pid)
        parts.layers += memory.layers
    await failpoint(f"{verb}.memory_saved")

    with host.timings.stage(verb, "disk"):
        disk = await host.storage.seal_disk(sandbox.id, live.instance.switch_disk)
        parts.layers += disk.layers
    await failpoint(f"{verb}.disk_sealed")

    return Capture(blob, memory, disk, control_of=sandbox.id, fingerprint=sandbox.fingerprint)


@contextmanager
def _as_told() -> Iterator[None]:
    """Tell what the guest did not do from what the host could not."""
    try:
        yield
    except (Unavailable, DeadlineExceeded, Bug) as error:
        raise GuestUnresponsive(f"the guest does not stand still: {error}") from error


async def go_on(host: Host, live: Live) -> None:
    """Let a stilled guest run again; `Unavailable` if it does not, `VmEnded` as soon as it cannot."""
    work = _let_run(host, live)
    await while_alive(live.instance, f"go on {live.instance.plan.sandbox_id}", work, doing="letting it go on")


async def _let_run(host: Host, live: Live) -> None:
    await live.instance.resume()
    await live.agent.thaw(timeout_s=host.settings.freeze_timeout_s)


async def roll_back(host: Host, sandbox_id: SandboxId, live: Live) -> None:
    """After a failed pause, fork or snapshot: running again as before, or lost if its VM has ended.

    A guest that does not go on at once is asked a few times more in the background. Nothing
    is done for a guest that is about to be killed: that never waits for a guest.
    """
    sandbox = host.registry.find(sandbox_id)
    if sandbox is None or sandbox.state not in (State.PAUSING, State.SNAPSHOTTING, State.FORKING):
        return
    if host.operations.current(sandbox_id) == KILL:
        return
    try:
        await go_on_or_insist(host, sandbox_id, live)
    except VmEnded:
        await lose(host, sandbox_id, live)
    else:
        await host.registry.conclude(sandbox_id, Event.ROLLED_BACK)


async def go_on_or_insist(host: Host, sandbox_id: SandboxId, live: Live) -> None:
    """`go_on` now, or soon: one lost request must not leave user processes frozen for ever. `VmEnded` if it cannot."""
    try:
        await go_on(host, live)
    except VmEnded:
        raise
    except AgentEnvError as error:
        log.warning("the guest did not go on", sandbox=sandbox_id, error=str(error))
        host.tasks.start(f"let {sandbox_id} go on", _insist(host, sandbox_id, live))


async def _insist(host: Host, sandbox_id: SandboxId, live: Live) -> None:
    async def again() -> None:
        if host.live.get(sandbox_id) is live:
            await go_on(host, live)

    for delay_s in INSIST_AFTER_S:
        await host.clock.sleep(delay_s)
        try:
            # In its turn: nobody may be writing the guest down meanwhile.
            await host.operations.run(sandbox_id, "go on", again)
        except AgentEnvError as error:
            log.warning("the guest still does not go on", sandbox=sandbox_id, error=str(error))
        else:
            return
