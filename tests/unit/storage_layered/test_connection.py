"""The socket of the storage daemon, with somebody at its other end who may say anything."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentenv.aio.tasks import Tasks
from agentenv.model.errors import AgentEnvError, Bug, Invalid, NoSpace, NotFound, Unavailable, Unsupported
from agentenv.storage.layered.connection import Connection, Disconnected
from agentenv.storage.layered.wire import MAX_FRAME_BYTES, decode, encode, length_of

GREETING = {"protocol": 1, "version": "1", "pid": 7, "front_ends": ["fuse"], "mount": "/m", "mounted": "fresh"}
Said = Callable[[dict[str, Any]], bytes]


def frame(document: object) -> bytes:
    body = json.dumps(document).encode()
    return len(body).to_bytes(4) + body


def ok(request: dict[str, Any]) -> bytes:
    return frame({"id": request["id"], "ok": GREETING if request["call"] == "hello" else {"was": request["call"]}})


@asynccontextmanager
async def daemon(path: Path, answer: Said, *, reads: int = 1000) -> AsyncIterator[Path]:
    """One that answers each request with what *answer* says, and hangs up after *reads* of them."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for _ in range(reads):
                length = int.from_bytes(await reader.readexactly(4))
                writer.write(answer(json.loads(await reader.readexactly(length))))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield path
    finally:
        server.close()


@asynccontextmanager
async def connected(path: Path, answer: Said, **more: int) -> AsyncIterator[Connection]:
    async with daemon(path, answer, **more), Tasks("test") as tasks:
        connection, greeting = await Connection.open(path, tasks)
        assert (greeting.pid, greeting.replaced) == (7, False)
        try:
            yield connection
        finally:
            connection.close()


async def test_answers_come_in_any_order(tmp_path: Path) -> None:
    held: list[bytes] = []

    def backwards(request: dict[str, Any]) -> bytes:
        held.append(ok(request))
        if len(held) < 4 and request["call"] != "hello":
            return b""
        said, held[:] = b"".join(reversed(held)), []
        return said

    async with connected(tmp_path / "s", backwards) as connection:
        names = ["a", "b", "c", "d"]
        answers = await asyncio.gather(*(connection.call(name, {}, timeout_s=10) for name in names))
        assert [answer["was"] for answer in answers] == names


@pytest.mark.parametrize(
    ("code", "kind"),
    [("invalid", Invalid), ("not_found", NotFound), ("no_space", NoSpace), ("corrupt", Bug), ("news", Bug)],
)
async def test_an_error_is_of_its_kind(tmp_path: Path, code: str, kind: type[AgentEnvError]) -> None:
    def refuse(request: dict[str, Any]) -> bytes:
        if request["call"] == "hello":
            return ok(request)
        return frame({"id": request["id"], "error": {"code": code, "left": "rolled_back", "message": "why"}})

    async with connected(tmp_path / "s", refuse) as connection:
        with pytest.raises(kind, match="why"):
            await connection.call("x", {}, timeout_s=10)


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xff",
        frame([]),
        frame({"id": 99, "ok": {}}),
        frame({"id": "x", "ok": {}}),
        frame({"id": 2}),
        frame({"id": 2, "ok": 7}),
        frame({"id": 2, "error": {}}),
        frame({"id": 2, "error": "no"}),
        b"\0\0\0\1{",
        b"\0\0\0\4",
    ],
)
async def test_nonsense_ends_the_conversation_and_nobody_waits_for_ever(tmp_path: Path, said: bytes) -> None:
    async with connected(tmp_path / "s", lambda r: ok(r) if r["call"] == "hello" else said, reads=2) as connection:
        with pytest.raises(Disconnected):
            await connection.call("x", {}, timeout_s=10)
        await connection.wait_closed()
        with pytest.raises(Disconnected):
            await connection.call("y", {}, timeout_s=10)


async def test_an_answer_lands_also_when_nobody_waits(tmp_path: Path) -> None:
    gate: list[bytes] = []

    def late(request: dict[str, Any]) -> bytes:
        if request["call"] == "slow":
            gate.append(ok(request))
            return b""
        return ok(request) + b"".join(gate)

    landed = asyncio.Event()
    async with connected(tmp_path / "s", late) as connection:
        with pytest.raises(Unavailable, match="slow"):
            await connection.call("slow", {}, timeout_s=0.01, landed=lambda _: landed.set())
        await connection.call("other", {}, timeout_s=10)
        await landed.wait()


async def test_nobody_there_is_told_apart_from_one_who_speaks_otherwise(tmp_path: Path) -> None:
    async with Tasks("test") as tasks:
        with pytest.raises(FileNotFoundError):
            await Connection.open(tmp_path / "s", tasks)

        def older(request: dict[str, Any]) -> bytes:
            return frame({"id": request["id"], "error": {"code": "unsupported", "left": "rolled_back", "message": "2"}})

        async with daemon(tmp_path / "s", older):
            with pytest.raises(Unsupported):
                await Connection.open(tmp_path / "s", tasks)


def test_frames_are_bounded() -> None:
    assert length_of(b"\0\0\0\2") == 2
    with pytest.raises(Bug):
        length_of((MAX_FRAME_BYTES + 1).to_bytes(4))
    with pytest.raises(Invalid):
        encode(1, "x", {"long": "x" * MAX_FRAME_BYTES})
    assert decode(b'{"id": 3, "ok": {"a": 1}}').result == {"a": 1}
