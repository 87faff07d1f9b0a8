"""The owners of one data directory: their records in memory, and one change of each at a time."""

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager

from agentenv.aio.lock import KeyedLock
from agentenv.model.errors import NotFound
from agentenv.model.ids import LayerId
from agentenv.model.snapshot import Stack
from agentenv.storage.layout import check_owner
from agentenv.storage.records import DiskRecord, OwnerRecord


class Owners:
    """What is in memory follows what is in files: `put` is called once a record has been saved."""

    def __init__(self, records: dict[str, OwnerRecord]) -> None:
        self._records = records
        self._durable = set(records)
        self._locks = KeyedLock[str]()

    def hold(self, owner: str) -> AbstractAsyncContextManager[None]:
        """Keep others from changing *owner*. Raises `Invalid` for what cannot be one."""
        check_owner(owner)
        return self._locks.hold(owner)

    def names(self) -> frozenset[str]:
        return frozenset(self._records)

    def find(self, owner: str) -> OwnerRecord:
        """The record of *owner*, an empty one if there is none."""
        return self._records.get(owner) or OwnerRecord(owner)

    def disk(self, owner: str) -> DiskRecord:
        """`NotFound` if it has none."""
        if (disk := self.find(owner).disk) is None:
            raise NotFound(f"{owner} has no disk")
        return disk

    def memory(self, owner: str) -> Stack:
        """`NotFound` if none is attached."""
        if (memory := self.find(owner).memory) is None:
            raise NotFound(f"{owner} has no memory attached")
        return memory

    def put(self, record: OwnerRecord) -> None:
        if record.is_empty:
            self._records.pop(record.owner, None)
            self._durable.discard(record.owner)
        else:
            self._records[record.owner] = record

    def is_durable(self, owner: str) -> bool:
        """Whether the record of *owner* may have to survive a power failure."""
        return owner in self._durable

    def put_durable(self, owner: str) -> None:
        """Note that the record of *owner* is durable, and has to stay so."""
        if owner in self._records:
            self._durable.add(owner)

    def uppers(self) -> Iterable[LayerId]:
        """Every upper that some owner has, or may have after a crash."""
        for record in self._records.values():
            if record.disk is not None:
                yield record.disk.upper
                if record.disk.next is not None:
                    yield record.disk.next

    def memory_layers(self) -> Iterable[LayerId]:
        for record in self._records.values():
            if record.memory is not None:
                yield from record.memory.layers
