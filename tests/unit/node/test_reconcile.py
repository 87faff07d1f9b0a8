"""The start of a server: every state that an earlier one may have left, with its VM alive, dead or not recorded."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentenv.model.errors import Bug, Conflict, NotFound, Unavailable
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import State
from agentenv.model.machine import ProcessIdentity
from agentenv.model.sandbox import Sandbox
from agentenv.node.reconcile import Repaired
from agentenv.state.contract import Quarantined
from agentenv.testing.audit import faults, frozen
from agentenv.testing.host import FakeHost, Trip, World

GUEST_STATES = [State.RUNNING, State.PAUSING, State.SNAPSHOTTING, State.FORKING]


async def crashed_in(world: World, state: State, *, process: str, **changes: Any) -> tuple[FakeHost, Sandbox]:
    """A server not started yet, after one that died with a sandbox in *state* and its VM alive, gone or unrecorded."""
    fake = await FakeHost(world).start()
    sandbox = await fake.create(timeout_s=600)
    if state in (State.PAUSED, State.RESUMING):
        sandbox = await fake.node.pause(sandbox.id)
        if state is State.RESUMING and process != "none":
            capture = sandbox.capture
            sandbox = await fake.node.resume(sandbox.id, 600)
            sandbox = replace(sandbox, capture=capture)
    elif process == "none":
        (vm,) = world.hypervisor.alive
        vm.end(-9)
    if process == "gone":
        for vm in world.hypervisor.alive:
            vm.end(-9)
    following = await fake.crash()
    if process == "none":
        changes |= {"process": None, "slot_index": None}
    record = replace(sandbox, state=state, **changes)
    world.store._sandboxes[sandbox.id] = record
    return following, record


async def repaired(fake: FakeHost) -> Repaired:
    await fake.world.store.start()
    await fake.world.storage.start()
    return await fake.node.start()


@pytest.mark.parametrize("state", GUEST_STATES)
async def test_a_guest_that_lives_is_taken_over_and_goes_on(world: World, state: State) -> None:
    fake, before = await crashed_in(world, state, process="alive")
    (vm,) = world.hypervisor.alive
    if state is not State.RUNNING:
        vm.running = False
        world.guests.calls.append((str(_address(fake, before)), "freeze"))

    done = await repaired(fake)

    assert (done.adopted, done.lost, done.stray_vmms) == (1, 0, 0)
    now = fake.node.get(before.id)
    assert now == replace(before, state=State.RUNNING)
    assert vm.running
    assert not frozen(fake, now)
    assert await faults(fake) == []
    assert (await fake.node.pause(before.id)).state is State.PAUSED
    await fake.stop()


def _address(fake: FakeHost, sandbox: Sandbox) -> object:
    assert sandbox.slot_index is not None
    return fake.world.slots._plan.slot(sandbox.slot_index).address


@pytest.mark.parametrize("state", GUEST_STATES)
async def test_a_guest_that_is_gone_is_an_error_with_the_reason(world: World, state: State) -> None:
    fake, before = await crashed_in(world, state, process="gone")

    done = await repaired(fake)

    assert (done.adopted, done.lost) == (0, 1)
    now = fake.node.get(before.id)
    assert now.state is State.ERROR
    assert "ended while the server was down" in str(now.reason)
    assert await faults(fake) == []
    await fake.node.delete(before.id)
    assert await faults(fake) == []
    await fake.stop()


@pytest.mark.parametrize("state", GUEST_STATES)
async def test_a_guest_without_a_recorded_process_is_an_error(world: World, state: State) -> None:
    fake, before = await crashed_in(world, state, process="none")

    await repaired(fake)

    assert fake.state(before.id) is State.ERROR
    assert await faults(fake) == []
    await fake.stop()


async def test_a_resume_that_started_no_process_is_undone(world: World) -> None:
    fake, before = await crashed_in(world, State.RESUMING, process="none", generation=2)

    done = await repaired(fake)

    assert done.rolled_back == 1
    now = fake.node.get(before.id)
    assert now == replace(before, state=State.PAUSED, ends_at=None)
    assert await faults(fake) == []
    assert (await fake.node.resume(before.id, 60)).generation == 3
    await fake.stop()


async def test_a_resume_whose_process_lives_is_finished(world: World) -> None:
    fake, before = await crashed_in(world, State.RESUMING, process="alive")
    (vm,) = world.hypervisor.alive
    vm.running = False
    identities = len(world.guests.identities[before.id])

    done = await repaired(fake)

    assert done.adopted == 1
    now = fake.node.get(before.id)
    assert now.state is State.RUNNING
    assert now.capture is None
    assert now.ends_at == before.ends_at
    assert len(world.guests.identities[before.id]) == identities + 1
    assert await faults(fake) == []
    await fake.stop()


async def test_a_resume_of_an_older_release_that_recorded_no_end_gets_one(world: World) -> None:
    fake, before = await crashed_in(world, State.RESUMING, process="alive", ends_at=None)

    await repaired(fake)

    assert fake.node.get(before.id).ends_at is not None
    await fake.stop()


@pytest.mark.parametrize("process", ["alive", "gone"])
async def test_a_resume_that_cannot_be_finished_is_paused_as_before(world: World, process: str) -> None:
    fake, before = await crashed_in(world, State.RESUMING, process=process)
    world.guests.fail["init"] = Unavailable("mute")

    done = await repaired(fake)

    assert (done.rolled_back, done.lost) == (1, 0)
    paused = replace(before, state=State.PAUSED, ends_at=None, process=None, slot_index=None)
    assert fake.node.get(before.id) == paused
    assert world.hypervisor.alive == []
    assert await faults(fake) == []
    world.guests.fail.clear()
    assert (await fake.node.resume(before.id, 60)).state is State.RUNNING
    await fake.stop()


async def test_a_resume_that_an_older_release_began_and_whose_process_is_gone_is_an_error(world: World) -> None:
    """It did not keep the disk of the capture apart: the disk has moved on."""
    fake, before = await crashed_in(world, State.RESUMING, process="gone")
    assert before.capture is not None
    world.store._sandboxes[before.id] = replace(before, capture=replace(before.capture, disk=None))

    await repaired(fake)

    assert fake.state(before.id) is State.ERROR
    assert "its disk has moved on" in str(fake.node.get(before.id).reason)
    assert await faults(fake) == []
    await fake.stop()


async def test_a_resume_that_cannot_be_undone_at_the_start_is_undone_later(world: World) -> None:
    fake, before = await crashed_in(world, State.RESUMING, process="gone")
    world.storage.fail["remove"] = Unavailable("the disk does not answer")
    await repaired(fake)
    assert fake.state(before.id) is State.RESUMING
    world.storage.fail.clear()

    await world.clock.advance(31)
    await fake.idle()

    assert fake.state(before.id) is State.PAUSED
    await fake.stop()


@pytest.mark.parametrize("process", ["alive", "gone"])
@pytest.mark.parametrize("state", [State.CREATING, State.KILLING])
async def test_what_nobody_waits_for_is_removed(world: World, state: State, process: str) -> None:
    fake, before = await crashed_in(world, state, process=process)

    done = await repaired(fake)

    assert done.removed == 1
    assert fake.state(before.id) is State.GONE
    assert await world.store.sandboxes() == []
    assert await faults(fake) == []
    await fake.stop()


async def test_a_paused_sandbox_stays_and_a_vm_that_is_left_of_it_is_ended(world: World) -> None:
    fake = await FakeHost(world).start()
    sandbox = await fake.create()
    fake.vmm.fail["stop"] = Unavailable("not now")
    paused = await fake.node.pause(sandbox.id)
    assert len(world.hypervisor.alive) == 1
    following = await fake.crash()

    done = await repaired(following)

    assert done.stray_vmms == 1
    assert done.stray_slots == 1
    assert following.node.get(sandbox.id) == paused
    assert await faults(following) == []
    assert (await following.node.resume(sandbox.id, 60)).state is State.RUNNING
    await following.stop()


async def test_a_pid_that_was_given_to_another_process_is_not_taken_over(world: World) -> None:
    fake, before = await crashed_in(world, State.RUNNING, process="alive")
    assert before.process is not None
    other = ProcessIdentity(before.process.pid, before.process.start_time + 1)
    world.hypervisor.processes[before.process.pid].identity = other

    await repaired(fake)

    assert fake.state(before.id) is State.ERROR
    await fake.stop()


async def test_a_guest_whose_agent_is_slow_is_not_lost(world: World) -> None:
    fake, before = await crashed_in(world, State.PAUSING, process="alive")
    world.guests.fail["thaw"] = Unavailable("slow")

    done = await repaired(fake)

    assert done.adopted == 1
    assert fake.state(before.id) is State.RUNNING
    world.guests.fail.clear()
    await world.clock.advance(1)
    await fake.idle()
    assert await faults(fake) == []
    await fake.stop()


async def test_a_guest_that_ends_while_it_is_taken_over_is_an_error_with_its_own_reason(world: World) -> None:
    fake, before = await crashed_in(world, State.PAUSING, process="alive")
    (vm,) = world.hypervisor.alive
    with fake.taps.always("guest.thaw", Trip()) as slow:
        starting = asyncio.create_task(repaired(fake))
        await slow.reached.wait()
        vm.end(-9, "last words")
        await fake.became(before.id, State.ERROR)
        slow.go.set()
        await starting

    assert "last words" in str(fake.node.get(before.id).reason)
    assert await faults(fake) == []
    await fake.stop()


BROKEN = {
    "recover_disk": ("storage.recover_disk", Bug("the disk is damaged")),
    "open_disk": ("storage.open_disk", Bug("the disk is damaged")),
    "no_disk": ("storage.recover_disk", NotFound("no disk")),
    "slot": ("slots.adopt", Conflict("taken")),
    "monitor": ("vmm.adopt", Unavailable("the monitor does not answer")),
    "unforeseen": ("vmm.adopt", RuntimeError("what?")),
}


@pytest.mark.parametrize(("step", "error"), BROKEN.values(), ids=BROKEN)
async def test_one_that_cannot_be_taken_over_is_an_error_and_stops_nobody_else(
    world: World, step: str, error: Exception
) -> None:
    fake = await FakeHost(world).start()
    broken, sound = await fake.create(), await fake.create()
    following = await fake.crash()
    with following.taps.recorded():
        await world.store.start()
        await world.storage.start()
        order = [s.id for s in await world.store.sandboxes()]
        failing = _OnlyFor(order.index(broken.id), error)
        with following.taps.always(step, failing):
            done = await following.node.start()

    assert (done.adopted, done.lost) == (1, 1)
    assert following.state(sound.id) is State.RUNNING
    assert following.state(broken.id) is State.ERROR
    assert [vm.plan.sandbox_id for vm in world.hypervisor.alive] == [sound.id]
    assert await faults(following) == []
    await following.stop()


class _OnlyFor(Trip):
    """Happens at one of several passes."""

    def __init__(self, number: int, error: Exception) -> None:
        super().__init__(error=error)
        self.left = number

    async def happen(self) -> None:
        self.left -= 1
        if self.left == -1:
            await super().happen()


@pytest.mark.parametrize("step", ["storage.remove", "storage.detach", "storage.collect", "store.delete_sandbox"])
async def test_what_cannot_be_removed_at_the_start_does_not_stop_it_and_is_removed_later(
    world: World, step: str
) -> None:
    fake, before = await crashed_in(world, State.KILLING, process="alive")
    with fake.taps.always(step, Trip(error=Unavailable("not now"))):
        await repaired(fake)

    await world.clock.advance(31)
    await fake.became(before.id, State.GONE)

    assert await faults(fake) == []
    await fake.stop()


async def test_whatever_no_record_explains_is_removed(world: World) -> None:
    fake = await FakeHost(world).start()
    sandbox = await fake.create()
    following = await fake.crash()
    world.store._sandboxes.clear()
    run = fake.host.settings.runtime_dir / "vm"
    (run / "stray").mkdir()
    (run / "file").write_text("")

    done = await repaired(following)

    assert (done.stray_vmms, done.stray_slots, done.stray_owners, done.stray_dirs) == (1, 1, 1, 3)
    assert following.state(sandbox.id) is State.GONE
    assert await faults(following) == []
    await following.stop()


async def test_a_first_start_finds_nothing_to_do(world: World) -> None:
    fake = FakeHost(world)
    await world.store.start()
    await world.storage.start()

    assert await fake.node.start() == Repaired()
    await fake.stop()


async def test_a_second_repair_finds_nothing_to_do(world: World) -> None:
    fake = await FakeHost(world).start()
    await fake.create()
    await fake.node.pause((await fake.create()).id)
    for _ in range(3):
        fake = await fake.crash()
        done = await repaired(fake)
        assert done == Repaired(adopted=1)
    assert await faults(fake) == []
    await fake.stop()


async def test_a_stop_leaves_vms_for_the_next_server(world: World) -> None:
    fake = await FakeHost(world).start()
    sandbox = await fake.create()
    pid = fake.host.live[sandbox.id].instance.process.pid
    await fake.stop()
    world.slots = world.slots.restarted()
    assert world.guests.open_agents == 0

    following = await FakeHost(world).start()

    assert following.host.live[sandbox.id].instance.process.pid == pid
    assert await faults(following) == []
    await following.stop()


# Records that only a newer release can read


def quarantine(world: World, sandbox: Sandbox, record: str) -> None:
    """As if a newer release had written the record of *sandbox*."""
    del world.store._sandboxes[sandbox.id]
    world.store.broken.append(Quarantined("sandbox", sandbox.id, "version 9", record))


async def test_what_belongs_to_a_record_that_cannot_be_read_is_left_alone(world: World) -> None:
    fake = await FakeHost(world).start()
    newer, other = await fake.create(), await fake.create()
    assert newer.process is not None
    following = await fake.crash()
    fields = {"process": {"pid": newer.process.pid}, "slot_index": newer.slot_index, "new": {}}
    quarantine(world, newer, json.dumps(fields))
    before = (world.storage.layers, world.storage.blobs)

    done = await repaired(following)

    assert done == Repaired(adopted=1)
    assert {vm.plan.sandbox_id for vm in world.hypervisor.alive} == {newer.id, other.id}
    assert newer.id in world.storage.owners()
    assert (world.storage.layers, world.storage.blobs) == before
    assert _run_dir(following, newer).is_dir()
    await following.node.delete(other.id)
    await world.clock.advance(100)
    assert (world.storage.layers, world.storage.blobs) == before
    await following.stop()

    # The newer release is back.
    world.slots = world.slots.restarted()
    world.slots._pool.found([index for index in (newer.slot_index,) if index is not None])
    world.store.broken.clear()
    world.store._sandboxes[newer.id] = newer
    again = await FakeHost(world).start()
    assert again.state(newer.id) is State.RUNNING
    await again.stop()


@pytest.mark.parametrize("record", ["", "{", "[]", "7", "[" * 200_000, '{"process": 5}', '{"process": {"pid": "x"}}'])
async def test_a_record_that_is_no_record_at_all_stops_nothing(world: World, record: str) -> None:
    fake = await FakeHost(world).start()
    newer, other = await fake.create(), await fake.create()
    following = await fake.crash()
    quarantine(world, newer, record)

    await repaired(following)

    assert following.state(other.id) is State.RUNNING
    assert newer.id in world.storage.owners()
    await following.stop()


def _run_dir(fake: FakeHost, sandbox: Sandbox) -> Path:
    return fake.host.run_dir(replace(sandbox, id=SandboxId(sandbox.id)))
