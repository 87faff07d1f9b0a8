"""Builds at work: one at a time for each name, few at once, each within its time, and any of them can be called off.

A build has its place from before its upload until it is over. Work begins when it is
its turn; until then it waits in order, as long as few enough do.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentenv.model.errors import Conflict, DeadlineExceeded, Exhausted
from agentenv.model.snapshot import Snapshot
from agentenv.node.host import Host
from agentenv.templates.build import build, check
from agentenv.templates.contract import Build, BuildEvent, BuildSpec, Progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """How many builds may be under way, and for how long one may work, in s."""

    timeout_s: float
    max_running: int
    max_waiting: int


class TemplateBuilder:
    """See `agentenv.templates.contract.Builder`."""

    def __init__(self, host: Host, limits: BuildLimits) -> None:
        self._host = host
        self._limits = limits
        self._turns = asyncio.Semaphore(limits.max_running)
        self._under_way: dict[str, _Build] = {}

    def __repr__(self) -> str:
        return f"<TemplateBuilder: {sorted(self._under_way)}>"

    @contextmanager
    def begin(self, spec: BuildSpec) -> Iterator[Build]:
        check(spec)
        if spec.name in self._under_way:
            raise Conflict(
                f"a template {spec.name!r} is being built",
                hint="wait for it, or call it off with DELETE /templates/NAME",
            )
        if len(self._under_way) >= self._limits.max_running + self._limits.max_waiting:
            raise Exhausted(
                f"{len(self._under_way)} templates are being built or wait for it, the most that may",
                hint="try again when one is done, or raise build.max_waiting",
            )
        begun = self._under_way[spec.name] = _Build(self._host, spec, self._turns, self._limits.timeout_s)
        try:
            yield begun
        finally:
            del self._under_way[spec.name]

    async def cancel(self, name: str) -> bool:
        begun = self._under_way.get(name)
        if begun is None:
            return False
        await begun.cancel()
        return True


class _Build:
    """See `agentenv.templates.contract.Build`."""

    def __init__(self, host: Host, spec: BuildSpec, turns: asyncio.Semaphore, timeout_s: float) -> None:
        self._host = host
        self._spec = spec
        self._turns = turns
        self._timeout_s = timeout_s
        self._key = f"build {spec.name}"
        self._is_cancelled = False

    async def receive(self, upload: Callable[[], Coroutine[Any, Any, Path]]) -> Path:
        # Not only its silence ends it: a client that sends too slowly to matter would keep the name for ever.
        return await self._until_called_off("upload", upload)

    async def run(self, archive: Path, progress: Progress) -> Snapshot:
        return await self._until_called_off("build", lambda: self._in_turn(archive, progress))

    async def _until_called_off(self, name: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            if self._is_cancelled:
                raise self._called_off()
            return await self._host.operations.run(self._key, name, work)
        except asyncio.CancelledError:
            await self.cancel()  # nobody waits for it any more
            raise
        except Conflict as error:
            if self._is_cancelled:
                raise self._called_off() from error
            raise

    async def cancel(self) -> None:
        """Return when nothing of it is left."""
        self._is_cancelled = True
        await self._host.operations.cut(self._key, "cancel", _nothing)

    async def _in_turn(self, archive: Path, progress: Progress) -> Snapshot:
        if self._turns.locked():
            progress(BuildEvent(self._host.clock.now(), "queue", "waiting for other builds to end"))
        async with self._turns:
            try:
                async with asyncio.timeout(self._timeout_s) as timer:
                    return await build(self._host, self._spec, archive, progress)
            except TimeoutError as error:
                if not timer.expired():
                    raise
                raise DeadlineExceeded(
                    f"the build of template {self._spec.name!r} took longer than {self._timeout_s:g} s",
                    hint="raise build.timeout_s",
                ) from error

    def _called_off(self) -> Conflict:
        return Conflict(f"the build of template {self._spec.name!r} was called off")


async def _nothing() -> None:
    """What takes the place of a build that is called off."""
