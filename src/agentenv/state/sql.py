"""The store in an SQL database: SQLite in one file, behind URLs that other databases can follow."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import sqlalchemy as sa
import structlog
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from agentenv.model.errors import AlreadyExists, Conflict, NoSpace, NotFound, Unavailable
from agentenv.model.ids import SandboxId, SnapshotId
from agentenv.model.lifecycle import State
from agentenv.model.sandbox import Sandbox
from agentenv.model.snapshot import Snapshot
from agentenv.state import codec
from agentenv.state.connection import ConnectionStatistics, SoleConnection
from agentenv.state.contract import Quarantined
from agentenv.state.engine import create_file, file_of, open_engine
from agentenv.state.migrate import migrate
from agentenv.state.room import RESERVE_BYTES, Room
from agentenv.state.schema import sandboxes, snapshot_names, snapshots

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class SqlStore:
    """See `agentenv.state.contract.Store`.

    Args:
        url: of the database, such as `engine.sqlite_url` makes.
        reserve_bytes: of disk that are kept for deletes, see `agentenv.state.room`.
    """

    def __init__(self, url: str, *, reserve_bytes: int = RESERVE_BYTES) -> None:
        self._url = url
        self._reserve_bytes = reserve_bytes
        self._engine: AsyncEngine | None = None
        self._connection: SoleConnection | None = None

    async def start(self) -> None:
        engine = open_engine(self._url)
        room = Room(file_of(self._url), reserve_bytes=self._reserve_bytes)
        try:
            connection = await self._connected(engine, room)
        except BaseException:
            await engine.dispose()
            raise
        await asyncio.to_thread(room.keep)
        self._engine, self._connection = engine, connection

    async def _connected(self, engine: AsyncEngine, room: Room) -> SoleConnection:
        """Open the database. One that was not closed takes room for that: then reserves are given up for it."""
        while True:
            try:
                await asyncio.to_thread(create_file, self._url)
                await asyncio.to_thread(migrate, self._url, room)
                connection = SoleConnection(engine, room)
                await connection.start()
            except NoSpace:
                if not await asyncio.to_thread(room.give_up, opening=True):
                    raise
            else:
                return connection

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.dispose()

    def statistics(self) -> ConnectionStatistics:
        return self._open().statistics()

    async def insert_sandbox(self, sandbox: Sandbox) -> None:
        row = codec.encode_sandbox(sandbox)

        async def job(connection: AsyncConnection) -> None:
            try:
                await connection.execute(sandboxes.insert(), row)
            except IntegrityError as error:
                raise AlreadyExists(f"sandbox {sandbox.id} exists") from error

        await self._open().run(job, adds=True)

    async def update_sandbox(self, sandbox: Sandbox, *, state: State, generation: int) -> None:
        row = codec.encode_sandbox(sandbox)

        async def job(connection: AsyncConnection) -> None:
            result = await connection.execute(
                _UPDATE_SANDBOX, row | {"at_id": sandbox.id, "at_state": state.value, "at_generation": generation}
            )
            if result.rowcount == 1:
                return
            found = (await connection.execute(_SANDBOX_POSITION, {"at_id": sandbox.id})).one_or_none()
            if found is None:
                raise NotFound(f"no record of sandbox {sandbox.id}")
            raise Conflict(
                f"sandbox {sandbox.id} is {found.state} at generation {found.generation}, not {state} at {generation}"
            )

        await self._open().run(job)

    async def delete_sandbox(self, sandbox_id: SandboxId) -> None:
        async def job(connection: AsyncConnection) -> None:
            await connection.execute(_DELETE_SANDBOX, {"at_id": sandbox_id})

        await self._open().run(job)

    async def sandboxes(self) -> list[Sandbox]:
        rows = await self._open().run(_read_sandboxes)
        return _readable("sandbox", rows, codec.decode_sandbox)

    async def insert_snapshot(self, snapshot: Snapshot, *, replace_names: bool = False) -> None:
        row = codec.encode_snapshot(snapshot)
        names = [
            {"name": name, "snapshot_id": snapshot.id, "position": position}
            for position, name in enumerate(snapshot.names)
        ]

        async def job(connection: AsyncConnection) -> None:
            try:
                await connection.execute(snapshots.insert(), row)
                if names and replace_names:
                    await connection.execute(_FREE_NAMES, {"taken": snapshot.names})
                if names:
                    await connection.execute(snapshot_names.insert(), names)
            except IntegrityError as error:
                raise AlreadyExists(f"snapshot {snapshot.id} exists, or one of its names is taken") from error

        await self._open().run(job, adds=True)

    async def delete_snapshot(self, snapshot_id: SnapshotId) -> None:
        async def job(connection: AsyncConnection) -> None:
            await connection.execute(_DELETE_SNAPSHOT, {"at_id": snapshot_id})

        await self._open().run(job)

    async def snapshots(self) -> list[Snapshot]:
        rows, names = await self._open().run(_read_snapshots)
        return _readable("snapshot", rows, lambda row: codec.decode_snapshot(row, names[str(row["id"])]))

    async def count_spawn(self, snapshot: Snapshot) -> None:
        row = codec.encode_snapshot(snapshot)

        async def job(connection: AsyncConnection) -> None:
            await connection.execute(
                _COUNT_SPAWN,
                {
                    "at_id": snapshot.id,
                    "spawn_count": row["spawn_count"],
                    "last_spawned_at_us": row["last_spawned_at_us"],
                },
            )

        self._open().submit(job, adds=True).add_done_callback(_log_failure)

    async def quarantined(self) -> list[Quarantined]:
        rows = await self._open().run(_read_sandboxes)
        broken = _broken("sandbox", rows, codec.decode_sandbox)
        rows, names = await self._open().run(_read_snapshots)
        return broken + _broken("snapshot", rows, lambda row: codec.decode_snapshot(row, names[str(row["id"])]))

    def _open(self) -> SoleConnection:
        if self._connection is None:
            raise Unavailable("the state database is closed")
        return self._connection


_AT_ID: Final[sa.BindParameter[str]] = sa.bindparam("at_id")
_UPDATE_SANDBOX: Final = sandboxes.update().where(
    sandboxes.c.id == _AT_ID,
    sandboxes.c.state == sa.bindparam("at_state"),
    sandboxes.c.generation == sa.bindparam("at_generation"),
)
_SANDBOX_POSITION: Final = sa.select(sandboxes.c.state, sandboxes.c.generation).where(sandboxes.c.id == _AT_ID)
_DELETE_SANDBOX: Final = sandboxes.delete().where(sandboxes.c.id == _AT_ID)
_DELETE_SNAPSHOT: Final = snapshots.delete().where(snapshots.c.id == _AT_ID)
_FREE_NAMES: Final = snapshot_names.delete().where(snapshot_names.c.name.in_(sa.bindparam("taken", expanding=True)))
_COUNT_SPAWN: Final = snapshots.update().where(snapshots.c.id == _AT_ID)


async def _read_sandboxes(connection: AsyncConnection) -> list[codec.Row]:
    rows = await connection.execute(sandboxes.select().order_by(sandboxes.c.created_at_us, sandboxes.c.id))
    return [dict(row) for row in rows.mappings()]


async def _read_snapshots(connection: AsyncConnection) -> tuple[list[codec.Row], dict[str, list[str]]]:
    names: dict[str, list[str]] = defaultdict(list)
    for held in await connection.execute(snapshot_names.select().order_by(snapshot_names.c.position)):
        names[held.snapshot_id].append(held.name)
    rows = await connection.execute(snapshots.select().order_by(snapshots.c.created_at_us, snapshots.c.id))
    return [dict(row) for row in rows.mappings()], names


def _readable(kind: str, rows: Sequence[codec.Row], decode: Callable[[codec.Row], T]) -> list[T]:
    values = []
    for row in rows:
        try:
            values.append(decode(row))
        except codec.Undecodable as error:
            _log.error("the record of %s %s is left alone: %s", kind, row["id"], error)
    return values


def _broken(kind: str, rows: Sequence[codec.Row], decode: Callable[[codec.Row], object]) -> list[Quarantined]:
    broken = []
    for row in rows:
        try:
            decode(row)
        except codec.Undecodable as error:
            broken.append(Quarantined(kind=kind, id=str(row["id"]), reason=str(error), record=str(row["record"])))
    return broken


def _log_failure(outcome: asyncio.Future[None]) -> None:
    if not outcome.cancelled() and (error := outcome.exception()) is not None:
        _log.warning("a spawn was not counted: %s", error)
