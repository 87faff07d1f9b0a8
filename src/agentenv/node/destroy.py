"""Remove everything a sandbox has on this node. Needs neither a healthy guest nor a sane record."""

from agentenv.aio.failpoints import failpoint
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import Event, State
from agentenv.model.sandbox import Sandbox
from agentenv.node.host import Host
from agentenv.node.launch import retire


async def delete(host: Host, sandbox_id: SandboxId) -> None:
    """End a sandbox in whatever state it is; the caller has cut short what was going on.

    The record says "killing" until the last thing is gone, so that a crash in
    between is finished at the next start.
    """
    sandbox = host.registry.find(sandbox_id)
    if sandbox is None:
        return
    if sandbox.state is not State.KILLING:
        sandbox = await host.registry.apply(sandbox_id, Event.KILL)
    await failpoint("delete.begun")
    await remove_all(host, sandbox)


async def abandon(host: Host, sandbox: Sandbox) -> None:
    """Undo a sandbox that never came to life."""
    await remove_all(host, sandbox)


async def remove_all(host: Host, sandbox: Sandbox) -> None:
    with host.timings.stage("delete", "vm"):
        await retire(host, sandbox)
    await failpoint("delete.vm_gone")
    with host.timings.stage("delete", "storage"):
        await host.storage.remove(sandbox.id)
    await failpoint("delete.storage_gone")
    await host.registry.forget(sandbox.id)
    host.collector.nudge()
