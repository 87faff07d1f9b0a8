"""A lock for each key, which exists only while someone holds it or waits for it."""

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class _Entry:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0  # holder and waiters


class KeyedLock(Generic[K]):
    """Mutual exclusion per key, first come, first served. Not re-entrant."""

    def __init__(self) -> None:
        self._entries: dict[K, _Entry] = {}

    def __repr__(self) -> str:
        return f"<KeyedLock: {len(self._entries)} keys in use>"

    def __len__(self) -> int:
        """How many keys are held or waited for."""
        return len(self._entries)

    def locked(self, key: K) -> bool:
        return key in self._entries and self._entries[key].lock.locked()

    @asynccontextmanager
    async def hold(self, key: K) -> AsyncIterator[None]:
        """Hold *key* for the length of the block. Cancelled while waiting, nothing is held."""
        entry = self._entries.setdefault(key, _Entry())
        entry.users += 1
        try:
            async with entry.lock:
                yield
        finally:
            entry.users -= 1
            if entry.users == 0:
                del self._entries[key]
