"""Snapshots and templates by id and by name, in memory and in the store."""

import asyncio
import dataclasses
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Final

from agentenv.aio.tasks import to_its_end
from agentenv.model.errors import AlreadyExists, NotFound
from agentenv.model.ids import BlobId, LayerId, SnapshotId
from agentenv.model.snapshot import Capture, Snapshot, Source
from agentenv.state.contract import Store
from agentenv.storage.contract import Storage

_SHOWN_CHARS: Final = 128  # a name is no longer; what is longer is none
_HOW_TO_MAKE_ONE: Final = "aenv template list shows what there is; aenv template build NAME --rootfs ROOT makes one"


class Catalogue:
    """The snapshots of one node."""

    def __init__(self, store: Store, storage: Storage) -> None:
        self._store = store
        self._storage = storage
        self._snapshots: dict[SnapshotId, Snapshot] = {}
        self._names: dict[str, SnapshotId] = {}
        self._publishing = asyncio.Lock()  # names move in memory in the order in which they moved in the store

    async def load(self) -> None:
        for snapshot in await self._store.snapshots():
            self._keep(snapshot)

    def all(self, source: Source | None = None) -> list[Snapshot]:
        chosen = [s for s in self._snapshots.values() if source in (None, s.source)]
        return sorted(chosen, key=lambda s: (-s.created_at.timestamp(), s.id))

    def find(self, id_or_name: str) -> Snapshot:
        """By id, name, ``name:default`` or ``namespace/name``; `NotFound` otherwise."""
        name = id_or_name.rsplit("/", 1)[-1].removesuffix(":default")
        found = self._snapshots.get(self._names.get(name, SnapshotId(name)))
        if found is None:
            raise NotFound(f"no such template or snapshot: {id_or_name[:_SHOWN_CHARS]!r}", hint=_HOW_TO_MAKE_ONE)
        return found

    def check_free(self, names: Iterable[str], source: Source) -> None:
        """Raise `AlreadyExists` if one of *names* may not move to something made by *source*.

        What people start by a template's name is what was built under it: no snapshot
        of a sandbox takes its place.
        """
        if source is Source.BUILD:
            return
        for name in names:
            if (holder := self._names.get(name)) is not None and self._snapshots[holder].source is Source.BUILD:
                raise AlreadyExists(f"{name!r} is the name of a template", hint="choose another name")

    async def add(self, snapshot: Snapshot) -> None:
        """Publish: durable, then visible. A name that another snapshot holds moves here.

        Raises `AlreadyExists` where `check_free` does.
        """
        async with self._publishing:
            self.check_free(snapshot.names, snapshot.source)
            await to_its_end(f"publish {snapshot.id}", self._publish(snapshot))

    async def remove(self, snapshot: Snapshot) -> None:
        async with self._publishing:
            await to_its_end(f"withdraw {snapshot.id}", self._withdraw(snapshot.id))

    def superseded(self, in_use: Collection[SnapshotId]) -> list[Snapshot]:
        """Templates whose name has moved to a newer build, and that are not *in_use*: nobody misses them.

        A snapshot of a sandbox stays, named or not: somebody took it to keep it.
        """
        return [s for s in self._snapshots.values() if s.source is Source.BUILD and not s.names and s.id not in in_use]

    async def count_spawn(self, snapshot_id: SnapshotId, now: datetime) -> None:
        if (snapshot := self._snapshots.get(snapshot_id)) is not None:
            counted = dataclasses.replace(snapshot, spawn_count=snapshot.spawn_count + 1, last_spawned_at=now)
            self._snapshots[snapshot_id] = counted
            await self._store.count_spawn(counted)

    @contextmanager
    def pinned(self, capture: Capture) -> Iterator[None]:
        """Keep what *capture* needs from the collector while somebody starts from it."""
        layers, blobs = parts_of(capture)
        self._storage.pin(layers, blobs)
        try:
            yield
        finally:
            self._storage.unpin(layers, blobs)

    async def _publish(self, snapshot: Snapshot) -> None:
        await self._store.insert_snapshot(snapshot, replace_names=True)
        for name in snapshot.names:
            if (holder := self._names.get(name)) is not None:
                other = self._snapshots[holder]
                self._snapshots[holder] = dataclasses.replace(other, names=tuple(n for n in other.names if n != name))
        self._keep(snapshot)

    async def _withdraw(self, snapshot_id: SnapshotId) -> None:
        await self._store.delete_snapshot(snapshot_id)
        self._snapshots.pop(snapshot_id, None)
        for name in [name for name, holder in self._names.items() if holder == snapshot_id]:
            del self._names[name]

    def _keep(self, snapshot: Snapshot) -> None:
        self._snapshots[snapshot.id] = snapshot
        for name in snapshot.names:
            self._names[name] = snapshot.id


def parts_of(capture: Capture) -> tuple[list[LayerId], list[BlobId]]:
    """The layers and blobs that *capture* cannot do without."""
    disk = capture.disk.layers if capture.disk is not None else ()
    return [*capture.memory.layers, *disk], [capture.device_state]
