"""Boot-time repair: make what is on this host and what the records say the same again.

Reads the journal an earlier server left. Running VMs are taken over; what was half
done is finished where the guest may have run and undone where it cannot have;
whatever no record explains is removed.
"""

import asyncio
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path

import structlog

from agentenv.model.errors import NotFound
from agentenv.model.lifecycle import Event, State
from agentenv.model.machine import ProcessIdentity
from agentenv.model.sandbox import Sandbox
from agentenv.network.contract import Slot
from agentenv.node.destroy import delete
from agentenv.node.host import Host, Live
from agentenv.node.launch import initialise, serve
from agentenv.node.put_back import put_back
from agentenv.node.quarantine import spared
from agentenv.node.retire import retire
from agentenv.node.still import go_on_or_insist
from agentenv.vmm.contract import Instance

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
    unserved: list[Slot] = []  # taken over for a VM that then could not be
    await asyncio.gather(*(_one(host, sandbox, done, unserved) for sandbox in host.registry.all()))

    # Nothing that is left over may still use a disk or a slot: processes go first.
    leave = spared(host.quarantined)
    kept = host.live.values()
    pids = frozenset(live.instance.process.pid for live in kept)
    done.stray_vmms = len(await host.vmm.reap(host.settings.runtime_dir / "vm", pids | leave.pids))
    for slot in unserved:
        await host.slots.release(slot)
    done.stray_slots = await host.slots.reconcile([*(live.slot.index for live in kept), *leave.slots])
    for sandbox in [s for s in host.registry.all() if s.state in (State.CREATING, State.KILLING)]:
        with _tolerated("a half-done sandbox could not be removed", sandbox=sandbox.id):
            await delete(host, sandbox.id)
            done.removed += 1
    known = {sandbox.id for sandbox in host.registry.all()} | leave.owners
    for owner in host.storage.owners() - known:
        with _tolerated("what nobody owns could not be removed", owner=owner):
            await host.storage.detach(owner)
            await host.storage.remove(owner)
            done.stray_owners += 1
    for sandbox in host.registry.all():
        if sandbox.id not in host.live:
            with _tolerated("a sandbox's memory could not be detached", sandbox=sandbox.id):
                await host.storage.detach(sandbox.id)
    wanted = {live.instance.plan.run_dir for live in kept}
    root = host.settings.runtime_dir / "vm"
    with _tolerated("stray directories could not be removed"):
        done.stray_dirs = await asyncio.to_thread(_remove_stray_dirs, root, wanted, leave.owners)
        # Builds and uploads end with their server.
        done.stray_dirs += await asyncio.to_thread(_remove_stray_dirs, host.settings.work_dir, (), ())
    if not host.quarantined:
        with _tolerated("what nobody refers to could not be collected"):
            await host.collector.collect()
    log.info("reconciled", **{field.name: getattr(done, field.name) for field in fields(done)})
    return done


@contextmanager
def _tolerated(what: str, **about: str) -> Iterator[None]:
    """Go on with the rest; a delete that is not finished is the sweeper's."""
    try:
        yield
    except Exception:
        log.exception(what, **about)


async def _one(host: Host, sandbox: Sandbox, done: Repaired, unserved: list[Slot]) -> None:
    try:
        match sandbox.state:
            case State.RUNNING | State.PAUSING | State.SNAPSHOTTING | State.FORKING:
                await _adopt(host, sandbox, done, unserved)
            case State.RESUMING:
                await _finish_resume(host, sandbox, done, unserved)
            case State.PAUSED | State.ERROR | State.CREATING | State.KILLING | State.GONE:
                pass
    except Exception as error:
        log.exception("sandbox could not be repaired", sandbox=sandbox.id, state=sandbox.state.value)
        with _tolerated("sandbox could not be given up", sandbox=sandbox.id):
            await _lost(host, sandbox, f"it could not be taken over after a restart: {error}", done)


async def _adopt(host: Host, sandbox: Sandbox, done: Repaired, unserved: list[Slot]) -> None:
    if sandbox.process is None or sandbox.slot_index is None:
        await _lost(host, sandbox, "the server stopped before its virtual machine was recorded", done)
        return
    await host.storage.recover_disk(sandbox.id, sandbox.process.pid)
    try:
        live = await _take_over(host, sandbox, sandbox.process, sandbox.slot_index, unserved)
    except NotFound:
        await _lost(host, sandbox, "its virtual machine ended while the server was down", done)
        return
    serve(host, sandbox.id, live)
    if sandbox.state is not State.RUNNING:
        await go_on_or_insist(host, sandbox.id, live)
        await host.registry.conclude(sandbox.id, Event.ROLLED_BACK)
    done.adopted += 1


async def _take_over(
    host: Host, sandbox: Sandbox, process: ProcessIdentity, slot_index: int, unserved: list[Slot]
) -> Live:
    slot = await host.slots.adopt(sandbox.id, slot_index, sandbox.egress)
    try:
        # The paths of a plan matter to a VMM that starts; one that runs is found by its directory.
        plan = host.plan(sandbox, slot, host.run_dir(sandbox) / "memory", await host.storage.open_disk(sandbox.id))
        instance: Instance = await host.vmm.adopt(plan, process)
    except BaseException:
        unserved.append(slot)  # its VMM may live, and is reaped first
        raise
    return Live(instance, host.agents.agent(slot.address, secret=host.credentials.control_secret(sandbox.id)), slot)


async def _finish_resume(host: Host, sandbox: Sandbox, done: Repaired, unserved: list[Slot]) -> None:
    """Let a guest that was being resumed run, or put its sandbox back to paused: nobody has seen it run."""
    if sandbox.process is not None and sandbox.slot_index is not None:
        try:
            live = await _take_over(host, sandbox, sandbox.process, sandbox.slot_index, unserved)
            host.held[sandbox.id] = live
            await live.instance.resume()
            # The secret of its own capture, and after the init of a resume alike.
            secret = host.credentials.control_secret(sandbox.id)
            await initialise(host, sandbox, live, secret=secret)
            ends_at = sandbox.ends_at or host.clock.now() + timedelta(seconds=host.settings.auto_resume_timeout_s)
            await host.registry.apply(sandbox.id, Event.DONE, capture=None, ends_at=ends_at)
        except Exception as error:  # noqa: BLE001 - whatever it was, the capture is as good as before
            log.warning("a resume could not be finished and is undone", sandbox=sandbox.id, error=str(error))
            with _tolerated("the VM of an undone resume could not be ended yet", sandbox=sandbox.id):
                await retire(host, sandbox.id)
        else:
            serve(host, sandbox.id, live)
            done.adopted += 1
            return
    with _tolerated("a resume could not be undone yet", sandbox=sandbox.id):
        await put_back(host, sandbox.id)
        done.rolled_back += 1


async def _lost(host: Host, sandbox: Sandbox, reason: str, done: Repaired) -> None:
    if host.registry.get(sandbox.id).state is not State.ERROR:  # else its watcher was faster, and knows better
        await host.registry.conclude(sandbox.id, Event.LOST, reason=reason, process=None, slot_index=None, capture=None)
    done.lost += 1
    await retire(host, sandbox.id)


def _remove_stray_dirs(root: Path, wanted: Collection[Path], spared_owners: Collection[str]) -> int:
    if not root.is_dir():
        return 0
    stray = [path for path in root.iterdir() if path not in wanted and path.stem not in spared_owners]
    for path in stray:
        _remove(path)
    return len(stray)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
