"""The SQL store: durability, migrations, damaged files and records, full disks, cancelled callers."""

import asyncio
import json
import logging
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.ext.asyncio import AsyncConnection

from agentenv.aio.failpoints import REGISTRY, Raise, Stall
from agentenv.aio.tasks import spawn
from agentenv.model.errors import Bug, Conflict, Invalid, NoSpace, Unavailable, Unsupported
from agentenv.model.ids import SnapshotId, new_sandbox_id, new_snapshot_id
from agentenv.model.lifecycle import State
from agentenv.model.machine import Machine
from agentenv.model.sandbox import Sandbox
from agentenv.state import engine as engine_module
from agentenv.state import schema
from agentenv.state.engine import open_engine, sqlite_url
from agentenv.state.migrate import SCRIPTS, migrate
from agentenv.state.room import RESERVE_BYTES, Room
from agentenv.state.sql import SqlStore

NOW = datetime(2026, 8, 1, tzinfo=UTC)


def _sandbox(n: int = 0) -> Sandbox:
    return Sandbox(
        id=new_sandbox_id(),
        template_id=new_snapshot_id(),
        template_name=None,
        state=State.CREATING,
        generation=1,
        machine=Machine(1, 512, 1024),
        created_at=NOW,
        started_at=NOW,
        ends_at=None,
        metadata={"n": str(n)},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "aenv.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore(sqlite_url(path))
    await store.start()
    yield store
    await store.close()


async def _restarted(path: Path, *, reserve_bytes: int = RESERVE_BYTES) -> SqlStore:
    store = SqlStore(sqlite_url(path), reserve_bytes=reserve_bytes)
    await store.start()
    return store


async def test_only_the_owner_can_read_the_records(store: SqlStore, path: Path) -> None:
    await store.insert_sandbox(_sandbox())

    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes
    assert set(modes.values()) == {0o600}


async def test_a_database_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "aenv.db").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(Unavailable):
        await SqlStore(sqlite_url(tmp_path / "aenv.db")).start()


async def test_commits_survive_a_power_cut(store: SqlStore) -> None:
    async def pragmas(connection: AsyncConnection) -> dict[str, object]:
        return {
            name: (await connection.exec_driver_sql(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }

    assert await store._open().run(pragmas) == {
        "journal_mode": "wal",
        "synchronous": 2,
        "foreign_keys": 1,
        "busy_timeout": engine_module.BUSY_TIMEOUT_MS,
    }


_WRITE_AND_DIE = """
import asyncio, os, signal, sys
from dataclasses import replace
sys.path.insert(0, sys.argv[2])
from tests.unit.state.test_sql import _sandbox, SqlStore, State
async def main():
    store = SqlStore(sys.argv[1])
    await store.start()
    for n in range(5):
        sandbox = _sandbox(n)
        await store.insert_sandbox(sandbox)
        await store.update_sandbox(replace(sandbox, state=State.RUNNING), state=State.CREATING, generation=1)
    print("written", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.mark.slow
async def test_what_was_written_is_there_after_kill_9(path: Path) -> None:
    repository = Path(__file__).parents[3]
    killed = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", _WRITE_AND_DIE, sqlite_url(path), str(repository)],
        capture_output=True,
        check=False,
    )
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, b"written\n"), killed.stderr

    store = await _restarted(path)
    assert {(box.metadata["n"], box.state) for box in await store.sandboxes()} == {
        (str(n), State.RUNNING) for n in range(5)
    }
    await store.close()


# Migrations


async def test_the_migrations_lead_to_the_tables_of_this_release(path: Path) -> None:
    await (await _restarted(path)).close()

    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert context.get_current_revision() == schema.REVISION
        assert compare_metadata(context, schema.metadata) == []
    engine.dispose()


def test_the_stamp_is_the_last_migration() -> None:
    assert ScriptDirectory(str(SCRIPTS)).get_heads() == [schema.REVISION]


async def test_a_database_of_a_newer_release_is_refused_and_left_alone(path: Path) -> None:
    await (await _restarted(path)).close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    database.close()

    with pytest.raises(Unsupported, match="9999") as refused:
        await _restarted(path)

    assert refused.value.hint
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT version_num FROM alembic_version").fetchone() == ("9999",)
    database.close()


async def test_a_migration_that_fails_leaves_nothing_half_done(path: Path) -> None:
    path.parent.mkdir(parents=True)
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE snapshot_names (other INTEGER)")  # in the way of the last step
    database.close()

    with pytest.raises(Unavailable):
        await _restarted(path)

    with sqlite3.connect(path) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    database.close()
    assert tables == {"snapshot_names"}


def test_migrating_twice_changes_nothing(path: Path) -> None:
    path.parent.mkdir(parents=True)
    migrate(sqlite_url(path), Room(path))
    before = path.read_bytes()
    migrate(sqlite_url(path), Room(path))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("", Invalid),
        ("not a url", Invalid),
        ("postgresql+asyncpg://h/d", Unsupported),
        ("sqlite+aiosqlite://", Unsupported),
        ("sqlite+aiosqlite:///:memory:", Unsupported),
        ("sqlite:////tmp/x", Unsupported),
    ],
)
async def test_a_database_that_cannot_be_is_refused(url: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        await SqlStore(url).start()


def test_a_url_keeps_every_path(tmp_path: Path) -> None:
    odd = tmp_path / "a b%20?c#d" / "aenv.db"
    assert sa.make_url(sqlite_url(odd)).database == str(odd)


# Damage


async def test_a_file_that_is_no_database_is_unavailable_with_a_hint(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"this is not a database, whatever its name says " * 100)

    with pytest.raises(Unavailable) as refused:
        await _restarted(path)

    assert "move it away" in str(refused.value.hint)


async def test_a_database_that_another_process_holds_is_unavailable_with_a_hint(store: SqlStore, path: Path) -> None:
    await store.insert_sandbox(_sandbox())
    await store._open().run(lambda connection: connection.exec_driver_sql("PRAGMA busy_timeout = 1"))
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")

    with pytest.raises(Unavailable) as refused:
        await store.insert_sandbox(_sandbox())
    assert "another process" in str(refused.value.hint)

    holder.execute("ROLLBACK")
    holder.close()
    await store.insert_sandbox(_sandbox())  # and works again by itself
    assert len(await store.sandboxes()) == 2


async def test_a_damaged_file_is_unavailable_with_a_hint(path: Path) -> None:
    store = await _restarted(path)
    for n in range(50):
        await store.insert_sandbox(replace(_sandbox(n), metadata={"large": "x" * 3000}))
    await store.close()
    with path.open("r+b") as file:
        file.seek(4096 * 8)
        file.write(b"\xa5" * 4096 * 20)

    store = await _restarted(path)
    with pytest.raises(Unavailable) as refused:
        await store.sandboxes()
    await store.close()

    assert "damaged" in str(refused.value.hint)


def _spoil(path: Path, table: str, **columns: object) -> None:
    with sqlite3.connect(path) as database:
        database.execute(f"UPDATE {table} SET {', '.join(f'{name} = ?' for name in columns)}", tuple(columns.values()))
    database.close()


@pytest.mark.parametrize(
    "columns",
    [
        {"record": "{"},
        {"record": "[]"},
        {"record": "{}"},
        {"record": "[" * 100_000},
        {"record": b"\xff"},
        {"version": 2},
        {"version": 0},
        {"version": "x"},
        {"state": "dreaming"},
        {"generation": "many"},
        {"created_at_us": 10**18},
        {"created_at_us": "yesterday"},
    ],
    ids=str,
)
async def test_a_record_that_does_not_decode_is_kept_and_told_and_stops_nobody(
    path: Path, columns: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    store = await _restarted(path)
    spoilt = _sandbox()
    await store.insert_sandbox(spoilt)
    await store.close()
    _spoil(path, "sandboxes", **columns)

    store = await _restarted(path)
    sound = _sandbox()
    await store.insert_sandbox(sound)

    assert await store.sandboxes() == [sound]
    (row,) = await store.quarantined()
    assert (row.kind, row.id) == ("sandbox", spoilt.id)
    assert row.reason
    assert [(r.levelno, spoilt.id in r.getMessage()) for r in caplog.records] == [(logging.ERROR, True)]

    await store.delete_sandbox(spoilt.id)
    assert await store.quarantined() == []
    await store.close()


async def test_a_snapshot_that_does_not_decode_keeps_its_name(path: Path) -> None:
    store = await _restarted(path)
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO snapshots VALUES ('s', 0, 0, NULL, 7, '{\"layers\": [\"abc\"]}')")
        database.execute("INSERT INTO snapshot_names VALUES ('base', 's', 0)")
    database.close()

    assert await store.snapshots() == []
    (row,) = await store.quarantined()
    assert (row.kind, row.id, json.loads(row.record)) == ("snapshot", "s", {"layers": ["abc"]})

    await store.delete_snapshot(SnapshotId("s"))
    assert await store.quarantined() == []
    await store.close()


# Faults while writing


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "tiny"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", mount], check=True)
    yield mount
    subprocess.run(["umount", mount], check=True)


@pytest.mark.needs("root")
async def test_a_full_disk_is_no_space_and_changes_nothing_and_passes(tiny_disk: Path) -> None:
    store = await _restarted(tiny_disk / "aenv.db", reserve_bytes=0)
    sandbox = _sandbox()
    await store.insert_sandbox(sandbox)
    room = os.statvfs(tiny_disk)
    (tiny_disk / "hog").write_bytes(b"x" * (room.f_bavail * room.f_frsize))
    large = replace(_sandbox(), metadata={"large": "x" * 50_000})

    with pytest.raises(NoSpace):
        await store.insert_sandbox(large)
    with pytest.raises(NoSpace):
        await store.update_sandbox(replace(large, id=sandbox.id), state=State.CREATING, generation=1)
    assert await store.sandboxes() == [sandbox]

    (tiny_disk / "hog").unlink()
    await store.insert_sandbox(large)
    assert await store.sandboxes() == sorted([sandbox, large], key=lambda box: box.id)
    await store.close()


@pytest.mark.needs("root")
async def test_a_start_on_a_full_disk_is_a_clear_error(tiny_disk: Path) -> None:
    room = os.statvfs(tiny_disk)
    (tiny_disk / "hog").write_bytes(b"x" * (room.f_bavail * room.f_frsize))

    with pytest.raises(NoSpace):
        await _restarted(tiny_disk / "aenv.db", reserve_bytes=0)


async def test_one_refused_job_of_a_batch_costs_the_others_nothing(store: SqlStore) -> None:
    taken = _sandbox()
    await store.insert_sandbox(taken)
    others = [_sandbox(n) for n in range(10)]
    wanted = [*others[:5], taken, *others[5:]]

    attempts = [spawn("insert", store.insert_sandbox(sandbox)) for sandbox in wanted]
    await asyncio.wait(attempts)

    failed = [sandbox for sandbox, attempt in zip(wanted, attempts, strict=True) if attempt.exception()]
    assert failed == [taken]
    assert len(await store.sandboxes()) == 11


async def test_a_job_that_is_wrong_costs_those_who_wait_with_it_nothing(store: SqlStore) -> None:
    too_large = replace(_sandbox(), generation=2**70)
    others = [_sandbox(n) for n in range(5)]
    attempts = [spawn("insert", store.insert_sandbox(sandbox)) for sandbox in (too_large, *others)]
    await asyncio.wait(attempts)

    assert isinstance(attempts[0].exception(), Bug)
    assert {sandbox.id for sandbox in await store.sandboxes()} == {sandbox.id for sandbox in others}


async def test_a_commit_that_fails_changes_nothing(store: SqlStore) -> None:
    with REGISTRY.armed("store.committing", Raise(NoSpace("full"))), pytest.raises(NoSpace):
        await store.insert_sandbox(_sandbox())
    assert await store.sandboxes() == []


async def test_those_who_wait_together_share_a_commit(store: SqlStore) -> None:
    before = store.statistics()
    await asyncio.gather(*(store.insert_sandbox(_sandbox(n)) for n in range(60)))
    after = store.statistics()

    assert after.jobs - before.jobs == 60
    assert after.commits - before.commits <= 2
    assert after.waiting == 0


@pytest.mark.parametrize("passes", range(0, 40, 3))
async def test_a_cancelled_caller_leaves_a_whole_change_or_none_and_a_working_store(
    store: SqlStore, passes: int
) -> None:
    sandbox = _sandbox()
    writing = spawn("insert", store.insert_sandbox(sandbox))
    for _ in range(passes):
        await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait([writing])

    other = _sandbox()
    await store.insert_sandbox(other)

    assert {box.id for box in await store.sandboxes()} - {sandbox.id} == {other.id}
    with pytest.raises(Conflict):
        await store.update_sandbox(other, state=State.RUNNING, generation=1)


async def test_what_was_given_up_before_it_began_does_not_happen(store: SqlStore) -> None:
    stall = Stall()
    with REGISTRY.armed("store.committing", stall):
        first = spawn("insert", store.insert_sandbox(_sandbox()))
        await stall.reached.wait()
        second = spawn("insert", store.insert_sandbox(_sandbox()))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        stall.released.set()
        await first

    assert len(await store.sandboxes()) == 1


async def test_a_job_that_is_wrong_fails_for_its_asker_only(store: SqlStore) -> None:
    async def wrong(connection: object) -> None:
        raise TypeError("no")

    with pytest.raises(Bug):
        await store._open().run(wrong)
    await store.insert_sandbox(_sandbox())


async def test_what_was_asked_for_before_closing_is_done(path: Path) -> None:
    store = await _restarted(path)
    writing = [spawn("insert", store.insert_sandbox(_sandbox(n))) for n in range(30)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*writing)

    store = await _restarted(path)
    assert len(await store.sandboxes()) == 30
    await store.close()


async def test_a_connection_that_broke_is_opened_again(store: SqlStore) -> None:
    connection = store._open()
    assert connection._connection is not None
    await connection._connection.invalidate()

    sandbox = _sandbox()
    try:
        await store.insert_sandbox(sandbox)
    except Unavailable:
        await store.insert_sandbox(sandbox)

    assert await store.sandboxes() == [sandbox]


async def test_a_failed_start_leaves_no_file_open(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no database " * 1000)

    for _ in range(3):
        with pytest.raises(Unavailable):
            await _restarted(path)

    assert str(path) not in {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}


def test_an_url_engine_is_not_connected_until_used(tmp_path: Path) -> None:
    open_engine(sqlite_url(tmp_path / "never" / "aenv.db"))
    assert not (tmp_path / "never").exists()
