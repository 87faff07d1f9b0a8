"""Whether a `FakeHost` at rest is whole: records, VMs, slots and files say the same, and nothing is left over."""

from collections.abc import Iterator

from agentenv.model.ids import LayerId
from agentenv.model.lifecycle import State
from agentenv.model.sandbox import Sandbox
from agentenv.node.catalogue import parts_of
from agentenv.testing.host import FakeHost
from agentenv.vmm.contract import SparePlan


async def faults(fake: FakeHost) -> list[str]:
    """Everything that is wrong, in words; collects garbage first."""
    await fake.host.collector.collect()
    return [*_of_sandboxes(fake), *_left_over(fake), *_of_parts(fake), *await _of_records(fake)]


def _of_sandboxes(fake: FakeHost) -> Iterator[str]:
    for sandbox in fake.host.registry.all():
        for fault in _of_one(fake, sandbox):
            yield f"{sandbox.state.value} {sandbox.id}: {fault}"


def _of_one(fake: FakeHost, sandbox: Sandbox) -> Iterator[str]:
    host, world = fake.host, fake.world
    if sandbox.id not in world.storage.owners() and not _has_its_disk_in_a_capture(sandbox):
        yield "has no disk"
    if sandbox.state is State.RUNNING:
        yield from _of_running(fake, sandbox)
        return
    if sandbox.state not in (State.PAUSED, State.ERROR):
        yield "is half-way"
    if sandbox.id in host.live or sandbox.id in host.held:
        yield "holds a VM"
    if sandbox.id in world.storage._attached:  # noqa: SLF001
        yield "has memory attached"
    if sandbox.process is not None or sandbox.slot_index is not None:
        yield "its record names a process or a slot"
    if sandbox.state is State.PAUSED and (sandbox.capture is None or sandbox.ends_at is not None):
        yield "has no capture, or an end"
    if sandbox.state is State.ERROR and (not sandbox.reason or sandbox.capture is not None):
        yield "has no reason, or a capture that no longer fits its disk"


def _has_its_disk_in_a_capture(sandbox: Sandbox) -> bool:
    return sandbox.state is State.PAUSED and sandbox.capture is not None and sandbox.capture.disk is not None


def _of_running(fake: FakeHost, sandbox: Sandbox) -> Iterator[str]:
    live = fake.host.live.get(sandbox.id)
    if live is None:
        yield "has no VM"
        return
    process = fake.world.hypervisor.processes[live.instance.process.pid]
    if not process.alive or not process.running:
        yield "its VM does not run"
    if sandbox.process != live.instance.process or sandbox.slot_index != live.slot.index:
        yield "its record names another process or slot"
    if fake.world.slots.held().get(sandbox.id) != live.slot.index:
        yield "its slot is not its own"
    if frozen(fake, sandbox):
        yield "its user processes are frozen"
    if sandbox.capture is not None:
        yield "has a capture"
    if fake.world.slots.policies.get(live.slot.index) != sandbox.egress:
        yield "another egress policy is in force"


def frozen(fake: FakeHost, sandbox: Sandbox) -> bool:
    """Whether the last thing that the guest was told is to stand still."""
    address = str(fake.host.live[sandbox.id].slot.address)
    told = [name for where, name in fake.world.guests.calls if where == address and name in ("freeze", "thaw", "init")]
    return told[-1:] == ["freeze"]


def _left_over(fake: FakeHost) -> Iterator[str]:
    host, world = fake.host, fake.world
    running = {s.id for s in host.registry.all() if s.state is State.RUNNING}
    known = {s.id for s in host.registry.all()}
    spares = {spare.slot.owner: spare.vmm.process for spare in host.spares.waiting()}
    for process in world.hypervisor.alive:
        plan = process.started_as
        owner = plan.name if isinstance(plan, SparePlan) else plan.sandbox_id
        if owner not in running and spares.get(owner) != process.identity:
            yield f"stray VMM of {owner}"
    if len(world.hypervisor.alive) > len(running) + len(spares):
        yield "more VMMs than running sandboxes"
    if slots := world.slots.held().keys() - running - spares.keys():
        yield f"slots held by {slots}"
    if owners := world.storage.owners() - known:
        yield f"disks or memory of {owners}"
    if held := {*host.held, *host.live} - running:
        yield f"VMs in hand of {held}"
    if host.unended:
        yield f"VMs that did not end: {host.unended}"
    if world.guests.open_agents != len(running):
        yield f"{world.guests.open_agents} agent connections for {len(running)} guests"
    run_dirs = {path.stem for path in (host.settings.runtime_dir / "vm").glob("*")}
    if run_dirs != running | spares.keys():
        yield f"run directories differ from running sandboxes: {run_dirs ^ running}"
    if host.operations.statistics().in_progress or host.operations.statistics().stuck:
        yield repr(host.operations)


def _of_parts(fake: FakeHost) -> Iterator[str]:
    """Everything that something refers to exists, and nothing else does."""
    host, storage = fake.host, fake.world.storage
    if storage.pins:
        yield f"{storage.pins} pins are held"
    captures = [s.capture for s in host.catalogue.all()]
    captures += [s.capture for s in host.registry.all() if s.capture is not None]
    layers = {layer for capture in captures for layer in parts_of(capture)[0]}
    blobs = {blob for capture in captures for blob in parts_of(capture)[1]}
    layers |= _needed_by_owners(fake)
    if missing := (layers - storage.layers) | (blobs - storage.blobs):
        yield f"collected though needed: {missing}"
    if garbage := (storage.layers - layers) | (storage.blobs - blobs):
        yield f"nobody needs {garbage}"


def _needed_by_owners(fake: FakeHost) -> set[LayerId]:
    storage = fake.world.storage
    stacks = [*(disk.below for disk in storage._disks.values()), *storage._attached.values()]  # noqa: SLF001
    return {layer for stack in stacks for layer in stack.layers}


async def _of_records(fake: FakeHost) -> Iterator[str]:
    shown = {s.id: s for s in fake.host.registry.all()}
    recorded = {s.id: s for s in await fake.world.store.sandboxes()}
    wrong = [
        f"record of {key} differs" for key in shown.keys() | recorded.keys() if shown.get(key) != recorded.get(key)
    ]
    known = {s.id for s in fake.host.catalogue.all()}
    stored = {s.id for s in await fake.world.store.snapshots()}
    wrong += [f"snapshot {key} is on one side only" for key in known ^ stored]
    return iter(wrong)
