"""Uploads are bounded by the disk and by silence, and leave nothing when they are refused."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.types import Message

from agentenv.api import upload
from agentenv.api.errors import HttpError
from agentenv.api.upload import CHECK_BYTES, Space, Uploads, space_of
from agentenv.model.errors import AgentEnvError, DeadlineExceeded, Exhausted, Invalid, NoSpace, Unavailable

MIB = 1 << 20
RESERVE = 100 * MIB


class Disk:
    """Free space as a test says, answered in turn; the last answer stays."""

    def __init__(self, *free_mib: int, total_mib: int = 10_000) -> None:
        self.free = [one * MIB for one in free_mib]
        self.total = total_mib * MIB
        self.asked = 0

    def __call__(self, _: Path) -> Space:
        answer = self.free[min(self.asked, len(self.free) - 1)]
        self.asked += 1
        return Space(self.total, answer)


def request(body: Callable[[], AsyncIterator[bytes]], length: int | str | None = None) -> Request:
    chunks = body()

    async def receive() -> Message:
        try:
            return {"type": "http.request", "body": await anext(chunks), "more_body": True}
        except StopAsyncIteration:
            return {"type": "http.request", "body": b"", "more_body": False}

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


def of(*chunks: bytes) -> Callable[[], AsyncIterator[bytes]]:
    async def body() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return body


async def failing(error: BaseException) -> AsyncIterator[bytes]:
    async for chunk in of(b"")():
        if chunk == b"":
            raise error
        yield chunk


def unread() -> AsyncIterator[bytes]:
    return failing(AssertionError("the body was read"))


def uploads(directory: Path, disk: Disk, *, silence_s: float = 60.0) -> Uploads:
    return Uploads(directory, reserve_bytes=RESERVE, silence_s=silence_s, space=disk)


async def test_a_body_that_fits_is_a_file(tmp_path: Path) -> None:
    path = await uploads(tmp_path / "new", Disk(101)).receive(request(of(b"ab", b"", b"c"), 3))

    assert path.read_bytes() == b"abc"


@pytest.mark.parametrize(
    ("length_mib", "status", "kind"),
    [(9_901, 413, "body_too_large"), (401, None, "no_space"), (10**9, 413, "body_too_large")]
)  # fmt: skip
async def test_what_cannot_fit_is_refused_before_a_byte_is_read(
    tmp_path: Path, length_mib: int, status: int | None, kind: str
) -> None:
    with pytest.raises(AgentEnvError) as refusal:
        await uploads(tmp_path, Disk(500)).receive(request(unread, length_mib * MIB))

    if isinstance(refusal.value, HttpError):
        assert (refusal.value.status, refusal.value.error_code) == (status, kind)
    else:
        assert status is None
        assert refusal.value.kind == kind
        assert refusal.value.hint
    assert list(tmp_path.iterdir()) == []


async def test_what_just_fits_is_taken(tmp_path: Path) -> None:
    assert (await uploads(tmp_path, Disk(500)).receive(request(of(b"x"), 400 * MIB))).exists()


@pytest.mark.parametrize("length", [None, "1", "-1", "9" * 5000])
async def test_a_body_without_a_true_length_is_stopped_when_it_reaches_the_reserve(
    tmp_path: Path, length: str | None
) -> None:
    disk = Disk(500, 300, 99)
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += upload.WRITE_BYTES
            yield b"\0" * upload.WRITE_BYTES

    with pytest.raises(NoSpace):
        await uploads(tmp_path, disk).receive(request(endless, length))

    assert sent == 2 * CHECK_BYTES, "asked once for each piece"
    assert disk.asked == 3
    assert list(tmp_path.iterdir()) == []


async def test_a_full_disk_takes_no_upload_of_unknown_length(tmp_path: Path) -> None:
    with pytest.raises(NoSpace):
        await uploads(tmp_path, Disk(99)).receive(request(unread))


async def test_silence_ends_it(tmp_path: Path) -> None:
    async def silent() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    with pytest.raises(HttpError) as refusal:
        await uploads(tmp_path, Disk(500), silence_s=0.01).receive(request(silent))

    assert (refusal.value.status, refusal.value.error_code) == (408, "body_timeout")
    assert list(tmp_path.iterdir()) == []


async def test_the_silence_that_the_proxy_saw_first_is_the_same_answer(tmp_path: Path) -> None:
    def silent() -> AsyncIterator[bytes]:
        return failing(DeadlineExceeded("the body of the request did not come"))

    with pytest.raises(HttpError) as refusal:
        await uploads(tmp_path, Disk(500)).receive(request(silent))

    assert refusal.value.status == 408


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, NoSpace), (errno.EDQUOT, NoSpace), (errno.EIO, Unavailable), (errno.EROFS, Unavailable),
     (errno.EMFILE, Exhausted)],
)  # fmt: skip
async def test_only_a_full_disk_is_told_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[AgentEnvError]
) -> None:
    def fail(_descriptor: int, _data: bytes) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(upload, "_write_all", fail)

    with pytest.raises(AgentEnvError) as refusal:
        await uploads(tmp_path, Disk(500)).receive(request(of(b"x")))

    assert type(refusal.value) is kind
    assert list(tmp_path.iterdir()) == []


async def test_nothing_is_no_upload(tmp_path: Path) -> None:
    with pytest.raises(Invalid):
        await uploads(tmp_path, Disk(500)).receive(request(of()))

    assert list(tmp_path.iterdir()) == []


def test_the_space_is_that_of_the_disk(tmp_path: Path) -> None:
    space = space_of(tmp_path)

    assert 0 <= space.free <= space.total > 0
