"""Fork and snapshot: the source runs on, every child has its own outcome, and what is needed stays."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from agentenv.model.errors import AlreadyExists, Conflict, Exhausted, Invalid, NoSpace, NotFound, Unavailable
from agentenv.model.ids import new_snapshot_id
from agentenv.model.lifecycle import State
from agentenv.model.sandbox import OnTimeout
from agentenv.model.snapshot import Source
from agentenv.testing.audit import frozen
from agentenv.testing.host import FakeHost, Trip, World


async def test_children_are_like_their_source_but_each_has_its_own_identity(fake: FakeHost) -> None:
    source = await fake.create(metadata={"a": "b"}, env={"C": "d"}, on_timeout=OnTimeout.PAUSE, auto_resume=True)

    forked = await fake.node.fork(source.id, 3, 60)

    children = [child.sandbox for child in forked if child.sandbox is not None]
    assert len({child.id for child in children} | {source.id}) == 4
    now = fake.world.clock.now()
    for child in children:
        assert child.state is State.RUNNING
        assert child.ends_at == now + timedelta(seconds=60)
        like = replace(
            child, id=source.id, ends_at=source.ends_at, process=source.process, slot_index=source.slot_index
        )
        assert like == source
        assert fake.world.guests.secrets[child.id] == f"control-{source.id}"
    entropy = {fake.world.guests.identities[child.id][0].entropy for child in children}
    assert len(entropy) == 3
    assert fake.state(source.id) is State.RUNNING


async def test_a_fork_is_one_capture_however_many_children(fake: FakeHost) -> None:
    source = await fake.create()

    with fake.taps.recorded() as calls:
        await fake.node.fork(source.id, 8, 60)

    assert calls.count("storage.capture_memory") == 1
    assert calls.count("vmm.restore") == 8


async def test_children_have_the_memory_and_disk_of_the_source(fake: FakeHost) -> None:
    source = await fake.create()
    pid = fake.host.live[source.id].instance.process.pid
    fake.world.storage.write_memory(pid, 0, b"shared past")

    (forked,) = await fake.node.fork(source.id, 1, 60)

    assert forked.sandbox is not None
    memory = fake.host.live[forked.sandbox.id].instance.plan.memory_path
    assert memory.read_bytes()[:11] == b"shared past"


async def test_a_child_can_be_forked_paused_and_outlive_its_source(fake: FakeHost) -> None:
    source = await fake.create()
    (first,) = await fake.node.fork(source.id, 1, 60)
    assert first.sandbox is not None
    await fake.node.delete(source.id)
    (second,) = await fake.node.fork(first.sandbox.id, 1, 60)
    assert second.sandbox is not None
    await fake.node.delete(first.sandbox.id)
    await fake.host.collector.collect()

    await fake.node.pause(second.sandbox.id)
    await fake.host.collector.collect()

    assert (await fake.node.resume(second.sandbox.id, 60)).state is State.RUNNING


async def test_each_child_has_its_own_outcome_in_order(fake: FakeHost) -> None:
    source = await fake.create()
    failing = Unavailable("no more")
    with fake.taps.recorded() as calls:
        await fake.node.fork(source.id, 3, 60)
    starts = [number for number, name in enumerate(calls) if name == "vmm.restore"]

    with fake.taps.recorded():
        fake.taps.trip(starts[1], Trip(error=failing))
        forked = await fake.node.fork(source.id, 3, 60)

    assert [child.error for child in forked] == [None, failing, None]
    assert [child.sandbox is None for child in forked] == [False, True, False]


async def test_the_last_place_goes_to_one_child(world: World) -> None:
    fake = await FakeHost(world, max_sandboxes=3).start()
    source = await fake.create()

    with pytest.raises(Exhausted):
        await fake.node.fork(source.id, 3, 60)
    outcomes = await asyncio.gather(*(fake.node.fork(source.id, 2, 60) for _ in range(4)), return_exceptions=True)

    children = [child for outcome in outcomes if not isinstance(outcome, BaseException) for child in outcome]
    assert sum(child.sandbox is not None for child in children) == 2
    assert all(isinstance(child.error, Exhausted) for child in children if child.sandbox is None)
    assert len(fake.node.sandboxes()) == 3
    await fake.stop()


async def test_a_child_can_be_killed_while_it_starts_without_the_others_noticing(fake: FakeHost) -> None:
    source = await fake.create()
    with fake.taps.always("guest.init", Trip()) as slow:
        forking = asyncio.create_task(fake.node.fork(source.id, 2, 60))
        await slow.reached.wait()
        doomed = next(s for s in fake.host.registry.all() if s.state is State.CREATING)
        await fake.node.delete(doomed.id)
        slow.go.set()
        outcomes = await forking

    assert sorted(isinstance(child.error, Conflict) for child in outcomes) == [False, True]


async def test_the_source_can_be_paused_or_killed_while_children_start(fake: FakeHost) -> None:
    source = await fake.create()
    with fake.taps.always("guest.init", Trip()) as slow:
        forking = asyncio.create_task(fake.node.fork(source.id, 2, 60))
        await slow.reached.wait()

        assert (await fake.node.pause(source.id)).state is State.PAUSED
        await fake.node.delete(source.id)
        await fake.host.collector.collect()

        slow.go.set()
        outcomes = await forking

    assert all(child.sandbox is not None for child in outcomes)


@pytest.mark.parametrize(("count", "timeout_s"), [(0, 60), (-1, 60), (101, 60), (1, 0), (1, -1), (1, 10**9)])
async def test_a_fork_that_cannot_be_does_not_stop_the_source(fake: FakeHost, count: int, timeout_s: int) -> None:
    source = await fake.create()

    with fake.taps.recorded() as calls, pytest.raises(Invalid):
        await fake.node.fork(source.id, count, timeout_s)

    assert calls == []


async def test_forks_and_snapshots_of_one_sandbox_take_turns(fake: FakeHost) -> None:
    source = await fake.create()

    with fake.taps.recorded() as calls:
        await asyncio.gather(
            fake.node.fork(source.id, 1, 60), fake.node.snapshot(source.id, "a"), fake.node.fork(source.id, 1, 60)
        )

    stops = [name for name in calls if name in ("instance.pause", "storage.seal_disk", "guest.thaw")]
    assert stops == ["instance.pause", "storage.seal_disk", "guest.thaw"] * 3


async def test_a_pause_waits_for_the_capture_of_a_fork(fake: FakeHost) -> None:
    source = await fake.create()
    with fake.taps.always("storage.capture_memory", Trip()) as slow:
        forking = asyncio.create_task(fake.node.fork(source.id, 2, 60))
        await slow.reached.wait()
        pausing = asyncio.create_task(fake.node.pause(source.id))
        await fake.world.clock.advance(0)
        assert fake.state(source.id) is State.FORKING

        slow.go.set()
        forked, paused = await forking, await pausing

    assert all(child.sandbox is not None for child in forked)
    assert paused.state is State.PAUSED


async def test_a_caller_that_hangs_up_leaves_children_that_live_their_time(fake: FakeHost) -> None:
    source = await fake.create()
    with fake.taps.always("guest.init", Trip()) as slow:
        forking = asyncio.create_task(fake.node.fork(source.id, 2, 60))
        await slow.reached.wait()
        forking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forking
        slow.go.set()
        await fake.idle()
        await fake.world.clock.advance(0)

    assert len(fake.node.sandboxes()) == 3
    await fake.world.clock.advance(61)
    assert [s.id for s in fake.node.sandboxes()] == [source.id]


# Snapshots


async def test_a_snapshot_can_be_started_from_after_its_source_is_gone(fake: FakeHost) -> None:
    source = await fake.create(env={"A": "b"})
    pid = fake.host.live[source.id].instance.process.pid
    fake.world.storage.write_memory(pid, 0, b"kept")

    snapshot = await fake.node.snapshot(source.id, "mine")
    await fake.node.delete(source.id)
    await fake.host.collector.collect()
    sandbox = await fake.create(template="mine")

    assert (snapshot.source, snapshot.sandbox_id, snapshot.names) == (Source.SANDBOX, source.id, ("mine",))
    assert sandbox.env == {"A": "b"}
    assert len(snapshot.capture.memory.layers) == 1  # flat: many guests share its pages
    memory = fake.host.live[sandbox.id].instance.plan.memory_path
    assert memory.read_bytes()[:4] == b"kept"


async def test_the_source_of_a_snapshot_runs_on(fake: FakeHost) -> None:
    source = await fake.create()

    await fake.node.snapshot(source.id, None)

    assert fake.state(source.id) is State.RUNNING
    assert not frozen(fake, source)


async def test_a_name_in_use_moves_to_the_new_snapshot(fake: FakeHost) -> None:
    source = await fake.create()
    first = await fake.node.snapshot(source.id, "mine")

    second = await fake.node.snapshot(source.id, "mine")

    assert fake.node.find_snapshot("mine") == second
    assert fake.node.find_snapshot(first.id).names == ()


async def test_the_name_of_a_template_is_refused_before_the_source_is_stopped(fake: FakeHost) -> None:
    source = await fake.create()
    template = fake.node.find_snapshot("base")

    with fake.taps.recorded() as calls, pytest.raises(AlreadyExists) as refused:
        await fake.node.snapshot(source.id, "base")

    assert calls == []
    assert refused.value.hint == "choose another name"
    assert fake.node.find_snapshot("base") == template


async def test_a_template_that_appears_during_a_snapshot_keeps_its_name(fake: FakeHost) -> None:
    source = await fake.create()
    template = replace(fake.node.find_snapshot("base"), id=new_snapshot_id(), names=("mine",))
    with fake.taps.always("storage.capture_memory", Trip()) as slow:
        taking = asyncio.create_task(fake.node.snapshot(source.id, "mine"))
        await slow.reached.wait()
        await fake.host.catalogue.add(template)
        slow.go.set()
        with pytest.raises(AlreadyExists):
            await taking

    assert fake.node.find_snapshot("mine") == template
    assert fake.state(source.id) is State.RUNNING


async def test_snapshots_that_take_a_name_at_once_leave_it_where_the_store_says(fake: FakeHost) -> None:
    source = await fake.create()
    for _ in range(5):
        await asyncio.gather(*(fake.node.snapshot(source.id, "mine") for _ in range(4)))

        stored = [s.id for s in await fake.world.store.snapshots() if "mine" in s.names]
        assert [fake.node.find_snapshot("mine").id] == stored


async def test_the_older_of_two_publications_never_takes_the_name_back(fake: FakeHost) -> None:
    source = await fake.create()
    insert = fake.world.store.insert_snapshot
    answers = [asyncio.Event(), asyncio.Event()]
    waiting = iter(answers)

    async def slow_answer(*args: object, **kwargs: object) -> None:
        await insert(*args, **kwargs)  # type: ignore[arg-type]
        await next(waiting).wait()

    fake.world.store.insert_snapshot = slow_answer  # type: ignore[method-assign]
    taking = [asyncio.create_task(fake.node.snapshot(source.id, "mine")) for _ in range(2)]
    await fake.world.clock.advance(0)
    for answer in reversed(answers):
        answer.set()
        await fake.world.clock.advance(0)
    await asyncio.gather(*taking)

    stored = [s.id for s in await fake.world.store.snapshots() if "mine" in s.names]
    assert [fake.node.find_snapshot("mine").id] == stored


@pytest.mark.parametrize("name", ["", "../x", "a b", "a/b", "a" * 129, "-a", "a\x00", "é"])
async def test_a_name_that_cannot_be_is_invalid_and_does_not_stop_the_source(fake: FakeHost, name: str) -> None:
    source = await fake.create()

    with fake.taps.recorded() as calls, pytest.raises(Invalid):
        await fake.node.snapshot(source.id, name)

    assert calls == []


async def test_a_snapshot_that_cannot_be_recorded_is_not_there(fake: FakeHost) -> None:
    source = await fake.create()
    with fake.taps.always("store.insert_snapshot", Trip(error=NoSpace("full"))), pytest.raises(NoSpace):
        await fake.node.snapshot(source.id, "mine")

    with pytest.raises(NotFound):
        fake.node.find_snapshot("mine")
    assert fake.state(source.id) is State.RUNNING


@pytest.mark.parametrize("name", ["nothing", "a\nb", "x" * 10_000])
async def test_what_is_not_there_is_named_at_a_bounded_length(fake: FakeHost, name: str) -> None:
    with pytest.raises(NotFound) as refused:
        fake.node.find_snapshot(name)

    assert repr(name[:128]) in refused.value.message
    assert len(refused.value.message) < 200
    assert "aenv template list" in (refused.value.hint or "")


async def test_a_deleted_snapshot_is_collected_when_the_last_that_needs_it_is_gone(fake: FakeHost) -> None:
    source = await fake.create()
    snapshot = await fake.node.snapshot(source.id, "mine")
    sandbox = await fake.create(template="mine")
    paused = await fake.create(template="mine")
    await fake.node.pause(paused.id)

    await fake.node.delete_snapshot("mine")

    with pytest.raises(NotFound):
        await fake.create(template="mine")
    with pytest.raises(NotFound):
        await fake.node.delete_snapshot(snapshot.id)
    await fake.host.collector.collect()
    assert (await fake.node.resume(paused.id, 60)).state is State.RUNNING
    await fake.node.fork(sandbox.id, 1, 60)
    layers = snapshot.capture.memory.layers
    assert set(layers) <= fake.world.storage.layers
    for each in fake.node.sandboxes():
        await fake.node.delete(each.id)
    await fake.host.collector.collect()
    assert not set(layers) & fake.world.storage.layers


@pytest.mark.parametrize("verb", ["fork", "snapshot"])
async def test_a_full_disk_is_refused_before_the_source_is_stopped(fake: FakeHost, verb: str) -> None:
    source = await fake.create()
    fake.world.storage.free_bytes = 0

    with fake.taps.recorded() as calls, pytest.raises(NoSpace):
        await (fake.node.fork(source.id, 1, 60) if verb == "fork" else fake.node.snapshot(source.id, None))

    assert calls == ["storage.usage"]


async def test_snapshots_are_listed_newest_first_and_by_source(fake: FakeHost) -> None:
    source = await fake.create()
    made = []
    for name in ("one", "two"):
        await fake.world.clock.advance(1)
        made.append(await fake.node.snapshot(source.id, name))

    assert list(fake.node.snapshots(Source.SANDBOX)) == made[::-1]
    assert [s.names for s in fake.node.snapshots(Source.BUILD)] == [("base",)]
    assert len(fake.node.snapshots()) == 3
