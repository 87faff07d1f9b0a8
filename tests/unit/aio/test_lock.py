"""A keyed lock excludes per key and keeps nothing of a key nobody uses."""

import asyncio

from agentenv.aio.lock import KeyedLock
from agentenv.aio.tasks import Tasks, spawn


async def test_one_key_admits_one_at_a_time_in_order() -> None:
    lock: KeyedLock[str] = KeyedLock()
    order: list[int] = []

    async def use(number: int) -> None:
        async with lock.hold("a"):
            order.append(number)
            await asyncio.sleep(0)
            assert order[-1] == number

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(use(number))

    assert order == list(range(20))
    assert len(lock) == 0


async def test_other_keys_are_free() -> None:
    lock: KeyedLock[str] = KeyedLock()
    async with lock.hold("a"):
        assert lock.locked("a")
        assert not lock.locked("b")
        async with lock.hold("b"):
            assert repr(lock) == "<KeyedLock: 2 keys in use>"
    assert len(lock) == 0


async def test_a_waiter_that_is_cancelled_or_a_holder_that_fails_leaves_nothing() -> None:
    lock: KeyedLock[str] = KeyedLock()

    async def use() -> None:
        async with lock.hold("a"):
            raise ValueError

    async with Tasks("waiters") as tasks, lock.hold("a"):
        waiter = tasks.start("waiter", use())
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait([waiter])
        assert len(lock) == 1
    failed = spawn("failing", use())
    await asyncio.wait([failed])

    assert isinstance(failed.exception(), ValueError)
    assert len(lock) == 0
