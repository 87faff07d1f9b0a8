"""Remove everything a sandbox has on this node. Needs neither a healthy guest nor a sane record."""

import structlog

from agentenv.aio.failpoints import failpoint
from agentenv.aio.tasks import to_its_end
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import Event, State
from agentenv.model.sandbox import Sandbox
from agentenv.node.host import Host
from agentenv.node.retire import retire

log = structlog.get_logger(__name__)


async def delete(host: Host, sandbox_id: SandboxId) -> None:
    """End a sandbox in whatever state it is; the caller has cut short what was going on.

    The record says "killing" until the last thing is gone, so that a crash in
    between is finished at the next start. A store that cannot write (its disk is full)
    does not stop it: deleting is what makes room.
    """
    sandbox = host.registry.find(sandbox_id)
    if sandbox is None:
        return
    if sandbox.state is not State.KILLING:
        sandbox = await host.registry.conclude(sandbox_id, Event.KILL)
    await failpoint("delete.begun")
    await remove_all(host, sandbox)


async def abandon(host: Host, sandbox: Sandbox) -> None:
    """Undo a sandbox that never came to life; what cannot be undone now is left to the sweeper. Never cut short."""
    await to_its_end(f"abandon {sandbox.id}", _abandon(host, sandbox))


async def _abandon(host: Host, sandbox: Sandbox) -> None:
    try:
        await remove_all(host, sandbox)
    except Exception:  # whatever it was: nobody else would know of what is left
        log.exception("a sandbox that did not start could not be removed yet", sandbox=sandbox.id)
        if host.registry.find(sandbox.id) is not None:
            await host.registry.conclude(sandbox.id, Event.KILL)


async def remove_all(host: Host, sandbox: Sandbox) -> None:
    with host.timings.stage("delete", "vm"):
        await retire(host, sandbox.id)
    await failpoint("delete.vm_gone")
    with host.timings.stage("delete", "storage"):
        await host.storage.remove(sandbox.id)
    await failpoint("delete.storage_gone")
    await host.registry.forget(sandbox.id)
    host.collector.nudge()
