"""Memory images: one flat base, and at most one file of changed pages over it.

A VMM maps the base privately, so clones share its pages in the page cache; the changed
pages are written into the process once, after it has mapped the base. Those are then
private to it, and a capture finds them again with whatever else it changed: a new delta
replaces the old one and there is never a chain.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from agentenv.aio.failpoints import failpoint_nowait
from agentenv.model.errors import AlreadyExists, Bug, Invalid
from agentenv.model.snapshot import Stack
from agentenv.storage.capture import Image, apply_delta, capture_delta, capture_flat, fill
from agentenv.storage.files import copy_range, data_extents, new_file, open_sealed, publish
from agentenv.storage.inventory import Inventory, Layer
from agentenv.storage.layout import LayerKind, Layout, new_layer_id
from agentenv.storage.mapping import PAGE_BYTES
from agentenv.storage.owners import Owners
from agentenv.storage.pages import read_delta
from agentenv.storage.records import OwnerRecord, save_record
from agentenv.storage.workers import Abort, Workers

LARGEST_BYTES: Final = 16 << 40
_FILL_SHARE_BYTES: Final = 4 << 20
_MOST_FILL_WORKERS: Final = 4


class Memories:
    """The memory images of one data directory."""

    def __init__(
        self, layout: Layout, inventory: Inventory, owners: Owners, workers: Workers, background: Workers
    ) -> None:
        self._layout = layout
        self._inventory = inventory
        self._owners = owners
        self._workers = workers
        self._background = background

    async def attach(self, owner: str, stack: Stack) -> Path:
        """See `Storage.attach_memory`."""
        async with self._owners.hold(owner):
            record = self._owners.find(owner)
            if record.memory is not None:
                raise AlreadyExists(f"{owner} has memory attached")
            self._check(stack)
            new = replace(record, memory=stack)
            with self._inventory.pinned(stack.layers):
                return await self._workers.run(
                    f"attach memory for {owner}",
                    lambda _: self._attach(new, stack, over_durable=self._owners.is_durable(owner)),
                    landed=lambda _: self._owners.put(new),
                )

    async def fill(self, owner: str, pid: int) -> None:
        """See `Storage.fill_memory`."""
        async with self._owners.hold(owner):
            stack = self._owners.memory(owner)
            if len(stack.layers) < 2:
                return
            data_bytes = self._inventory.layer(stack.layers[-1]).data_bytes
            shares = min(_MOST_FILL_WORKERS, os.cpu_count() or 1, 1 + data_bytes // _FILL_SHARE_BYTES)
            done = await asyncio.gather(
                *(
                    self._workers.run(f"fill the memory of {owner}", self._fill_share(stack, pid, share, shares))
                    for share in range(shares)
                ),
                return_exceptions=True,  # so that none is still writing when this returns
            )
            for outcome in done:
                if isinstance(outcome, BaseException):
                    raise outcome

    async def capture(self, owner: str, pid: int) -> Stack:
        """See `Storage.capture_memory`."""
        async with self._owners.hold(owner):
            stack = self._owners.memory(owner)
            layer = await self._workers.run(
                f"capture the memory of {owner}",
                lambda abort: self._capture(stack, pid, abort),
                landed=self._note,
            )
            below = stack.layers[:1]
            captured = Stack((*below, layer.id) if layer else below, stack.size_bytes)
            self._inventory.pin(captured.layers, ())
            return captured

    async def flatten(self, stack: Stack) -> Stack:
        """See `Storage.flatten_memory`."""
        self._check(stack)
        if len(stack.layers) < 2:
            self._inventory.pin(stack.layers, ())
            return stack
        flat = Layer(new_layer_id(LayerKind.MEMORY), stack.size_bytes)
        with self._inventory.pinned(stack.layers):
            await self._background.run(
                "flatten a memory image",
                lambda abort: self._flatten(stack, flat, abort),
                landed=lambda _: self._inventory.add(flat),
            )
        self._inventory.pin([flat.id], ())
        return Stack((flat.id,), stack.size_bytes)

    def _check(self, stack: Stack) -> None:
        if not 0 < stack.size_bytes <= LARGEST_BYTES or stack.size_bytes % PAGE_BYTES:
            raise Invalid(f"a memory cannot have {stack.size_bytes} bytes", hint="use a multiple of 4096")
        self._inventory.check_stack(stack, disk=False)

    def _note(self, captured: Layer | None) -> None:
        if captured is not None:
            self._inventory.add(captured)

    # In threads

    def _image(self, stack: Stack) -> Image:
        path = self._layout.layer(stack.layers[0]) if stack.layers else self._layout.zero_image(stack.size_bytes)
        return Image(path, stack.size_bytes)

    def _attach(self, record: OwnerRecord, stack: Stack, *, over_durable: bool) -> Path:
        image = self._image(stack)
        if not stack.layers and not image.path.exists():
            self._make_zero_image(image)
        if image.path.stat().st_size != stack.size_bytes:
            raise Bug(f"memory image {image.path.name} has the wrong size")
        save_record(self._layout, record, over_durable=over_durable)
        failpoint_nowait("memory.recorded")
        return image.path

    def _make_zero_image(self, image: Image) -> None:
        temporary = self._layout.new_temporary()
        with new_file(temporary) as fd:
            os.ftruncate(fd, image.memory_bytes)
            os.fsync(fd)
            publish(temporary, image.path)  # whoever is last replaces an equal file; mappings keep theirs

    def _fill_share(self, stack: Stack, pid: int, share: int, shares: int) -> Callable[[Abort], None]:
        def work(abort: Abort) -> None:
            with open_sealed(self._layout.layer(stack.layers[-1])) as fd:
                fill(pid, self._image(stack), fd, read_delta(fd), abort, worker=share, workers=shares)

        return work

    def _capture(self, stack: Stack, pid: int, abort: Abort) -> Layer | None:
        """Return the new layer, or None if the process changed nothing of its base."""
        base = stack.layers[0] if stack.layers else None
        kind = LayerKind.DELTA if base is not None else LayerKind.MEMORY
        layer_id = new_layer_id(kind)
        image = self._image(stack)
        temporary = self._layout.new_temporary()
        with new_file(temporary) as fd:
            changed, data_bytes = True, 0
            if base is not None:
                written = capture_delta(pid, image, base, fd, abort)
                changed, data_bytes = written.is_change, written.data_bytes
            else:
                capture_flat(pid, image, fd, abort)
            failpoint_nowait("capture.written")
            if changed:
                publish(temporary, self._layout.layer(layer_id))
                return Layer(layer_id, stack.size_bytes, base, data_bytes=data_bytes)
        with suppress(FileNotFoundError):
            temporary.unlink()
        return None

    def _flatten(self, stack: Stack, flat: Layer, abort: Abort) -> None:
        temporary = self._layout.new_temporary()
        with ExitStack() as opened:
            base, changes = (opened.enter_context(open_sealed(self._layout.layer(layer))) for layer in stack.layers)
            delta = read_delta(changes)
            fd = opened.enter_context(new_file(temporary))
            os.ftruncate(fd, stack.size_bytes)
            for start, end in data_extents(base):
                copy_range(base, fd, start, start, end - start, abort)
            apply_delta(changes, delta, fd, abort)
            os.fsync(fd)
            publish(temporary, self._layout.layer(flat.id))
