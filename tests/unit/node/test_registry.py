"""The registry: memory follows the store, in order, and nobody who is cancelled is left in doubt."""

import asyncio
from datetime import UTC, datetime

import pytest

from agentenv.model.errors import Conflict, NoSpace, NotFound
from agentenv.model.ids import SandboxId, new_sandbox_id, new_snapshot_id
from agentenv.model.lifecycle import Event, State
from agentenv.model.machine import Machine
from agentenv.model.sandbox import Sandbox
from agentenv.node.registry import Registry
from agentenv.testing.store import MemoryStore


class SlowStore(MemoryStore):
    """Writes are done at once, and told when `answer` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.answer = asyncio.Event()

    async def update_sandbox(self, sandbox: Sandbox, *, state: State, generation: int) -> None:
        self.begun.set()
        await super().update_sandbox(sandbox, state=state, generation=generation)
        await self.answer.wait()


def make_sandbox(state: State = State.RUNNING) -> Sandbox:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return Sandbox(
        id=new_sandbox_id(), template_id=new_snapshot_id(), template_name=None, state=state, generation=1,
        machine=Machine(1, 1, 1), created_at=now, started_at=now, ends_at=None,
    )  # fmt: skip


async def loaded(store: MemoryStore, state: State = State.RUNNING) -> tuple[Registry, SandboxId]:
    await store.start()
    sandbox = make_sandbox(state)
    await store.insert_sandbox(sandbox)
    registry = Registry(store)
    registry.load(sandbox)
    return registry, sandbox.id


async def test_a_move_is_in_the_store_before_it_is_seen() -> None:
    store = SlowStore()
    registry, sandbox_id = await loaded(store)

    moving = asyncio.create_task(registry.apply(sandbox_id, Event.PAUSE))
    await store.begun.wait()
    assert registry.get(sandbox_id).state is State.RUNNING
    store.answer.set()
    await moving

    assert registry.get(sandbox_id).state is State.PAUSING


async def test_a_move_that_the_table_forbids_touches_nothing() -> None:
    store = MemoryStore()
    registry, sandbox_id = await loaded(store)

    with pytest.raises(Conflict):
        await registry.apply(sandbox_id, Event.RESUME)
    with pytest.raises(Conflict):
        await registry.conclude(sandbox_id, Event.ROLLED_BACK)

    assert registry.get(sandbox_id).state is State.RUNNING


async def test_a_move_that_cannot_be_recorded_has_not_happened() -> None:
    store = MemoryStore()
    registry, sandbox_id = await loaded(store)
    store.failures["update_sandbox"] = NoSpace("full")

    with pytest.raises(NoSpace):
        await registry.apply(sandbox_id, Event.PAUSE)

    assert registry.get(sandbox_id).state is State.RUNNING


async def test_an_outcome_that_cannot_be_recorded_is_seen_and_recorded_with_the_next_change() -> None:
    store = MemoryStore()
    registry, sandbox_id = await loaded(store, State.PAUSING)
    store.failures["update_sandbox"] = NoSpace("full")

    await registry.conclude(sandbox_id, Event.ROLLED_BACK)
    assert registry.get(sandbox_id).state is State.RUNNING
    assert (await store.sandboxes())[0].state is State.PAUSING

    await registry.apply(sandbox_id, Event.PAUSE)
    await registry.apply(sandbox_id, Event.ROLLED_BACK)
    assert await store.sandboxes() == registry.all()


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_writer_ends_when_it_is_known_what_happened(times: int) -> None:
    store = SlowStore()
    registry, sandbox_id = await loaded(store)
    moving = asyncio.create_task(registry.apply(sandbox_id, Event.PAUSE))
    await store.begun.wait()

    for _ in range(times):
        moving.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not moving.done()
    store.answer.set()
    with pytest.raises(asyncio.CancelledError):
        await moving

    assert registry.get(sandbox_id).state is State.PAUSING


async def test_nobody_writes_before_the_writer_that_was_cancelled_is_done() -> None:
    store = SlowStore()
    registry, sandbox_id = await loaded(store)
    moving = asyncio.create_task(registry.apply(sandbox_id, Event.PAUSE))
    await store.begun.wait()
    moving.cancel()
    moving.cancel()
    rolling_back = asyncio.create_task(registry.apply(sandbox_id, Event.ROLLED_BACK))
    for _ in range(5):
        await asyncio.sleep(0)

    store.answer.set()
    await rolling_back

    assert registry.get(sandbox_id).state is State.RUNNING
    assert await store.sandboxes() == registry.all()


async def test_another_writer_of_the_record_is_a_conflict() -> None:
    store = MemoryStore()
    registry, sandbox_id = await loaded(store)
    other = Registry(store)
    other.load(registry.get(sandbox_id))
    await other.apply(sandbox_id, Event.KILL)

    with pytest.raises(Conflict):
        await registry.apply(sandbox_id, Event.PAUSE)


async def test_changes_at_once_are_all_kept() -> None:
    registry, sandbox_id = await loaded(MemoryStore())

    async def add(number: int) -> None:
        await registry.change(sandbox_id, metadata={str(number): ""})

    await asyncio.gather(*(add(n) for n in range(50)), registry.apply(sandbox_id, Event.PAUSE))

    now = registry.get(sandbox_id)
    assert now.state is State.PAUSING
    assert now.metadata == {"49": ""}


async def test_what_is_reserved_has_no_record_until_it_changes() -> None:
    store = MemoryStore()
    await store.start()
    registry = Registry(store)
    sandbox = make_sandbox(State.CREATING)

    registry.reserve(sandbox)
    assert await store.sandboxes() == []
    await registry.change(sandbox.id, slot_index=3)

    assert [s.slot_index for s in await store.sandboxes()] == [3]


async def test_forgetting_is_idempotent_and_heard_once() -> None:
    registry, sandbox_id = await loaded(MemoryStore())
    heard: list[tuple[Sandbox | None, Sandbox | None]] = []
    registry.listen(lambda before, after: heard.append((before, after)))
    before = registry.get(sandbox_id)

    await registry.forget(sandbox_id)
    await registry.forget(sandbox_id)

    assert heard == [(before, None)]
    with pytest.raises(NotFound):
        registry.get(sandbox_id)
    with pytest.raises(NotFound):
        await registry.change(sandbox_id, metadata={})


async def test_listeners_hear_every_change_with_what_was_before() -> None:
    registry, sandbox_id = await loaded(MemoryStore())
    heard: list[tuple[State | None, State | None]] = []
    registry.listen(lambda b, a: heard.append((b.state if b else None, a.state if a else None)))

    await registry.apply(sandbox_id, Event.PAUSE)
    await registry.apply(sandbox_id, Event.DONE)
    await registry.forget(sandbox_id)

    assert heard == [(State.RUNNING, State.PAUSING), (State.PAUSING, State.PAUSED), (State.PAUSED, None)]
    assert repr(registry) == "<Registry {}>"
