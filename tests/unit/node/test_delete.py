"""Delete: always, in whatever state, once, and with nothing left."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from agentenv.model.errors import Conflict, NoSpace, NotFound, Unavailable
from agentenv.model.lifecycle import Event, State
from agentenv.node.retire import retire
from agentenv.node.sweep import EVERY_S, sweep
from agentenv.testing.host import FakeHost, Trip, World

STALLS = {
    "creating": "guest.init",
    "pausing": "storage.capture_memory",
    "resuming": "guest.init",
    "snapshotting": "storage.seal_disk",
    "forking": "storage.seal_disk",
}


async def in_state(fake: FakeHost, state: str) -> tuple[str, asyncio.Future[object] | None]:
    """A sandbox that is held in the middle of a verb, the call that waits for it, and what lets go."""
    trip = Trip()
    if state == "creating":
        fake.taps._by_name["guest.init"] = trip
        acting: asyncio.Future[object] = asyncio.ensure_future(fake.create())
        await trip.reached.wait()
        return fake.host.registry.all()[0].id, acting
    sandbox = await fake.create()
    if state == "running":
        return sandbox.id, None
    if state in ("paused", "resuming"):
        await fake.node.pause(sandbox.id)
    if state == "paused":
        return sandbox.id, None
    if state == "error":
        (process,) = fake.world.hypervisor.alive
        process.end(-9)
        await fake.became(sandbox.id, State.ERROR)
        return sandbox.id, None
    fake.taps._by_name[STALLS[state]] = trip
    verbs: dict[str, Callable[[], Awaitable[object]]] = {
        "pausing": lambda: fake.node.pause(sandbox.id),
        "resuming": lambda: fake.node.resume(sandbox.id, 60),
        "snapshotting": lambda: fake.node.snapshot(sandbox.id, "kept"),
        "forking": lambda: fake.node.fork(sandbox.id, 2, 60),
    }
    acting = asyncio.ensure_future(verbs[state]())
    await trip.reached.wait()
    return sandbox.id, acting


STATES = ["creating", "running", "pausing", "paused", "resuming", "snapshotting", "forking", "error"]


@pytest.mark.parametrize("state", STATES)
async def test_a_sandbox_is_deleted_in_any_state(fake: FakeHost, state: str) -> None:
    sandbox_id, acting = await in_state(fake, state)
    assert fake.state(sandbox_id) == state

    await fake.node.delete(sandbox_id)
    fake.taps._by_name.clear()

    assert fake.state(sandbox_id) is State.GONE
    if acting is not None:
        with pytest.raises(Conflict):
            await acting


@pytest.mark.parametrize("state", STATES)
async def test_a_delete_needs_nothing_of_the_guest(fake: FakeHost, state: str) -> None:
    sandbox_id, acting = await in_state(fake, state)
    fake.world.guests.fail |= {"thaw": Unavailable("dead"), "freeze": Unavailable("dead"), "init": Unavailable("dead")}
    fake.vmm.fail |= {"resume": Unavailable("dead"), "pause": Unavailable("dead")}

    with fake.taps.recorded() as calls:
        await fake.node.delete(sandbox_id)
    fake.taps._by_name.clear()

    assert fake.state(sandbox_id) is State.GONE
    assert not {"guest.thaw", "instance.resume"} & set(calls)
    if acting is not None:
        await asyncio.wait([acting])
        assert acting.exception() is not None


@pytest.mark.parametrize("state", STATES)
async def test_a_hundred_deletes_at_once_are_one(fake: FakeHost, state: str) -> None:
    sandbox_id, acting = await in_state(fake, state)

    with fake.taps.recorded() as calls:
        await asyncio.gather(*(fake.node.delete(sandbox_id) for _ in range(100)))
    fake.taps._by_name.clear()

    assert calls.count("storage.remove") == 1
    if acting is not None:
        await asyncio.wait([acting])
        assert acting.exception() is not None
    with pytest.raises(NotFound):
        await fake.node.delete(sandbox_id)


async def test_a_sandbox_that_is_being_deleted_is_not_there_for_anyone(fake: FakeHost) -> None:
    sandbox = await fake.create()
    with fake.taps.always("storage.remove", Trip()) as slow:
        deleting = asyncio.create_task(fake.node.delete(sandbox.id))
        await slow.reached.wait()
        assert fake.state(sandbox.id) is State.KILLING

        for ask in (fake.node.get, fake.node.route):
            with pytest.raises(NotFound):
                ask(sandbox.id)
        for verb in (fake.node.pause(sandbox.id), fake.node.connect(sandbox.id, 60), fake.node.metrics(sandbox.id)):
            with pytest.raises(NotFound):
                await verb
        assert fake.node.sandboxes() == []
        slow.go.set()
        await deleting


async def test_a_delete_that_waits_for_another_verb_to_unwind_is_a_delete_already(fake: FakeHost) -> None:
    sandbox = await fake.create()
    with fake.taps.recorded():
        slow = fake.taps.trip(0, Trip())  # a record is being written: that is never cut short
        pausing = asyncio.create_task(fake.node.pause(sandbox.id))
        await slow.reached.wait()
        deleting = asyncio.create_task(fake.node.delete(sandbox.id))
        await fake.world.clock.advance(0)

        with pytest.raises(NotFound):
            fake.node.get(sandbox.id)
        slow.go.set()
        await deleting
        with pytest.raises(Conflict):
            await pausing


async def test_a_store_that_is_full_does_not_stop_a_delete(fake: FakeHost) -> None:
    """Deleting is what makes room."""
    sandbox = await fake.create()

    with fake.taps.always("store.update_sandbox", Trip(error=NoSpace("full"))):
        await fake.node.delete(sandbox.id)

    assert fake.state(sandbox.id) is State.GONE


@pytest.mark.parametrize("step", ["instance.stop", "storage.detach", "storage.remove", "store.delete_sandbox"])
async def test_a_delete_that_failed_can_be_asked_for_again(fake: FakeHost, step: str) -> None:
    sandbox = await fake.create()
    with fake.taps.always(step, Trip(error=Unavailable("not now"))):
        for _ in range(2):
            with pytest.raises(Unavailable):
                await fake.node.delete(sandbox.id)
    assert fake.state(sandbox.id) is State.KILLING

    await fake.node.delete(sandbox.id)

    assert fake.state(sandbox.id) is State.GONE


@pytest.mark.parametrize("step", ["instance.stop", "storage.detach", "storage.remove", "store.delete_sandbox"])
async def test_a_delete_that_failed_is_finished_by_the_sweeper(fake: FakeHost, step: str) -> None:
    sandbox = await fake.create()
    with fake.taps.always(step, Trip(error=Unavailable("not now"))):
        with pytest.raises(Unavailable):
            await fake.node.delete(sandbox.id)
        await sweep(fake.host)
        assert fake.state(sandbox.id) is State.KILLING

    await fake.world.clock.advance(EVERY_S)

    await fake.became(sandbox.id, State.GONE)


async def test_the_sweeper_leaves_alone_what_somebody_is_working_on(fake: FakeHost) -> None:
    running = await fake.create()
    with fake.taps.always("guest.init", Trip()) as slow:
        creating = asyncio.create_task(fake.create())
        await slow.reached.wait()

        await sweep(fake.host)

        slow.go.set()
        created = await creating
    assert {s.id for s in fake.node.sandboxes()} == {running.id, created.id}


async def test_a_slot_is_not_given_back_before_its_vm_is_gone(fake: FakeHost) -> None:
    sandbox = await fake.create()
    fake.vmm.fail["stop"] = Unavailable("it waits in the kernel")

    with pytest.raises(Unavailable):
        await fake.node.delete(sandbox.id)

    assert sandbox.id in fake.world.slots.held()
    assert sandbox.id in fake.world.storage.owners()
    fake.vmm.fail.clear()
    await sweep(fake.host)


@pytest.mark.parametrize("step", ["vmm.restore", "guest.init", "store.update_sandbox"])
async def test_a_create_that_fails_while_its_vm_cannot_be_ended_is_finished_by_the_sweeper(
    fake: FakeHost, step: str
) -> None:
    fake.vmm.fail["stop"] = Unavailable("it waits in the kernel")
    with (
        fake.taps.always(step, Trip(error=Unavailable("why it failed"))),
        pytest.raises(Unavailable, match="why it failed"),
    ):
        await fake.create()
    assert fake.node.sandboxes() == []

    fake.vmm.fail.clear()
    await sweep(fake.host)

    assert fake.host.registry.all() == []


async def test_a_delete_after_a_restart_finishes_what_the_last_server_began(world: World) -> None:
    fake = await FakeHost(world).start()
    sandbox = await fake.create()
    await fake.host.registry.apply(sandbox.id, Event.KILL)

    following = await (await fake.crash()).start()

    assert following.host.registry.all() == []
    assert world.hypervisor.alive == []
    await following.stop()


@pytest.mark.parametrize("step", ["slots.release", "storage.detach"])
async def test_a_kill_while_something_is_undone_does_not_cut_that_short(fake: FakeHost, step: str) -> None:
    fake.vmm.fail["restore"] = Unavailable("no")
    undoing = Trip()
    seen = 0

    async def second_time() -> None:  # the first detach is that of the start itself
        nonlocal seen
        seen += 1
        if seen == 2 or step == "slots.release":
            await Trip.happen(undoing)

    undoing_calls = _Scripted(second_time)
    with fake.taps.always(step, undoing_calls):
        creating = asyncio.create_task(fake.create())
        await undoing.reached.wait()
        (starting,) = fake.host.registry.all()
        deleting = asyncio.create_task(fake.node.delete(starting.id))
        await fake.world.clock.advance(0)
        undoing.go.set()
        await deleting
    with pytest.raises(Conflict):
        await creating
    fake.vmm.fail.clear()


class _Scripted(Trip):
    """Does what a test says each time."""

    def __init__(self, script: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.script = script

    async def happen(self) -> None:
        await self.script()


async def test_ending_a_vm_is_never_cut_short(fake: FakeHost) -> None:
    sandbox = await fake.create()
    with fake.taps.always("instance.stop", Trip()) as slow:
        ending = asyncio.create_task(retire(fake.host, sandbox.id))
        await slow.reached.wait()
        for _ in range(3):
            ending.cancel()
            await fake.world.clock.advance(0)
        assert not ending.done()
        slow.go.set()
        with pytest.raises(asyncio.CancelledError):
            await ending

    assert fake.world.slots.held() == {}
    await fake.node.delete(sandbox.id)


async def test_a_caller_that_hangs_up_does_not_stop_a_delete(fake: FakeHost) -> None:
    sandbox = await fake.create()
    with fake.taps.always("storage.remove", Trip()) as slow:
        deleting = asyncio.create_task(fake.node.delete(sandbox.id))
        await slow.reached.wait()
        deleting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await deleting
        slow.go.set()
        await fake.idle()

    assert fake.state(sandbox.id) is State.GONE
