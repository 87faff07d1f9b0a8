"""Boot-time repair: make what is on this host and what the records say the same again.

Reads the journal an earlier server left. Running VMs are taken over; what was half
done is finished where the guest may have run and undone where it cannot have;
whatever no record explains is removed.
"""

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

import structlog

from agentenv.model.errors import AgentEnvError, NotFound
from agentenv.model.lifecycle import Event, State
from agentenv.model.sandbox import Sandbox
from agentenv.node.destroy import remove_all
from agentenv.node.host import Host, Live
from agentenv.node.launch import hold, identity_of, retire
from agentenv.node.still import go_on

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Repaired:
    """What a reconciliation did; counts of sandboxes, processes, slots and directories."""

    adopted: int = 0
    rolled_back: int = 0
    lost: int = 0
    removed: int = 0
    stray_vmms: int = 0
    stray_slots: int = 0
    stray_owners: int = 0
    stray_dirs: int = 0


async def reconcile(host: Host) -> Repaired:
    """Called once at start, before any request is taken. One broken sandbox never stops the node."""
    done = Repaired()
    records = host.registry.all()
    await asyncio.gather(*(_one(host, sandbox, done) for sandbox in records))

    # Nothing that is left over may still use a disk or a slot: processes go first.
    keep = frozenset(live.instance.process.pid for live in host.live.values())
    done.stray_vmms = len(await host.vmm.reap(host.settings.runtime_dir / "vm", keep))
    done.stray_slots = await host.slots.reconcile([live.slot.index for live in host.live.values()])
    for sandbox in [s for s in host.registry.all() if s.state in (State.CREATING, State.KILLING)]:
        await remove_all(host, sandbox)
        done.removed += 1
    known = {sandbox.id for sandbox in host.registry.all()} | host.quarantined
    for owner in host.storage.owners() - known:
        await host.storage.detach(owner)
        await host.storage.remove(owner)
        done.stray_owners += 1
    for sandbox in host.registry.all():
        if sandbox.id not in host.live:
            await host.storage.detach(sandbox.id)
    done.stray_dirs = await asyncio.to_thread(_remove_stray_dirs, host)
    if not host.quarantined:
        await host.collector.collect()
    log.info("reconciled", **{name: getattr(done, name) for name in Repaired.__slots__})
    return done


async def _one(host: Host, sandbox: Sandbox, done: Repaired) -> None:
    try:
        match sandbox.state:
            case State.RUNNING | State.PAUSING | State.SNAPSHOTTING | State.FORKING:
                await _adopt(host, sandbox, done)
            case State.RESUMING if sandbox.process is None:
                await host.registry.apply(sandbox.id, Event.ROLLED_BACK)
                done.rolled_back += 1
            case State.RESUMING:
                await _adopt(host, sandbox, done)
            case State.PAUSED | State.ERROR | State.CREATING | State.KILLING | State.GONE:
                pass
    except AgentEnvError as error:
        log.exception("sandbox could not be repaired", sandbox=sandbox.id, state=sandbox.state.value)
        await _lost(host, sandbox, f"it could not be taken over after a restart: {error}", done)


async def _adopt(host: Host, sandbox: Sandbox, done: Repaired) -> None:
    if sandbox.process is None or sandbox.slot_index is None:
        await _lost(host, sandbox, "the server stopped before its virtual machine was recorded", done)
        return
    await host.storage.recover_disk(sandbox.id, sandbox.process.pid)
    try:
        slot = await host.slots.adopt(sandbox.id, sandbox.slot_index, sandbox.egress)
        # The paths of a plan matter to a VMM that starts; one that runs is found by its directory.
        run_dir = host.run_dir(sandbox)
        plan = host.plan(sandbox, slot, run_dir / "memory", await host.storage.open_disk(sandbox.id))
        instance = await host.vmm.adopt(plan, sandbox.process)
    except NotFound:
        await _lost(host, sandbox, "its virtual machine ended while the server was down", done)
        return
    agent = host.agents.agent(slot.address, secret=host.credentials.control_secret(sandbox.id))
    live = Live(instance, agent, slot)
    hold(host, sandbox.id, live)
    if sandbox.state is State.RESUMING:
        await instance.resume()
        secret = host.credentials.control_secret(sandbox.id)
        await agent.init(identity_of(host, sandbox), secret=secret, timeout_s=host.settings.agent_timeout_s)
        await host.registry.apply(sandbox.id, Event.DONE, capture=None)
    elif sandbox.state is not State.RUNNING:
        await go_on(host, live)
        await host.registry.apply(sandbox.id, Event.ROLLED_BACK)
    done.adopted += 1


async def _lost(host: Host, sandbox: Sandbox, reason: str, done: Repaired) -> None:
    await retire(host, sandbox)
    current = host.registry.get(sandbox.id)
    await host.registry.apply(
        sandbox.id, Event.LOST, reason=reason, process=None, slot_index=None, capture=None, ends_at=current.ends_at
    )
    done.lost += 1


def _remove_stray_dirs(host: Host) -> int:
    root = host.settings.runtime_dir / "vm"
    if not root.is_dir():
        return 0
    wanted = {host.run_dir(sandbox) for sandbox in host.registry.all() if sandbox.id in host.live}
    stray = [path for path in root.iterdir() if path not in wanted]
    for path in stray:
        _remove(path)
    return len(stray)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
