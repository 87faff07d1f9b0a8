"""A guest agent on loopback that runs nothing: the name of the program says how the process goes.

``exit N``, ``signal STATUS`` and ``say OUT ERR`` end by themselves; ``cat`` gives its input
back when that is closed, ``yes`` writes until it is asked to end, ``stubborn`` ends only
when it is killed, ``mute`` does not even start, ``vanish`` is cut off. On a terminal it is
a shell that gives back what is typed, and ends with Ctrl-D.
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

from agentenv.guest.connect import encode_frame

PID: Final = 42
FAILURES: Final = {"missing": ("invalid_argument", "no such program"), "slow": ("deadline_exceeded", "out of time")}


@dataclass
class FakeAgent:
    """``started`` and ``signals`` are the messages that arrived; ``tokens`` the access tokens they came with."""

    started: list[dict[str, Any]] = field(default_factory=list)
    signals: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    users: list[str] = field(default_factory=list)
    typed: bytearray = field(default_factory=bytearray)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    asked_to_end: asyncio.Event = field(default_factory=asyncio.Event)
    sizes: list[dict[str, int]] = field(default_factory=list)
    keys: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    killed: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in head[1:])}
            body = await reader.readexactly(int(headers["content-length"]))
            self.tokens.add(headers.get("x-access-token", ""))
            method = head[0].split()[1].removeprefix("/process.Process/")
            if method == "Start":
                self.users.append(headers.get("authorization", ""))
                await self._start(json.loads(body[5:]), writer)
            else:
                self._unary(method, json.loads(body))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def _unary(self, method: str, message: dict[str, Any]) -> None:
        assert message["process"] == {"pid": PID}
        if method == "SendInput" and "pty" in message["input"]:
            self.keys.put_nowait(base64.b64decode(message["input"]["pty"]))
        elif method == "Update":
            self.sizes.append(message["pty"]["size"])
        elif method == "SendInput":
            self.typed += base64.b64decode(message["input"]["stdin"])
        elif method == "CloseStdin":
            self.closed.set()
        elif method == "SendSignal":
            self.signals.append(message["signal"])
            self.asked_to_end.set()
            if message["signal"] == "SIGNAL_SIGKILL":
                self.killed.set()

    async def _start(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.started.append(message)
        head = "HTTP/1.1 200 OK\r\nContent-Type: application/connect+json\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        async for frame in self._frames(message["process"]["cmd"], message["process"].get("args", [])):
            writer.write(b"%x\r\n%b\r\n" % (len(frame), frame))
            await writer.drain()
            if frame == b"":
                return

    async def _frames(self, command: str, arguments: list[str]) -> AsyncIterator[bytes]:
        if command in FAILURES:
            code, text = FAILURES[command]
            yield encode_frame({"error": {"code": code, "message": text}}, end=True)
            return
        if command == "mute":
            await self.killed.wait()
        yield _event(start={"pid": PID})
        if self.started[-1].get("pty"):
            self.sizes.append(self.started[-1]["pty"]["size"])
            yield _event(data={"pty": _base64(b"ready\r\n")})
            while not self.killed.is_set() and (typed := await self.keys.get()) != b"\x04":
                yield _event(data={"pty": _base64(b"typed " + typed.hex().encode() + b"\r\n")})
        if command == "vanish":
            return
        ended: dict[str, Any] = {"exited": True, "status": "exit status 0"}  # without `exitCode`: JSON leaves 0 out
        match command:
            case "exit":
                ended |= {"exitCode": int(arguments[0]), "status": f"exit status {arguments[0]}"}
            case "signal":
                ended = {"exitCode": -1, "exited": False, "status": arguments[0], "error": arguments[0]}
            case "say":
                yield _event(data={"stdout": _base64(arguments[0].encode())})
                yield _event(data={"stderr": _base64(arguments[1].encode())})
            case "bytes":
                yield _event(data={"stdout": _base64(bytes(range(256)))})
            case "cat":
                await self.closed.wait()
                yield _event(data={"stdout": _base64(bytes(self.typed))})
            case "stubborn":
                yield _event(data={"stdout": _base64(b"on\n")})
                await self.killed.wait()
                ended = {"exitCode": -1, "exited": False, "status": "signal: killed"}
            case "yes":
                while not self.asked_to_end.is_set():
                    yield _event(data={"stdout": _base64(b"y\n" * 4096)})
        yield _event(end=ended)
        yield encode_frame({}, end=True)
        yield b""


def _event(**event: object) -> bytes:
    return encode_frame({"event": event})


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
