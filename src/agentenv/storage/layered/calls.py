"""What the layered back end asks of the daemon, one step at a time, and how a caller that is cancelled leaves."""

import asyncio
import os
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import structlog

from agentenv.aio.lock import KeyedLock
from agentenv.aio.tasks import Tasks, spawn
from agentenv.model.errors import AgentEnvError, Invalid, NotFound
from agentenv.model.ids import BlobId, LayerId
from agentenv.model.machine import BlockTarget
from agentenv.model.snapshot import Stack
from agentenv.storage.contract import Collected
from agentenv.storage.files import remove_files
from agentenv.storage.layered import wire
from agentenv.storage.layered.client import CALL_TIMEOUT_S, Client
from agentenv.storage.layered.connection import Connection
from agentenv.storage.layered.known import Known
from agentenv.storage.layered.wire import Fields, Greeting
from agentenv.storage.layout import Layout
from agentenv.storage.workers import Workers

T = TypeVar("T")

DISK_UNIT_BYTES: Final = 512
PAGE_BYTES: Final = 4096
LARGEST_BYTES: Final = 1 << 50

CANCEL_GRACE_S: Final = 30.0
"""How long a cancelled caller waits for the daemon to end what it does for it."""

_LAYERS_PER_CALL: Final = 10_000

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """Everything that exists between start and close."""

    layout: Layout
    lock: int
    client: Client
    known: Known
    locks: KeyedLock[str]
    workers: Workers
    tasks: Tasks

    async def close(self) -> None:
        await self.tasks.close()
        await self.client.close()
        await self.workers.close()
        os.close(self.lock)


async def learn(known: Known, connection: Connection, _: Greeting) -> None:
    """Read anew what there is, from a daemon that was not asked anything yet."""
    owners = await connection.call("owners", {}, timeout_s=CALL_TIMEOUT_S)
    layers = await connection.call("layers", {}, timeout_s=CALL_TIMEOUT_S)
    known.owners = wire.owners_of(owners)
    known.frozen = wire.names_of(owners, "frozen")
    known.layers = wire.layers_of(layers, "layers")


def check(known: Known, stack: Stack, unit: int) -> None:
    """Raise `Invalid` for a size that cannot be, `NotFound` for a missing layer."""
    if not 0 < stack.size_bytes <= LARGEST_BYTES or stack.size_bytes % unit:
        raise Invalid(f"{stack.size_bytes} bytes cannot be", hint=f"use a multiple of {unit}")
    known.require(stack.layers, ())


async def open_disk(opened: Opened, owner: str) -> BlockTarget:
    opened.known.disk(owner)
    return target(await opened.client.call("open_disk", {"owner": owner}))


def target(fields: Fields) -> BlockTarget:
    return BlockTarget(Path(wire.text_of(fields, "path")), "raw")


async def made(opened: Opened, call: str, fields: Fields, note: Callable[[Stack], None] | None = None) -> Stack:
    """The stack that *call* makes, pinned; *note* is told of it in the step in which it is known."""

    def landed(answer: Fields) -> None:
        stack = opened.known.made(answer)
        if note is not None:
            note(stack)

    return wire.stack_of((await opened.client.call(call, fields, landed=landed, long=True)).get("stack"))


async def detach(opened: Opened, owner: str) -> None:
    if owner in opened.known.owners:
        landed = lambda _: opened.known.has_memory(owner, None)  # noqa: E731
        await opened.client.call("detach", {"owner": owner}, landed=landed)


async def capture_frozen(opened: Opened, frozen: str) -> Stack:
    return await made(opened, "capture_frozen", {"frozen": frozen, "compression": "none"})


async def thaw(opened: Opened, frozen: str) -> None:
    with suppress(NotFound):
        await opened.client.call("thaw", {"frozen": frozen})


async def give_up_frozen(opened: Opened, frozen: str) -> None:
    """What an earlier server left: whoever has it attached goes over to a layer, and then it ends."""
    try:
        await opened.client.settled(lambda _: thaw(opened, frozen))
        with suppress(NotFound):
            stack = await opened.client.settled(lambda _: capture_frozen(opened, frozen))
            opened.known.pins.drop(stack.layers, ())
    except AgentEnvError as error:
        _log.warning("a frozen memory that a server left cannot be given up", frozen=frozen, error=str(error))


async def delete(opened: Opened, layers: list[LayerId], blobs: Collection[BlobId]) -> Collected:
    """Remove what is not known any more; layers that the daemon needs are known again."""
    removed = await opened.workers.run(
        "remove unneeded files", lambda _: remove_files(opened.layout.blob(blob) for blob in blobs)
    )
    count, freed = 0, 0
    for start in range(0, len(layers), _LAYERS_PER_CALL):
        batch = layers[start : start + _LAYERS_PER_CALL]

        def landed(answer: Fields, batch: list[LayerId] = batch) -> None:
            opened.known.layers.update(set(batch) - wire.layers_of(answer, "deleted"))

        async def some(_: bool, batch: list[LayerId] = batch, landed: Callable[[Fields], None] = landed) -> Fields:
            opened.known.layers.difference_update(batch)  # a daemon that was met meanwhile has listed them
            return await opened.client.call("delete_layers", {"layers": batch}, landed=landed, long=True)

        answer = await opened.client.settled(some)
        count += len(wire.layers_of(answer, "deleted"))
        freed += int(wire.number_of(answer, "bytes"))
    return Collected(count, len(blobs), freed + removed)


@contextmanager
def pinned(known: Known, layers: Collection[LayerId]) -> Iterator[None]:
    known.pins.add(layers, ())
    try:
        yield
    finally:
        known.pins.drop(layers, ())


async def outlasting(doing: str, work: Coroutine[object, object, T], unwanted: Callable[[T], None] | None = None) -> T:
    """Return the result of *work*, which is not cut short when the caller is cancelled.

    The caller leaves when the work has ended, or has not for `CANCEL_GRACE_S`: a daemon that hangs
    must not hold what waits for this caller. *unwanted* is given a result that nobody takes.
    """
    task = spawn(doing, work)
    cancelled: asyncio.CancelledError | None = None
    leave_at = 0.0
    now = asyncio.get_running_loop().time
    while not task.done() and (cancelled is None or now() < leave_at):
        try:
            await asyncio.wait([task], timeout=leave_at - now() if cancelled else None)
        except asyncio.CancelledError as error:
            leave_at = leave_at or now() + CANCEL_GRACE_S
            cancelled = error
    if cancelled is None:
        return task.result()

    def look(ended: asyncio.Task[T]) -> None:
        if ended.cancelled():
            return
        if (error := ended.exception()) is not None:
            _log.warning("%s failed after its caller was cancelled", doing, error=str(error))
        elif unwanted is not None:
            unwanted(ended.result())

    if task.done():
        look(task)
    else:
        _log.error("%s does not end", doing)
        task.add_done_callback(look)
    raise cancelled
