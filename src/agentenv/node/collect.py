"""Remove the layers and blobs that nothing refers to any more, and first the templates that a newer build replaced.

One pass at a time, a moment after the last change that may have freed something:
deleting a thousand sandboxes costs a few passes, not a thousand.
"""

import asyncio

import structlog

from agentenv.aio.clock import Clock
from agentenv.node.catalogue import Catalogue, parts_of
from agentenv.node.registry import Registry
from agentenv.storage.contract import Collected, Storage

SETTLE_S = 1.0
RETRY_S = 60.0
log = structlog.get_logger(__name__)


class Collector:
    """Runs in the background; `nudge` it when something may have become garbage."""

    def __init__(self, clock: Clock, registry: Registry, catalogue: Catalogue, storage: Storage) -> None:
        self._clock = clock
        self._registry = registry
        self._catalogue = catalogue
        self._storage = storage
        self._nudged = asyncio.Event()

    def nudge(self) -> None:
        self._nudged.set()

    async def run(self) -> None:
        while True:
            await self._nudged.wait()
            await self._clock.sleep(SETTLE_S)
            self._nudged.clear()
            try:
                await self.collect()
            except Exception:  # garbage that stays for now; never the end of collecting
                log.exception("collection failed and will be tried again")
                self._nudged.set()
                await self._clock.sleep(RETRY_S)

    async def collect(self) -> Collected:
        for template in self._catalogue.superseded({sandbox.template_id for sandbox in self._registry.all()}):
            await self._catalogue.remove(template)
            log.info("removed a template that a newer build replaced", template=template.id)
        captures = [s.capture for s in self._catalogue.all()]
        captures += [s.capture for s in self._registry.all() if s.capture is not None]
        parts = [parts_of(capture) for capture in captures]
        layers = {layer for layers, _ in parts for layer in layers}
        blobs = {blob for _, blobs in parts for blob in blobs}
        collected = await self._storage.collect(layers, blobs)
        if collected.layers or collected.blobs:
            log.info("collected", layers=collected.layers, blobs=collected.blobs, bytes=collected.bytes)
        return collected
