"""Keeps chains of disk layers short: a deep one gets a shallow equal, made in the background.

The layers of a deep chain above its base are merged into one. Stacks made from then
on use the merged layer; existing ones keep what they list. That two chains are equal
is known only in this process: after a restart it is found out again when needed.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Final

import structlog

from agentenv.aio.tasks import Tasks
from agentenv.model.errors import AgentEnvError, Unsupported
from agentenv.model.ids import LayerId
from agentenv.storage.files import new_file, open_sealed, publish
from agentenv.storage.inventory import Inventory, Layer
from agentenv.storage.layout import LayerKind, Layout, layer_kind, new_layer_id
from agentenv.storage.merge import merge
from agentenv.storage.qcow2 import Backing
from agentenv.storage.workers import Abort, Workers

DEEP: Final = 16
"""A chain of more layers than this is compacted."""
TOO_DEEP: Final = 64
"""A chain of this many layers is compacted before another is added."""
HOPELESS: Final = 256
"""A chain that has come to this many layers in spite of all is not made deeper."""
_SHALLOW: Final = 8
"""Up to this depth an equal chain is extended; beyond it everything above the base is merged anew."""
_MOST_PENDING: Final = 256

_log = structlog.get_logger(__name__)


class Compaction:
    """The equals of one data directory's deep chains, by top layer."""

    def __init__(self, layout: Layout, workers: Workers, inventory: Inventory) -> None:
        self._layout = layout
        self._workers = workers
        self._inventory = inventory
        self._tasks = Tasks("compaction")
        self._pending: dict[LayerId, asyncio.Task[None]] = {}
        self._equals: dict[LayerId, LayerId] = {}
        self._refused: set[LayerId] = set()
        self._awaited: Counter[LayerId] = Counter()
        self._turn = asyncio.Lock()
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        await self._tasks.close()

    def best(self, top: LayerId) -> LayerId:
        """The top of the shallowest chain known to be equal to that of *top*."""
        return self._equals.get(top, top)

    def request(self, top: LayerId) -> None:
        """Compact the chain of *top* in the background, if that is worth while."""
        worth_while = (
            top not in self._equals
            and top not in self._refused
            and len(self._inventory.chain(top)) > DEEP
            and len(self._pending) < _MOST_PENDING
        )
        if worth_while and top not in self._pending and not self._closed:
            self._pending[top] = self._tasks.start(f"compact {top}", self._compact(top))

    def refuse(self, top: LayerId) -> None:
        """Never compact the chain of *top*: someone may still be writing to it."""
        self._refused.add(top)

    async def settle(self, top: LayerId) -> None:
        """Return when a compaction of *top*, requested now at the latest, has ended in one way or another."""
        self._awaited[top] += 1
        try:
            self.request(top)
            if (task := self._pending.get(top)) is not None:
                await asyncio.wait([task])
        finally:
            self._awaited -= Counter([top])

    async def drain(self) -> None:
        """Return when nothing is pending."""
        while self._pending:
            await asyncio.wait(self._pending.values())

    def keep(self, marked: set[LayerId]) -> None:
        """Add to *marked*, layers that are kept, the equals that make them fast."""
        marked |= self._inventory.reach(equal for top, equal in self._equals.items() if top in marked)

    def forget(self, layers: Iterable[LayerId]) -> None:
        """These layers are gone."""
        for layer in layers:
            self._equals.pop(layer, None)
            self._refused.discard(layer)

    async def _compact(self, top: LayerId) -> None:
        try:
            async with self._turn:
                if not self._is_superseded(top):
                    await self._merge_chain(top)
        except Unsupported as error:
            self._refused.add(top)
            _log.info("the layers of %s stay apart: %s", top, error)
        except AgentEnvError as error:
            tell = _log.debug if self._closed else _log.warning
            tell("the layers of %s are not merged: %s", top, error)
        finally:
            del self._pending[top]

    def _is_superseded(self, top: LayerId) -> bool:
        """Whether a chain that goes through *top* waits its turn as well: then that one is worth more."""
        if self._awaited[top]:
            return False
        try:
            return any(top in self._inventory.chain(other) for other in self._pending if other != top)
        except AgentEnvError:
            return False

    async def _merge_chain(self, top: LayerId) -> None:
        chain = self._inventory.chain(top)
        below, run = self._plan(chain)
        with self._inventory.pinned({*chain, *below, *run}):
            merged = await self._workers.run(
                f"merge {len(run)} disk layers",
                lambda abort: self._merge(below, run, abort),
                landed=self._inventory.add,
            )
            # In the step in which it became known, so that no collection comes between.
            self._equals[top] = merged.id
        _log.info("merged %d disk layers into %s", len(run), merged.id)

    def _plan(self, chain: tuple[LayerId, ...]) -> tuple[tuple[LayerId, ...], tuple[LayerId, ...]]:
        """Split what equals *chain* into layers to build on and layers to merge."""
        below: tuple[LayerId, ...] = chain[:1] if layer_kind(chain[0]) is LayerKind.RAW else ()
        run = chain[len(below) :]
        for depth in range(len(chain), 0, -1):
            if (equal := self._equals.get(chain[depth - 1])) is not None:
                shallow = self._inventory.chain(equal)
                if len(shallow) < _SHALLOW:
                    return shallow, chain[depth:]
                return below, shallow[len(below) :] + chain[depth:]
        return below, run

    def _merge(self, below: tuple[LayerId, ...], run: tuple[LayerId, ...], abort: Abort) -> Layer:
        parent = below[-1] if below else None
        backing = Backing(parent, "raw" if layer_kind(parent) is LayerKind.RAW else "qcow2") if parent else None
        merged = new_layer_id(LayerKind.QCOW2)
        temporary = self._layout.new_temporary()
        with ExitStack() as opened:
            sources = [opened.enter_context(open_sealed(self._layout.layer(layer))) for layer in run]
            target = opened.enter_context(new_file(temporary))
            size_bytes = merge(sources, target, backing, abort)
            os.fsync(target)
            publish(temporary, self._layout.layer(merged))
        return Layer(merged, size_bytes, parent)
