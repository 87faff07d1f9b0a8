"""Build a template from a root filesystem that the client sends: AgentENV's own route.

The tar is the request body, of any length; it goes to a file as it comes. The answer
is a line of JSON for each event of the build, the last one with ``template`` or
``error``. A client that leaves after the upload leaves the build going.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentenv.aio.tasks import spawn
from agentenv.api import present
from agentenv.api.endpoints import Answer, Endpoints
from agentenv.api.errors import fault
from agentenv.model.errors import Invalid, NoSpace
from agentenv.model.machine import INIT_PATH, Machine
from agentenv.templates.contract import Builder, BuildEvent, BuildSpec

WRITE_BYTES = 4 << 20


class RootfsQuery(BaseModel):
    """What the template shall be."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=128, description="Name of the template; moves here if it is taken.")
    cpu_count: int = Field(1, alias="cpuCount", ge=1, le=32, description="Virtual CPUs.")
    memory_mib: int = Field(512, alias="memoryMB", ge=128, le=65_536, description="Memory in MiB.")
    disk_mib: int = Field(4096, alias="diskSizeMB", ge=256, le=1 << 20, description="Disk in MiB.")
    default_user: str = Field("user", alias="defaultUser", pattern=r"^[a-z_][a-z0-9_-]{0,31}$")
    init: str | None = Field(
        None, pattern=f"^{INIT_PATH}$", description="The image's own init, run as PID 1; without it the agent is PID 1."
    )


class BuildRoutes:
    """Builds by *builder*; uploads are kept in *uploads* until their build is over."""

    def __init__(self, builder: Builder, uploads: Path) -> None:
        self._builder = builder
        self._uploads = uploads

    def declare(self, endpoints: Endpoints) -> None:
        endpoints.add(
            "POST", "/templates/rootfs", self.build,
            Answer(200, description="A line of JSON for each event; the last has `template` or `error`."),
            tag="templates", summary="Build a template from a root filesystem (a tar as the body)", problems=(400,),
        )  # fmt: skip

    async def build(self, request: Request, query: Annotated[RootfsQuery, Query()]) -> Response:
        machine = Machine(query.cpu_count, query.memory_mib, query.disk_mib)
        spec = BuildSpec(query.name, machine, default_user=query.default_user, init=query.init)
        self._builder.check(spec)
        archive = await self._receive(request)
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        spawn(f"build {spec.name}", self._run(spec, archive, events))
        return StreamingResponse(_lines(events), media_type="application/x-ndjson")

    async def _receive(self, request: Request) -> Path:
        """The body as a file; removed again if it does not arrive whole."""
        await asyncio.to_thread(self._uploads.mkdir, parents=True, exist_ok=True)
        descriptor, name = await asyncio.to_thread(tempfile.mkstemp, dir=self._uploads, prefix="rootfs-")
        path = Path(name)
        whole = False
        try:
            pending = bytearray()
            async for chunk in request.stream():
                pending += chunk
                if len(pending) >= WRITE_BYTES:
                    await asyncio.to_thread(_write, descriptor, bytes(pending))
                    pending.clear()
            await asyncio.to_thread(_write, descriptor, bytes(pending))
            whole = True
        except OSError as error:
            raise NoSpace(f"the root filesystem cannot be stored: {error.strerror}") from error
        finally:
            os.close(descriptor)
            if not whole:
                await asyncio.to_thread(path.unlink, missing_ok=True)
        if not await asyncio.to_thread(_size, path):
            await asyncio.to_thread(path.unlink, missing_ok=True)
            raise Invalid("the request has no body", hint="send a tar of the root filesystem")
        return path

    async def _run(self, spec: BuildSpec, archive: Path, events: asyncio.Queue[dict[str, Any] | None]) -> None:
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

        try:
            built = await self._builder.build(spec, archive, say)
            events.put_nowait({"template": present.template(built)})
        except Exception as error:  # noqa: BLE001 - told to the client as the build's outcome
            events.put_nowait({"error": fault(error).body()})
        finally:
            try:
                await asyncio.to_thread(archive.unlink, missing_ok=True)
            finally:
                events.put_nowait(None)  # last: whoever has the whole answer finds nothing left of the upload


async def _lines(events: asyncio.Queue[dict[str, Any] | None]) -> AsyncIterator[bytes]:
    while (event := await events.get()) is not None:
        yield json.dumps(event).encode() + b"\n"


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _size(path: Path) -> int:
    return path.stat().st_size
