"""Write down a running VM: user code frozen, CPUs stopped, state and memory saved.

User processes are frozen by the agent first, so that whatever starts from the
capture can be given its clock, its entropy and its identity before they move.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import structlog

from agentenv.aio.failpoints import failpoint
from agentenv.model.errors import AgentEnvError, Bug, Conflict, DeadlineExceeded, GuestUnresponsive, Unavailable
from agentenv.model.ids import BlobId, LayerId, SandboxId
from agentenv.model.lifecycle import Event, State
from agentenv.model.sandbox import Sandbox
from agentenv.model.snapshot import Capture
from agentenv.node.host import Host, Live

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
async def captured(host: Host, sandbox: Sandbox, live: Live, *, verb: str, seal: bool) -> AsyncIterator[Capture]:
    """The guest stands still inside, and what it was is written down; its parts are pinned.

    The caller decides what follows: end the VM, or `go_on`. With *seal* the disk so
    far becomes immutable and part of the capture; else it stays the sandbox's own.
    """
    layers: list[LayerId] = []
    blobs: list[BlobId] = []
    try:
        with host.timings.stage(verb, "freeze"), _as_told():
            await live.agent.freeze(timeout_s=host.settings.freeze_timeout_s)
        with host.timings.stage(verb, "stop"), _as_told():
            await live.instance.pause()
        await failpoint(f"{verb}.stopped")

        state_file = host.run_dir(sandbox) / "device.state"
        with host.timings.stage(verb, "device_state"):
            await live.instance.save_device_state(state_file)
            blobs.append(blob := await host.storage.put_blob(state_file))
        await failpoint(f"{verb}.state_saved")

        with host.timings.stage(verb, "memory"):
            memory = await host.storage.capture_memory(sandbox.id, live.instance.process.pid)
            layers += memory.layers
        await failpoint(f"{verb}.memory_saved")

        disk = None
        if seal:
            with host.timings.stage(verb, "disk"):
                disk = await host.storage.seal_disk(sandbox.id, live.instance.switch_disk)
                layers += disk.layers
            await failpoint(f"{verb}.disk_sealed")

        yield Capture(device_state=blob, memory=memory, disk=disk, control_of=sandbox.id)
    finally:
        host.storage.unpin(layers, blobs)


@contextmanager
def _as_told() -> Iterator[None]:
    """Tell what the guest did not do from what the host could not."""
    try:
        yield
    except (Unavailable, DeadlineExceeded, Bug) as error:
        raise GuestUnresponsive(f"the guest does not stand still: {error}") from error


async def go_on(host: Host, live: Live) -> None:
    """Let a stilled guest run again; `Unavailable` if it does not."""
    await live.instance.resume()
    await live.agent.thaw(timeout_s=host.settings.freeze_timeout_s)


async def roll_back(host: Host, sandbox_id: SandboxId, live: Live) -> None:
    """After a failed pause, fork or snapshot: running again as before.

    A guest that does not go on at once is asked a few times more in the background. If its VM did
    not survive, its watcher says so as soon as this operation is over. Nothing is done
    for a guest that is about to be killed: that never waits for a guest.
    """
    sandbox = host.registry.find(sandbox_id)
    if sandbox is None or sandbox.state not in (State.PAUSING, State.SNAPSHOTTING, State.FORKING):
        return
    if host.operations.current(sandbox_id) == KILL:
        return
    await go_on_or_insist(host, sandbox_id, live)
    await host.registry.conclude(sandbox_id, Event.ROLLED_BACK)


async def go_on_or_insist(host: Host, sandbox_id: SandboxId, live: Live) -> None:
    """`go_on` now, or soon: one lost request must not leave user processes frozen for ever."""
    try:
        await go_on(host, live)
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
