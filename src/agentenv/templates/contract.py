"""What the edges may ask of template builds."""

from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from agentenv.model.machine import Machine
from agentenv.model.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class BuildSpec:
    """A template to be made from a root filesystem."""

    name: str
    machine: Machine
    env: Mapping[str, str] = field(default_factory=dict)
    default_user: str = "user"
    default_workdir: str | None = None
    init: str | None = None  # the image's own init, to be PID 1 of its guests; None: the agent is


@dataclass(frozen=True, slots=True)
class BuildEvent:
    """One line of a build's log. ``done`` and ``total`` are bytes of the step, where it counts them."""

    timestamp: datetime
    step: str
    message: str
    done: int | None = None
    total: int | None = None


Progress: TypeAlias = Callable[[BuildEvent], None]
"""Called on the event loop; must not block."""


class Build(Protocol):
    """One build that has its place."""

    async def receive(self, upload: Callable[[], Coroutine[Any, Any, Path]]) -> Path:
        """The archive that *upload* returns, waited for as a part of the build: calling the build off ends it.

        Raises what *upload* raises, and `Conflict` when the build was called off. Called once, before `run`.
        """
        ...

    async def run(self, archive: Path, progress: Progress) -> Snapshot:
        """Make a template of the root filesystem in *archive* (a tar, or a directory). Called once.

        The name moves to the new template when it is ready and has passed its boot
        test; until then, and after a failure, the old one stays. Nothing else is left of
        a build that failed, or whose caller was cancelled. `Invalid` when the archive
        holds no root filesystem, `DeadlineExceeded`, `NoSpace`; `Conflict` when it was called off.
        """
        ...


class Builder(Protocol):
    """Makes templates."""

    def begin(self, spec: BuildSpec) -> AbstractContextManager[Build]:
        """A place for a build of *spec*, held until the context is left; no I/O.

        Raises `Invalid` for a specification that can never be built, `Conflict` while
        another build has its name, `Exhausted` when too many are under way.
        """
        ...

    async def cancel(self, name: str) -> bool:
        """Call off the build of the name *name*; false if there is none. Returns when nothing of it is left."""
        ...
