"""Pause and resume: what survives, who joins, what comes back when something fails."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from agentenv.model.errors import (
    AgentEnvError,
    Bug,
    Conflict,
    DeadlineExceeded,
    Exhausted,
    Invalid,
    NoSpace,
    NotFound,
    Unavailable,
    Unsupported,
)
from agentenv.model.lifecycle import State
from agentenv.model.sandbox import OnTimeout
from agentenv.node.still import INSIST_AFTER_S
from agentenv.node.sweep import sweep
from agentenv.testing.audit import faults, frozen
from agentenv.testing.host import FakeHost, Trip, World
from agentenv.testing.vmm import FINGERPRINT


async def test_a_paused_sandbox_has_its_capture_and_nothing_of_the_host(fake: FakeHost) -> None:
    sandbox = await fake.create()

    paused = await fake.node.pause(sandbox.id)

    assert paused.state is State.PAUSED
    assert paused.capture is not None
    assert paused.capture.control_of == sandbox.id
    assert (paused.process, paused.slot_index, paused.ends_at) == (None, None, None)
    assert await fake.world.store.sandboxes() == [paused]


async def test_ten_cycles_keep_id_memory_and_disk(fake: FakeHost) -> None:
    sandbox = await fake.create(metadata={"a": "b"})
    pid = fake.host.live[sandbox.id].instance.process.pid
    fake.world.storage.write_memory(pid, 4096, b"remembered")

    for cycle in range(10):
        paused = await fake.node.pause(sandbox.id)
        assert paused.capture is not None
        image = fake.world.storage.root / paused.capture.memory.layers[-1]
        assert image.read_bytes()[4096:4106] == b"remembered"
        resumed = await fake.node.resume(sandbox.id, 300)
        assert resumed.generation == cycle + 2
        assert resumed.capture is None
        # Everything that is not of one VM is as it was.
        assert replace(
            resumed, generation=1, process=sandbox.process, slot_index=sandbox.slot_index, ends_at=sandbox.ends_at
        ) == sandbox  # fmt: skip


async def test_each_resume_gives_the_guest_new_entropy_and_its_own_secret(fake: FakeHost) -> None:
    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)
    await fake.node.resume(sandbox.id, 300)

    first, second = fake.world.guests.identities[sandbox.id]
    assert first.entropy != second.entropy
    assert (first.control_secret, first.machine_id) == (second.control_secret, second.machine_id)
    assert fake.world.guests.secrets[sandbox.id] == f"control-{sandbox.id}"


async def test_a_hundred_pauses_at_once_are_one(fake: FakeHost) -> None:
    sandbox = await fake.create()

    with fake.taps.recorded() as calls:
        outcomes = await asyncio.gather(*(fake.node.pause(sandbox.id) for _ in range(100)))

    assert calls.count("storage.capture_memory") == 1
    assert {outcome.state for outcome in outcomes} == {State.PAUSED}


async def test_a_hundred_resumes_at_once_are_one(fake: FakeHost) -> None:
    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)

    with fake.taps.recorded() as calls:
        outcomes = await asyncio.gather(*(fake.node.resume(sandbox.id, 300) for _ in range(100)))

    assert calls.count("vmm.restore") == 1
    assert {outcome.generation for outcome in outcomes} == {2}


async def test_a_failure_of_a_shared_pause_reaches_all(fake: FakeHost) -> None:
    sandbox = await fake.create()
    fake.world.storage.fail["capture_memory"] = NoSpace("full")

    outcomes = await asyncio.gather(*(fake.node.pause(sandbox.id) for _ in range(10)), return_exceptions=True)

    assert all(isinstance(outcome, NoSpace) for outcome in outcomes)


async def test_a_resume_sent_right_after_a_pause_is_carried_out(fake: FakeHost) -> None:
    sandbox = await fake.create()

    paused, resumed = await asyncio.gather(fake.node.pause(sandbox.id), fake.node.resume(sandbox.id, 300))

    assert paused.state is State.PAUSED
    assert resumed.state is State.RUNNING
    assert fake.state(sandbox.id) is State.RUNNING


async def test_pause_resume_pause_resume_sent_at_once_all_have_an_outcome(fake: FakeHost) -> None:
    sandbox = await fake.create()

    outcomes = await asyncio.gather(
        *(verb for _ in range(3) for verb in (fake.node.pause(sandbox.id), fake.node.resume(sandbox.id, 300))),
        return_exceptions=True,
    )

    assert all(isinstance(o, Conflict) or not isinstance(o, BaseException) for o in outcomes)
    assert fake.state(sandbox.id) in (State.RUNNING, State.PAUSED)


async def test_what_does_not_fit_the_state_is_a_conflict(fake: FakeHost) -> None:
    sandbox = await fake.create()
    with pytest.raises(Conflict):
        await fake.node.resume(sandbox.id, 300)
    await fake.node.pause(sandbox.id)
    with pytest.raises(Conflict):
        await fake.node.pause(sandbox.id)
    with pytest.raises(Conflict):
        await fake.node.set_timeout(sandbox.id, 60)
    with pytest.raises(Conflict):
        await fake.node.fork(sandbox.id, 1, 60)
    with pytest.raises(Conflict):
        await fake.node.snapshot(sandbox.id, None)
    with pytest.raises(Conflict):
        fake.node.route(sandbox.id)
    with pytest.raises(Conflict):
        await fake.node.metrics(sandbox.id)


UNKNOWN = "11111111-1111-4111-8111-111111111111"


@pytest.mark.parametrize("sandbox_id", [UNKNOWN, "no-such", "", "../" + UNKNOWN, UNKNOWN.upper(), "\x00"])
async def test_a_sandbox_that_is_not_there_is_not_found_by_any_verb(fake: FakeHost, sandbox_id: str) -> None:
    node = fake.node
    for verb in (
        node.pause(sandbox_id), node.resume(sandbox_id, 60), node.connect(sandbox_id, 60), node.wake(sandbox_id),
        node.fork(sandbox_id, 1, 60), node.snapshot(sandbox_id, None), node.delete(sandbox_id),
        node.set_timeout(sandbox_id, 60), node.extend(sandbox_id, 60), node.metrics(sandbox_id),
        node.logs(sandbox_id, limit=1), node.set_egress(sandbox_id, (await fake.create()).egress),
    ):  # fmt: skip
        with pytest.raises(NotFound):
            await verb
    with pytest.raises(NotFound):
        node.get(sandbox_id)
    with pytest.raises(NotFound):
        node.route(sandbox_id)


@pytest.mark.parametrize("timeout_s", [0, -5, 10**9])
async def test_a_resume_for_no_time_is_invalid_and_leaves_it_paused(fake: FakeHost, timeout_s: int) -> None:
    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)

    with pytest.raises(Invalid):
        await fake.node.resume(sandbox.id, timeout_s)

    assert fake.state(sandbox.id) is State.PAUSED


async def test_a_resume_may_change_what_happens_at_the_end(fake: FakeHost) -> None:
    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)

    resumed = await fake.node.resume(sandbox.id, 60, on_timeout_pause=True)

    assert resumed.on_timeout is OnTimeout.PAUSE
    assert resumed.ends_at == fake.world.clock.now() + timedelta(seconds=60)


async def test_a_resume_that_fails_changes_nothing(fake: FakeHost) -> None:
    sandbox = await fake.create()
    paused = await fake.node.pause(sandbox.id)
    fake.vmm.fail["restore"] = Unavailable("no")

    with pytest.raises(Unavailable):
        await fake.node.resume(sandbox.id, 60, on_timeout_pause=True)

    now = fake.node.get(sandbox.id)
    assert replace(now, generation=1) == paused


async def test_a_resume_that_failed_can_be_tried_again(fake: FakeHost) -> None:
    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)
    for call in ("attach_memory", "open_disk", "fill_memory"):
        fake.world.storage.fail[call] = NoSpace("full")
        with pytest.raises(NoSpace):
            await fake.node.resume(sandbox.id, 60)
        fake.world.storage.fail.clear()

    assert (await fake.node.resume(sandbox.id, 60)).state is State.RUNNING


SILENCES = [Unavailable("mute"), DeadlineExceeded("slow"), Bug("it cannot set its clock")]


@pytest.mark.parametrize("error", SILENCES)
async def test_a_guest_that_does_not_take_its_identity_is_paused_as_before(
    fake: FakeHost, error: AgentEnvError
) -> None:
    sandbox = await fake.create()
    paused = await fake.node.pause(sandbox.id)
    assert paused.capture is not None
    assert paused.capture.disk is not None
    fake.world.guests.fail["init"] = error

    for _ in range(3):
        with pytest.raises(type(error)):
            await fake.node.resume(sandbox.id, 60)
        assert replace(fake.node.get(sandbox.id), generation=1) == paused
        assert await faults(fake) == []

    fake.world.guests.fail.clear()
    assert (await fake.node.resume(sandbox.id, 60)).state is State.RUNNING


async def test_what_a_guest_wrote_in_a_resume_that_failed_is_never_seen_by_its_old_memory(fake: FakeHost) -> None:
    sandbox = await fake.create()
    fake.host.live[sandbox.id].instance.plan.disk.path.write_bytes(b"when it was paused")
    await fake.node.pause(sandbox.id)
    with fake.taps.always("guest.init", Trip(error=Unavailable("mute"))) as silent:
        silent.error = None
        resuming = asyncio.create_task(fake.node.resume(sandbox.id, 60))
        await silent.reached.wait()
        (process,) = fake.world.hypervisor.alive
        process.disk.path.write_bytes(b"by a kernel that ran in vain")
        process.end(1, "panic")
        with pytest.raises(Unavailable):
            await resuming

    await fake.node.resume(sandbox.id, 60)

    (process,) = fake.world.hypervisor.alive
    assert process.disk.path.read_bytes().rstrip(b"\0") == b"when it was paused"


async def test_a_resume_that_cannot_be_undone_at_once_is_undone_by_the_sweeper(fake: FakeHost) -> None:
    sandbox = await fake.create()
    paused = await fake.node.pause(sandbox.id)
    fake.world.guests.fail["init"] = Unavailable("mute")
    fake.world.storage.fail["remove"] = Unavailable("the disk does not answer")
    with pytest.raises(Unavailable, match="mute"):
        await fake.node.resume(sandbox.id, 60)
    assert fake.state(sandbox.id) is State.RESUMING  # never an old memory on a disk that has moved on
    with pytest.raises(Conflict):
        await fake.node.resume(sandbox.id, 60)

    fake.world.storage.fail.clear()
    await sweep(fake.host)

    assert replace(fake.node.get(sandbox.id), generation=1) == paused


async def test_a_sandbox_paused_by_an_older_release_resumes_and_can_fail_to(fake: FakeHost) -> None:
    """Such a record has no disk in its capture: what the sandbox has on its own is sealed then."""
    sandbox = await fake.create()
    paused = await fake.node.pause(sandbox.id)
    assert paused.capture is not None
    await fake.host.registry.change(sandbox.id, capture=replace(paused.capture, disk=None))
    fake.world.guests.fail["init"] = Unavailable("mute")

    with pytest.raises(Unavailable):
        await fake.node.resume(sandbox.id, 60)
    assert fake.state(sandbox.id) is State.PAUSED
    fake.world.guests.fail.clear()

    assert (await fake.node.resume(sandbox.id, 60)).state is State.RUNNING


# A disk that is full, everywhere and for long


async def test_a_disk_that_is_full_for_data_and_records_leaves_the_sandbox_running(fake: FakeHost) -> None:
    sandbox = await fake.create()
    with fake.taps.always("storage.capture_memory", Trip(error=NoSpace("full"))) as full:
        pausing = asyncio.create_task(fake.node.pause(sandbox.id))
        await full.reached.wait()
        with fake.taps.always("store.update_sandbox", Trip(error=NoSpace("full"))):
            with pytest.raises(NoSpace):
                await pausing

            assert fake.state(sandbox.id) is State.RUNNING
            assert not frozen(fake, sandbox)
            with pytest.raises(NoSpace):
                await fake.node.pause(sandbox.id)  # not even begun: it cannot be recorded
            assert fake.state(sandbox.id) is State.RUNNING

    assert (await fake.node.pause(sandbox.id)).state is State.PAUSED


async def test_a_store_that_is_full_all_through_a_resume_leaves_it_paused(fake: FakeHost) -> None:
    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)

    with fake.taps.always("store.update_sandbox", Trip(error=NoSpace("full"))), pytest.raises(NoSpace):
        await fake.node.resume(sandbox.id, 60)

    assert fake.state(sandbox.id) is State.PAUSED


async def test_a_store_that_is_full_at_the_end_of_a_resume_leaves_it_paused(fake: FakeHost) -> None:
    """Nobody is told that it runs before that is recorded: a restart may take a guest back that was only resuming."""
    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)
    with fake.taps.always("guest.init", Trip()) as slow:
        resuming = asyncio.create_task(fake.node.resume(sandbox.id, 60))
        await slow.reached.wait()
        with fake.taps.always("store.update_sandbox", Trip(error=NoSpace("full"))):
            slow.go.set()
            with pytest.raises(NoSpace):
                await resuming

    assert fake.state(sandbox.id) is State.PAUSED
    assert (await fake.node.resume(sandbox.id, 60)).state is State.RUNNING


async def test_a_server_that_dies_with_a_record_behind_finds_the_same(world: World) -> None:
    """What was shown in memory only, because the store was full, is what the next server comes to."""
    fake = await FakeHost(world).start()
    sandbox = await fake.create()
    with fake.taps.always("storage.capture_memory", Trip(error=NoSpace("full"))) as full:
        pausing = asyncio.create_task(fake.node.pause(sandbox.id))
        await full.reached.wait()
        with fake.taps.always("store.update_sandbox", Trip(error=NoSpace("full"))), pytest.raises(NoSpace):
            await pausing
    (recorded,) = await world.store.sandboxes()
    assert (recorded.state, fake.state(sandbox.id)) == (State.PAUSING, State.RUNNING)

    following = await (await fake.crash()).start()

    assert following.state(sandbox.id) is State.RUNNING
    assert await faults(following) == []
    await following.stop()


# Guests that do not go on


async def test_a_guest_that_does_not_thaw_at_once_is_told_again(fake: FakeHost) -> None:
    sandbox = await fake.create()
    fake.world.storage.fail["capture_memory"] = NoSpace("full")
    fake.world.guests.fail["thaw"] = Unavailable("lost")
    with pytest.raises(NoSpace):
        await fake.node.pause(sandbox.id)
    assert fake.state(sandbox.id) is State.RUNNING

    fake.world.guests.calls.append((str(fake.host.live[sandbox.id].slot.address), "freeze"))  # it never heard of thaw
    fake.world.guests.fail.clear()
    fake.world.storage.fail.clear()
    await fake.world.clock.advance(INSIST_AFTER_S[0])

    assert not frozen(fake, sandbox)


async def test_a_guest_that_never_thaws_is_let_be_after_a_while_and_can_be_deleted(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=100_000)
    fake.world.guests.fail |= {"thaw": Unavailable("lost"), "freeze": Unavailable("lost")}
    with pytest.raises(Unavailable):
        await fake.node.pause(sandbox.id)

    await fake.world.clock.advance(3600)

    tries = [name for _, name in fake.world.guests.calls if name == "thaw"]
    assert len(tries) == 1 + len(INSIST_AFTER_S)
    await fake.node.delete(sandbox.id)


async def test_telling_a_guest_again_never_moves_one_that_is_being_captured(fake: FakeHost) -> None:
    sandbox = await fake.create()
    fake.world.guests.fail |= {"thaw": Unavailable("lost"), "freeze": Unavailable("lost")}
    with pytest.raises(Unavailable):
        await fake.node.pause(sandbox.id)
    fake.world.guests.fail.clear()
    with fake.taps.always("storage.capture_memory", Trip()) as slow:
        pausing = asyncio.create_task(fake.node.pause(sandbox.id))
        await slow.reached.wait()
        await fake.world.clock.advance(INSIST_AFTER_S[0])

        (process,) = fake.world.hypervisor.alive
        assert not process.running
        slow.go.set()
        assert (await pausing).state is State.PAUSED


# VMs that do not end


async def test_a_pause_whose_vm_does_not_end_is_paused_and_the_sweeper_ends_it(fake: FakeHost) -> None:
    sandbox = await fake.create()
    fake.vmm.fail["stop"] = Unavailable("it waits in the kernel")

    assert (await fake.node.pause(sandbox.id)).state is State.PAUSED

    assert sandbox.id in fake.world.slots.held()  # its address must not be given to another
    await sweep(fake.host)
    assert len(fake.world.hypervisor.alive) == 1
    fake.vmm.fail.clear()
    await sweep(fake.host)
    assert fake.world.hypervisor.alive == []


async def test_a_resume_never_starts_a_second_vm_beside_one_that_did_not_end(fake: FakeHost) -> None:
    sandbox = await fake.create()
    fake.vmm.fail["stop"] = Unavailable("it waits in the kernel")
    await fake.node.pause(sandbox.id)

    with pytest.raises(Unavailable):
        await fake.node.resume(sandbox.id, 60)
    assert fake.state(sandbox.id) is State.PAUSED
    assert len(fake.world.hypervisor.alive) == 1

    fake.vmm.fail.clear()
    assert (await fake.node.resume(sandbox.id, 60)).state is State.RUNNING


async def test_a_deadline_of_pause_leaves_it_running(fake: FakeHost) -> None:
    sandbox = await fake.create()
    fake.host.settings = replace(fake.host.settings, operation_timeout_s=0.01)

    with fake.taps.always("storage.capture_memory", Trip()), pytest.raises(DeadlineExceeded):
        await fake.node.pause(sandbox.id)

    assert fake.state(sandbox.id) is State.RUNNING


async def test_a_caller_that_hangs_up_does_not_stop_a_pause(fake: FakeHost) -> None:
    sandbox = await fake.create()
    with fake.taps.always("storage.capture_memory", Trip()) as slow:
        pausing = asyncio.create_task(fake.node.pause(sandbox.id))
        await slow.reached.wait()
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        slow.go.set()
        await fake.idle()

    assert fake.state(sandbox.id) is State.PAUSED


async def test_a_node_without_slots_keeps_what_cannot_be_resumed(fake: FakeHost) -> None:
    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)
    fake.world.slots.failures["acquire"] = Exhausted("none")

    with pytest.raises(AgentEnvError):
        await fake.node.resume(sandbox.id, 60)

    assert fake.state(sandbox.id) is State.PAUSED


# Another host, or this one after an upgrade


OTHER = replace(FINGERPRINT, vmm_version="0.1")


async def test_what_was_written_down_elsewhere_is_refused_before_anything_starts(fake: FakeHost) -> None:
    sandbox = await fake.create(auto_resume=True)
    paused = await fake.node.pause(sandbox.id)
    assert paused.capture is not None
    assert paused.capture.fingerprint == FINGERPRINT
    fake.host.fingerprint = OTHER

    with fake.taps.recorded() as calls:
        for verb in (fake.node.resume(sandbox.id, 60), fake.node.connect(sandbox.id, 60), fake.node.wake(sandbox.id)):
            with pytest.raises(Unsupported, match="made on another host"):
                await verb

    assert calls == []
    assert fake.node.get(sandbox.id) == paused
    fake.host.fingerprint = FINGERPRINT
    assert (await fake.node.resume(sandbox.id, 60)).state is State.RUNNING


async def test_a_vm_that_outlived_an_upgrade_is_written_down_as_what_it_is(world: World) -> None:
    """It was started by the old VMM, and its state loads in no other."""
    fake = await FakeHost(world).start()
    sandbox = await fake.create()
    following = await fake.crash()
    following.host.fingerprint = OTHER
    await following.start()

    with pytest.raises(Unsupported):
        await following.node.fork(sandbox.id, 1, 60)
    with pytest.raises(Unsupported):
        await following.node.snapshot(sandbox.id, None)
    paused = await following.node.pause(sandbox.id)

    assert paused.capture is not None
    assert paused.capture.fingerprint == FINGERPRINT
    with pytest.raises(Unsupported):
        await following.node.resume(sandbox.id, 60)
    assert await faults(following) == []
    await following.stop()


async def test_a_newer_guest_image_strands_no_paused_sandbox(fake: FakeHost) -> None:
    """Its kernel and agent are in the captured memory."""
    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)
    fake.host.fingerprint = replace(FINGERPRINT, guest_digest="newer")

    resumed = await fake.node.resume(sandbox.id, 60)

    assert resumed.fingerprint == FINGERPRINT
    assert (await fake.create()).fingerprint == FINGERPRINT
    assert (await fake.node.snapshot(sandbox.id, None)).fingerprint == FINGERPRINT


async def test_a_capture_of_an_older_release_that_did_not_say_is_let_through(fake: FakeHost) -> None:
    sandbox = await fake.create()
    paused = await fake.node.pause(sandbox.id)
    assert paused.capture is not None
    await fake.host.registry.change(sandbox.id, capture=replace(paused.capture, fingerprint=None))
    fake.host.fingerprint = OTHER

    assert (await fake.node.resume(sandbox.id, 60)).fingerprint == OTHER
