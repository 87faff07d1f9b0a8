"""One suite over every store: SQL in a file, and the fake."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from agentenv.aio.tasks import spawn
from agentenv.model.errors import AgentEnvError, AlreadyExists, Conflict, Invalid, NotFound, Unavailable
from agentenv.model.ids import BlobId, LayerId, new_sandbox_id, new_snapshot_id
from agentenv.model.lifecycle import State
from agentenv.model.machine import Fingerprint, Machine, ProcessIdentity
from agentenv.model.policy import EgressPolicy, IngressPolicy
from agentenv.model.sandbox import OnTimeout, Sandbox
from agentenv.model.snapshot import Capture, Snapshot, Source, Stack
from agentenv.state.contract import Store
from agentenv.state.engine import sqlite_url
from agentenv.state.sql import SqlStore
from agentenv.testing.store import MemoryStore

NOW = datetime(2026, 8, 1, 12, 30, 15, 123456, tzinfo=UTC)
MACHINE = Machine(vcpu_count=1, memory_mib=512, disk_mib=1024)


def _sandbox(**changes: object) -> Sandbox:
    sandbox = Sandbox(
        id=new_sandbox_id(),
        template_id=new_snapshot_id(),
        template_name="base",
        state=State.CREATING,
        generation=1,
        machine=MACHINE,
        created_at=NOW,
        started_at=NOW,
        ends_at=NOW + timedelta(seconds=15),
    )
    return replace(sandbox, **changes)  # type: ignore[arg-type]


def _snapshot(*names: str, **changes: object) -> Snapshot:
    snapshot = Snapshot(
        id=new_snapshot_id(),
        names=names,
        source=Source.BUILD,
        sandbox_id=None,
        machine=MACHINE,
        fingerprint=Fingerprint("qemu", "7.2", "tcg", "max", "sha256:0"),
        capture=Capture(
            BlobId("b"), Stack((LayerId("m"),), 512 << 20), Stack((LayerId("d"),), 1 << 30), new_sandbox_id()
        ),
        created_at=NOW,
        envd_version="0.1.0",
    )
    return replace(snapshot, **changes)  # type: ignore[arg-type]


class Shelf:
    """A place where a store is put away and taken out again, as by a server that restarts."""

    def __init__(self, make: Callable[[], Store]) -> None:
        self.make = make
        self.store = make()

    async def restart(self) -> Store:
        await self.store.close()
        self.store = self.make()
        await self.store.start()
        return self.store


@pytest.fixture(params=["sqlite", "memory"])
async def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shelf]:
    if request.param == "sqlite":
        url = sqlite_url(tmp_path / "state" / "aenv.db")
        shelf = Shelf(lambda: SqlStore(url))
    else:
        memory = MemoryStore()
        shelf = Shelf(lambda: memory)
    await shelf.store.start()
    yield shelf
    await shelf.store.close()


@pytest.fixture
def store(shelf: Shelf) -> Store:
    return shelf.store


async def test_a_sandbox_is_the_same_after_a_restart_with_everything_it_holds(shelf: Shelf) -> None:
    sandbox = _sandbox(
        state=State.PAUSED,
        generation=7,
        ends_at=None,
        on_timeout=OnTimeout.PAUSE,
        auto_resume=True,
        secure=False,
        metadata={"team": "équipe", "": "empty"},
        env={"TOKEN": "s3cret", "LINES": "a\nb\x00c"},
        egress=EgressPolicy(False, (IPv4Network("8.8.8.8/32"),), (IPv4Network("0.0.0.0/0"),)),
        ingress=IngressPolicy(allow_public_traffic=False, mask_request_host="localhost:${PORT}"),
        envd_version="0.1.0",
        default_user="user",
        default_workdir="/home/user",
        slot_index=12,
        process=ProcessIdentity(4711, 99887766),
        capture=Capture(BlobId("b"), Stack((LayerId("l1"), LayerId("l2")), 512 << 20), None, new_sandbox_id()),
        reason="why not",
    )
    await shelf.store.insert_sandbox(sandbox)

    assert await (await shelf.restart()).sandboxes() == [sandbox]


async def test_a_snapshot_is_the_same_after_a_restart_with_its_names_in_order(shelf: Shelf) -> None:
    snapshot = _snapshot(
        "zeta", "alpha", source=Source.SANDBOX, sandbox_id=new_sandbox_id(), env={"A": "1"}, default_user=None,
        default_workdir="/srv", spawn_count=3, last_spawned_at=NOW + timedelta(microseconds=1),
    )  # fmt: skip
    await shelf.store.insert_snapshot(snapshot)

    assert await (await shelf.restart()).snapshots() == [snapshot]


async def test_records_come_oldest_first(store: Store) -> None:
    ages = (5, 1, 3)
    for age in ages:
        await store.insert_sandbox(_sandbox(created_at=NOW - timedelta(seconds=age)))
        await store.insert_snapshot(_snapshot(created_at=NOW - timedelta(seconds=age)))

    expected = [NOW - timedelta(seconds=age) for age in (5, 3, 1)]
    assert [sandbox.created_at for sandbox in await store.sandboxes()] == expected
    assert [snapshot.created_at for snapshot in await store.snapshots()] == expected


async def test_an_id_is_taken_once(store: Store) -> None:
    sandbox, snapshot = _sandbox(), _snapshot()
    await store.insert_sandbox(sandbox)
    await store.insert_snapshot(snapshot)

    with pytest.raises(AlreadyExists):
        await store.insert_sandbox(replace(sandbox, generation=2))
    with pytest.raises(AlreadyExists):
        await store.insert_snapshot(replace(snapshot, names=("new",)))

    assert await store.sandboxes() == [sandbox]
    assert await store.snapshots() == [snapshot]


async def test_a_change_is_made_only_at_the_state_and_generation_it_was_meant_for(store: Store) -> None:
    creating = _sandbox()
    running = replace(creating, state=State.RUNNING, generation=2, process=ProcessIdentity(1, 2))
    await store.insert_sandbox(creating)

    for state, generation in ((State.RUNNING, 1), (State.CREATING, 2), (State.RUNNING, 2)):
        with pytest.raises(Conflict):
            await store.update_sandbox(running, state=state, generation=generation)
    assert await store.sandboxes() == [creating]

    await store.update_sandbox(running, state=State.CREATING, generation=1)
    assert await store.sandboxes() == [running]


async def test_of_two_changes_from_one_place_one_wins(store: Store) -> None:
    running = _sandbox(state=State.RUNNING)
    await store.insert_sandbox(running)
    pausing = [replace(running, state=State.PAUSING, reason=str(n)) for n in range(20)]

    attempts = [spawn("update", store.update_sandbox(wanted, state=State.RUNNING, generation=1)) for wanted in pausing]
    outcomes = [await _outcome(attempt) for attempt in attempts]

    assert outcomes.count(None) == 1
    assert all(isinstance(outcome, Conflict) for outcome in outcomes if outcome is not None)
    assert await store.sandboxes() == [pausing[outcomes.index(None)]]


async def _outcome(attempt: object) -> AgentEnvError | None:
    try:
        await attempt  # type: ignore[misc]
    except AgentEnvError as error:
        return error
    return None


async def test_a_change_of_what_is_not_there_is_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        await store.update_sandbox(_sandbox(), state=State.CREATING, generation=1)
    assert await store.sandboxes() == []


async def test_deleting_twice_is_deleting_once(shelf: Shelf) -> None:
    sandbox, kept = _sandbox(), _sandbox()
    await shelf.store.insert_sandbox(sandbox)
    await shelf.store.insert_sandbox(kept)

    await shelf.store.delete_sandbox(sandbox.id)
    await shelf.store.delete_sandbox(sandbox.id)
    await shelf.store.delete_snapshot(new_snapshot_id())

    assert await (await shelf.restart()).sandboxes() == [kept]


async def test_a_taken_name_is_refused_and_nothing_of_the_snapshot_stays(store: Store) -> None:
    first = _snapshot("base")
    await store.insert_snapshot(first)

    with pytest.raises(AlreadyExists):
        await store.insert_snapshot(_snapshot("other", "base"))

    assert await store.snapshots() == [first]
    await store.insert_snapshot(_snapshot("other"))


async def test_a_name_may_move_and_leaves_its_holder_the_others(store: Store) -> None:
    first = _snapshot("base", "stable", "old")
    second = _snapshot("base", "new", created_at=NOW + timedelta(seconds=1))
    await store.insert_snapshot(first)

    await store.insert_snapshot(second, replace_names=True)

    assert await store.snapshots() == [replace(first, names=("stable", "old")), second]


async def test_a_snapshot_that_is_refused_takes_no_name_from_anyone(store: Store) -> None:
    first = _snapshot("base")
    await store.insert_snapshot(first)

    with pytest.raises(AlreadyExists):
        await store.insert_snapshot(_snapshot("base", "twice", "twice"), replace_names=True)

    assert await store.snapshots() == [first]


async def test_names_of_a_deleted_snapshot_are_free(store: Store) -> None:
    first = _snapshot("base")
    await store.insert_snapshot(first)
    await store.delete_snapshot(first.id)

    second = _snapshot("base")
    await store.insert_snapshot(second)

    assert await store.snapshots() == [second]


async def test_names_differ_by_case(store: Store) -> None:
    await store.insert_snapshot(_snapshot("base"))
    await store.insert_snapshot(_snapshot("Base"))
    assert len(await store.snapshots()) == 2


async def test_spawns_are_counted_in_the_end(shelf: Shelf) -> None:
    snapshot = _snapshot("base")
    await shelf.store.insert_snapshot(snapshot)
    spawned = replace(snapshot, spawn_count=2, last_spawned_at=NOW)

    await shelf.store.count_spawn(replace(snapshot, spawn_count=1, last_spawned_at=NOW - timedelta(seconds=1)))
    await shelf.store.count_spawn(spawned)
    await shelf.store.count_spawn(_snapshot())  # deleted meanwhile

    assert await (await shelf.restart()).snapshots() == [spawned]


async def test_text_that_no_database_can_hold_is_refused(store: Store) -> None:
    sandbox = _sandbox(metadata={"half a character": "\ud83d"})
    if isinstance(store, MemoryStore):
        await store.insert_sandbox(sandbox)  # holds anything
        return
    with pytest.raises(Invalid):
        await store.insert_sandbox(sandbox)
    assert await store.sandboxes() == []


async def test_nothing_is_quarantined_without_a_reason(store: Store) -> None:
    await store.insert_sandbox(_sandbox())
    await store.insert_snapshot(_snapshot("base"))
    assert await store.quarantined() == []


async def test_a_closed_store_says_so(shelf: Shelf) -> None:
    await shelf.store.close()
    await shelf.store.close()

    with pytest.raises(Unavailable):
        await shelf.store.insert_sandbox(_sandbox())
    with pytest.raises(Unavailable):
        await shelf.store.sandboxes()


async def test_many_writers_at_once_are_all_heard(shelf: Shelf) -> None:
    boxes = [_sandbox(metadata={"n": str(n)}) for n in range(200)]
    for waiting in [spawn("insert", shelf.store.insert_sandbox(sandbox)) for sandbox in boxes]:
        await waiting

    running = [replace(sandbox, state=State.RUNNING) for sandbox in boxes]
    for waiting in [
        spawn("update", shelf.store.update_sandbox(sandbox, state=State.CREATING, generation=1)) for sandbox in running
    ]:
        await waiting

    assert await (await shelf.restart()).sandboxes() == sorted(running, key=lambda sandbox: sandbox.id)
