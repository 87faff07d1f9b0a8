"""Build a template from a root filesystem that the client sends: AgentENV's own route.

The tar is the request body, of any length; it goes to a file as it comes. The answer
is a line of JSON for each event of the build, the last one with ``template`` or
``error``. A client that leaves calls the build off, and so does deleting its template.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from agentenv.aio.tasks import spawn, to_its_end
from agentenv.api import present
from agentenv.api.endpoints import Answer, Endpoints
from agentenv.api.errors import fault
from agentenv.api.upload import Uploads
from agentenv.model.limits import DISK_MIB, MAX_NAME_CHARS, MEMORY_MIB, VCPU_COUNT, Range
from agentenv.model.machine import INIT_PATH, Machine
from agentenv.templates.contract import Build, Builder, BuildEvent, BuildSpec


def _within(bounds: Range, alias: str, description: str) -> Any:
    return Field(bounds.default, alias=alias, ge=bounds.low, le=bounds.high, description=description)


class RootfsQuery(BaseModel):
    """What the template shall be."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(
        min_length=1, max_length=MAX_NAME_CHARS, description="Name of the template; moves here if it is taken."
    )
    cpu_count: int = _within(VCPU_COUNT, "cpuCount", "Virtual CPUs.")
    memory_mib: int = _within(MEMORY_MIB, "memoryMB", "Memory in MiB.")
    disk_mib: int = _within(DISK_MIB, "diskSizeMB", "Disk in MiB.")
    default_user: str = Field("user", alias="defaultUser", pattern=r"^[a-z_][a-z0-9_-]{0,31}$")
    init: str | None = Field(
        None, pattern=f"^{INIT_PATH}$", description="The image's own init, run as PID 1; without it the agent is PID 1."
    )


class BuildRoutes:
    """Builds by *builder* from *uploads*, each kept until its build is over."""

    def __init__(self, builder: Builder, uploads: Uploads) -> None:
        self._builder = builder
        self._uploads = uploads

    def declare(self, endpoints: Endpoints) -> None:
        endpoints.add(
            "POST", "/templates/rootfs", self.build,
            Answer(200, description="A line of JSON for each event; the last has `template` or `error`."),
            tag="templates", summary="Build a template from a root filesystem (a tar as the body)",
            problems=(400, 408, 409, 413, 429, 507),
        )  # fmt: skip

    async def build(self, request: Request, query: Annotated[RootfsQuery, Query()]) -> Response:
        machine = Machine(query.cpu_count, query.memory_mib, query.disk_mib)
        spec = BuildSpec(query.name, machine, default_user=query.default_user, init=query.init)
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        with ExitStack() as place:
            begun = place.enter_context(self._builder.begin(spec))
            archive = await begun.receive(lambda: self._uploads.receive(request))
            building = spawn(f"build {spec.name}", self._run(begun, archive, events, place.pop_all()))
        return _Watched(_lines(events), building)

    async def cancel(self, name: str) -> bool:
        """Call off the build of template *name*; false if there is none."""
        return await self._builder.cancel(name)

    async def _run(
        self, build: Build, archive: Path, events: asyncio.Queue[dict[str, Any] | None], place: ExitStack
    ) -> None:
        def say(event: BuildEvent) -> None:
            # A reader that is gone or slow must not hold the build up, nor memory without end.
            if events.qsize() < 10_000:
                events.put_nowait(
                    {
                        "timestamp": present.timestamp(event.timestamp),
                        "step": event.step,
                        "message": event.message,
                        "done": event.done,
                        "total": event.total,
                    }
                )

        outcome: dict[str, Any] | None = None
        try:
            with place:
                outcome = {"template": present.template(await build.run(archive, say))}
        except Exception as error:  # noqa: BLE001 - told to the client as the build's outcome
            outcome = {"error": fault(error).body()}
        finally:
            # Before the outcome is told, and never cut short: a client that has it may leave, and that cancels this.
            try:
                await to_its_end(f"remove {archive}", asyncio.to_thread(archive.unlink, missing_ok=True))
            finally:
                if outcome is not None:
                    events.put_nowait(outcome)
                events.put_nowait(None)


class _Watched(StreamingResponse):
    """The answer that tells of *building*, which ends with it."""

    def __init__(self, lines: AsyncIterator[bytes], building: asyncio.Task[None]) -> None:
        super().__init__(lines, media_type="application/x-ndjson")
        self._building = building

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._building.cancel()


async def _lines(events: asyncio.Queue[dict[str, Any] | None]) -> AsyncIterator[bytes]:
    while (event := await events.get()) is not None:
        yield json.dumps(event).encode() + b"\n"
