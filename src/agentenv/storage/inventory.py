"""Which layers there are, what lies below each, and what must be kept. Lives on the event loop.

A layer is known from the step in which the call that made it returns. Files in the
making are not known, so a collection cannot see them.
"""

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import structlog

from agentenv.model.errors import Bug, Invalid, NotFound
from agentenv.model.ids import BlobId, LayerId
from agentenv.model.snapshot import Stack
from agentenv.storage.files import open_sealed
from agentenv.storage.layout import LayerKind, Layout, layer_kind, layer_names
from agentenv.storage.pages import read_summary
from agentenv.storage.pins import Pins
from agentenv.storage.qcow2 import read_header

_DEEPEST: Final = 4096
_WRITABLE_MODE: Final = 0o222

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Layer:
    """One file. ``parent`` is what its own header names as the layer below it.

    An upper is a layer that is not sealed. ``fault`` says why a file cannot be used.
    """

    id: LayerId
    size_bytes: int  # of the disk or the memory
    parent: LayerId | None = None
    sealed: bool = True
    data_bytes: int = 0  # of changed pages, in a delta
    fault: str | None = None

    @property
    def kind(self) -> LayerKind:
        return layer_kind(self.id)


class Inventory:
    """All layers and blobs of one data directory, and the pins on them."""

    def __init__(self, layers: Iterable[Layer], blobs: Iterable[BlobId]) -> None:
        self._layers = {layer.id: layer for layer in layers}
        self._blobs = set(blobs)
        self._pins = Pins()

    # What there is

    def layer(self, layer: LayerId) -> Layer:
        """`NotFound` if there is none."""
        if (found := self._layers.get(layer)) is None:
            raise NotFound(f"no layer {layer[:80]}")
        return found

    def add(self, layer: Layer) -> None:
        self._layers[layer.id] = layer

    def discard(self, layer: LayerId) -> None:
        self._layers.pop(layer, None)

    def mark(self, layer: LayerId, *, sealed: bool, parent: LayerId | None) -> None:
        """Note whether *layer* is immutable now, and above what."""
        self._layers[layer] = replace(self._layers[layer], sealed=sealed, parent=parent)

    def layers(self) -> Collection[Layer]:
        return self._layers.values()

    def require_blob(self, blob: BlobId) -> None:
        """`NotFound` if there is none."""
        if blob not in self._blobs:
            raise NotFound(f"no blob {blob[:80]}")

    def add_blob(self, blob: BlobId) -> None:
        self._blobs.add(blob)

    def discard_blob(self, blob: BlobId) -> None:
        self._blobs.discard(blob)

    def blobs(self) -> frozenset[BlobId]:
        return frozenset(self._blobs)

    # Stacks

    def chain(self, top: LayerId) -> tuple[LayerId, ...]:
        """*top* and everything below it, lowest first. `Bug` if a file of it is missing or damaged."""
        found: list[LayerId] = []
        at: LayerId | None = top
        while at is not None:
            layer = self._layers.get(at)
            if layer is None:
                raise Bug(f"layer {at}, which {top} needs, is gone")
            if layer.fault is not None:
                raise Bug(f"layer {at}: {layer.fault}")
            found.append(at)
            if len(found) > _DEEPEST:
                raise Bug(f"the layers below {top} have no end")
            at = layer.parent
        return tuple(reversed(found))

    def check_stack(self, stack: Stack, *, disk: bool) -> None:
        """Raise `NotFound` for a missing layer, `Invalid` for layers that do not make the disk (or memory) they say."""
        layers = [self.layer(layer) for layer in stack.layers]
        if not layers:
            return
        if not all(layer.sealed and layer.kind.is_disk == disk for layer in layers):
            raise Invalid(f"these are not layers of a {'disk' if disk else 'memory'}")
        top = layers[-1]
        if self.chain(top.id) != stack.layers:
            raise Invalid("these layers do not lie on top of each other")
        if top.size_bytes > stack.size_bytes or (not disk and top.size_bytes != stack.size_bytes):
            raise Invalid(f"layers of {top.size_bytes} bytes cannot be seen as {stack.size_bytes} bytes")

    # What must be kept

    def pin(self, layers: Collection[LayerId], blobs: Collection[BlobId]) -> None:
        """Raises `NotFound`, and pins nothing, if one is missing."""
        for layer in layers:
            self.layer(layer)
        for blob in blobs:
            self.require_blob(blob)
        self._pins.add(layers, blobs)

    def unpin(self, layers: Collection[LayerId], blobs: Collection[BlobId]) -> None:
        """Raises `Bug`, and unpins nothing, for more than was pinned."""
        self._pins.drop(layers, blobs)

    @contextmanager
    def pinned(self, layers: Collection[LayerId]) -> Iterator[None]:
        self.pin(layers, ())
        try:
            yield
        finally:
            self.unpin(layers, ())

    @property
    def pinned_layers(self) -> Collection[LayerId]:
        return self._pins.layers

    @property
    def pinned_blobs(self) -> Collection[BlobId]:
        return self._pins.blobs

    def reach(self, roots: Iterable[LayerId]) -> set[LayerId]:
        """*roots* and all that lies below them, as far as it is there."""
        marked: set[LayerId] = set()
        for root in roots:
            at: LayerId | None = root
            while at is not None and at not in marked:
                marked.add(at)
                layer = self._layers.get(at)
                at = layer.parent if layer is not None else None
        return marked

    def faults(self, layers: Iterable[LayerId]) -> list[Layer]:
        """Those of *layers* that cannot say what lies below them."""
        found = (self._layers.get(layer) for layer in layers)
        return [layer for layer in found if layer is not None and layer.fault is not None]


def inspect_layers(layout: Layout) -> list[Layer]:
    """Read the header of every layer file. Blocks. A damaged one is kept, with its fault, and reported."""
    return [_inspect(layout, name) for name in layer_names(layout)]


def _inspect(layout: Layout, name: LayerId) -> Layer:
    with open_sealed(layout.layer(name)) as fd:
        status = os.fstat(fd)
        plain = Layer(name, status.st_size, sealed=not status.st_mode & _WRITABLE_MODE)
        try:
            return _described(plain, fd)
        except Bug as error:
            _log.error("layer %s is damaged: %s", name, error)
            return replace(plain, fault=error.message)


def _described(plain: Layer, fd: int) -> Layer:
    """*plain* with what the header of its file says."""
    match plain.kind:
        case LayerKind.QCOW2:
            header = read_header(fd)
            parent = _parent(header.backing.name) if header.backing is not None else None
            return replace(plain, size_bytes=header.size_bytes, parent=parent)
        case LayerKind.DELTA:
            summary = read_summary(fd)
            parent = _parent(summary.base)
            return replace(plain, size_bytes=summary.memory_bytes, parent=parent, data_bytes=summary.data_bytes)
        case LayerKind.RAW | LayerKind.MEMORY:
            return plain


def _parent(name: str) -> LayerId:
    try:
        layer_kind(name)
    except NotFound:
        raise Bug(f"it lies on {name[:80]!r}, which is no layer of ours") from None
    return LayerId(name)
