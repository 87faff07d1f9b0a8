"""A long request body as a file: bounded by the free space of the disk and by silence, whatever its length.

What a client announces is compared with the disk before a byte is read; what it does
not announce, or announces wrongly, every `CHECK_BYTES`. The reserve that sandboxes
need to pause is never written to.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request

from agentenv.aio.failures import translated
from agentenv.api.errors import HttpError
from agentenv.model.errors import DeadlineExceeded, Invalid, NoSpace

WRITE_BYTES: Final = 4 << 20
CHECK_BYTES: Final = 64 << 20
_CLOSE: Final = {"Connection": "close"}  # the rest of a refused body is not read


@dataclass(frozen=True, slots=True)
class Space:
    """Of the disk that uploads go to, in bytes."""

    total: int
    free: int


def space_of(directory: Path) -> Space:
    """Raises `OSError`."""
    usage = shutil.disk_usage(directory)
    return Space(usage.total, usage.free)


class Uploads:
    """Bodies as files in *directory*.

    Args:
        reserve_bytes: of free space that no upload may touch.
        silence_s: a body of which nothing comes for so long is refused with 408.
        space: asked for the disk of *directory*; tests give their own.
    """

    def __init__(
        self, directory: Path, *, reserve_bytes: int, silence_s: float, space: Callable[[Path], Space] = space_of
    ) -> None:
        self._directory = directory
        self._reserve_bytes = reserve_bytes
        self._silence_s = silence_s
        self._space = space

    async def receive(self, request: Request) -> Path:
        """The body as a file, which is the caller's from here on; nothing is left of one that does not arrive whole.

        Raises `HttpError` 413 for more than the disk could ever hold and 408 for silence, `NoSpace`
        for more than it holds now, `Invalid` for an empty body, and what `translated` makes of a failing disk.
        """
        with translated("the upload cannot be stored"):
            await asyncio.to_thread(self._directory.mkdir, parents=True, exist_ok=True)
            await self._admit(request)
            descriptor, name = await asyncio.to_thread(tempfile.mkstemp, dir=self._directory, prefix="rootfs-")
        path = Path(name)
        whole = False
        try:
            if not await self._fill(descriptor, request):
                raise Invalid("the request has no body", hint="send a tar of the root filesystem")
            whole = True
        finally:
            os.close(descriptor)
            if not whole:
                await asyncio.to_thread(path.unlink, missing_ok=True)
        return path

    async def _admit(self, request: Request) -> None:
        declared = request.headers.get("content-length", "0")
        length = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
        space = await asyncio.to_thread(self._space, self._directory)
        if length > space.total - self._reserve_bytes:
            message = f"the body is {length >> 20} MiB long and this server's disk has {space.total >> 20} in all"
            raise HttpError(413, "body_too_large", message, headers=_CLOSE)
        self._check(space, length)

    async def _fill(self, descriptor: int, request: Request) -> int:
        """Write the body; return its length in bytes."""
        size = checked = 0
        pending = bytearray()
        async with aclosing(self._chunks(request)) as chunks:
            async for chunk in chunks:
                pending += chunk
                if len(pending) < WRITE_BYTES:
                    continue
                size += await self._write(descriptor, pending)
                if size - checked >= CHECK_BYTES:
                    checked = size
                    with translated("the upload cannot be stored"):
                        self._check(await asyncio.to_thread(self._space, self._directory), 0)
        return size + await self._write(descriptor, pending)

    async def _chunks(self, request: Request) -> AsyncGenerator[bytes, None]:
        stream = request.stream()
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    chunk = await anext(stream)
            except StopAsyncIteration:
                return
            except (TimeoutError, DeadlineExceeded):  # the latter from the proxy, whose own limit may be shorter
                message = f"nothing of the body has come for {self._silence_s:g} s"
                raise HttpError(408, "body_timeout", message, headers=_CLOSE) from None
            yield chunk

    async def _write(self, descriptor: int, pending: bytearray) -> int:
        data = bytes(pending)
        pending.clear()
        with translated("the upload cannot be stored"):
            await asyncio.to_thread(_write_all, descriptor, data)
        return len(data)

    def _check(self, space: Space, wanted_bytes: int) -> None:
        if wanted_bytes > space.free - self._reserve_bytes:
            raise NoSpace(
                f"{space.free >> 20} MiB of disk are free and {self._reserve_bytes >> 20} are kept in reserve: "
                "the body does not fit",
                hint="delete sandboxes or templates, or lower sandbox.min_free_disk_mib",
            )


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
