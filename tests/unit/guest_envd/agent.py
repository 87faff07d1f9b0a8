"""A running agent on this host, and how to talk to it: plain HTTP and the Connect protocol in JSON."""

import base64
import http.client
import json
import os
import signal
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

Json: TypeAlias = dict[str, Any]

SECRET: Final = "the node's secret"
_STREAM_TYPE: Final = "application/connect+json"
_MESSAGE, _END = 0, 2
_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that a process said and how it ended."""

    pid: int
    stdout: bytes
    stderr: bytes
    pty: bytes
    end: Json


class StreamError(Exception):
    """A stream ended with an error."""

    def __init__(self, error: Json) -> None:
        super().__init__(error["message"])
        self.code: str = error["code"]


def frame(message: Json) -> bytes:
    payload = json.dumps(message).encode()
    return struct.pack(">BI", _MESSAGE, len(payload)) + payload


def as_user(name: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:".encode()).decode()}


class Stream:
    """Messages of a streaming answer, as they come."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self.connection = connection
        self.response = response
        self.ended = False

    def __iter__(self) -> Iterator[Json]:
        return self

    def __next__(self) -> Json:
        if self.ended:
            raise StopIteration
        flags, length = struct.unpack(">BI", self._exactly(5))
        message: Json = json.loads(self._exactly(length))
        if flags == _MESSAGE:
            return message
        assert flags == _END
        self.ended = True
        assert self.response.read() == b"", "something follows the end of the stream"
        if "error" in message:
            raise StreamError(message["error"])
        raise StopIteration

    def _exactly(self, count: int) -> bytes:
        data = self.response.read(count)
        assert len(data) == count, f"the stream broke off: {data!r}"
        return data

    def event(self) -> Json:
        """The next event of a process."""
        event: Json = next(self)["event"]
        return event

    def started(self) -> int:
        pid: int = self.event()["start"]["pid"]
        return pid

    def outcome(self, pid: int) -> Outcome:
        """Read to the end."""
        parts: dict[str, list[bytes]] = {"stdout": [], "stderr": [], "pty": []}
        end: Json | None = None
        for message in self:
            event = message["event"]
            assert end is None, "an event after the end"
            if "data" in event:
                ((name, text),) = event["data"].items()
                parts[name].append(base64.b64decode(text, validate=True))
            elif "end" in event:
                end = event["end"]
        assert end is not None, "no end event"
        joined = {name: b"".join(chunks) for name, chunks in parts.items()}
        return Outcome(pid, joined["stdout"], joined["stderr"], joined["pty"], end)

    def until_output(self, wanted: bytes) -> bytes:
        """Read until *wanted* has come, on whatever output."""
        seen = b""
        while wanted not in seen:
            event = self.event()
            assert "end" not in event, (seen, event)
            for text in event.get("data", {}).values():
                seen += base64.b64decode(text)
        return seen

    def close(self) -> None:
        self.connection.close()
        self.response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Agent:
    """One agent process and its port."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        self.process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on "), f"the agent did not start: {line!r}"
        self.port = int(line.rsplit(":", 1)[1])
        self.headers: dict[str, str] = {}

    def connection(self, timeout_s: float = _TIMEOUT_S) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def request(
        self, method: str, path: str, body: bytes | str | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        connection = self.connection()
        try:
            connection.request(method, path, body, {**self.headers, **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def control(self, path: str, body: Json | None = None, secret: str = SECRET) -> Answer:
        content = json.dumps(body) if body is not None else None
        return self.request("POST", path, content, {"X-Agentenv-Control": secret})

    def init(self, **fields: Any) -> None:
        answer = self.control("/init", {"controlSecret": SECRET, **fields})
        assert answer.status == 204, answer

    def unary(self, method: str, message: Json, headers: Mapping[str, str] | None = None) -> Answer:
        sent = {"Content-Type": "application/json", "Connect-Protocol-Version": "1", **(headers or {})}
        return self.request("POST", f"/{method}", json.dumps(message), sent)

    def call(self, method: str, message: Json, headers: Mapping[str, str] | None = None) -> Json:
        answer = self.unary(method, message, headers)
        assert answer.status == 200, answer
        assert answer.headers["content-type"] == "application/json"
        result: Json = answer.json()
        return result

    def failure(self, method: str, message: Json, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Status and code of a unary call that must fail."""
        answer = self.unary(method, message, headers)
        assert answer.status != 200, answer
        body = answer.json()
        assert body["message"]
        return answer.status, body["code"]

    def stream(self, method: str, message: Json | Sequence[Json], headers: Mapping[str, str] | None = None) -> Stream:
        """Open a streaming call; all of *message* is sent at once."""
        messages = [message] if isinstance(message, dict) else message
        connection = self.connection()
        sent = {"Content-Type": _STREAM_TYPE, "Connect-Protocol-Version": "1", **self.headers, **(headers or {})}
        connection.request("POST", f"/{method}", iter([frame(m) for m in messages]), sent, encode_chunked=True)
        response = connection.getresponse()
        assert response.status == 200, (response.status, response.read())
        assert response.getheader("content-type") == _STREAM_TYPE
        return Stream(connection, response)

    def start(self, *command: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Stream:
        process = {"cmd": command[0], "args": list(command[1:]), **fields.pop("process", {})}
        return self.stream("process.Process/Start", {"process": process, **fields}, headers)

    def run(self, *command: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Outcome:
        fields.setdefault("stdin", False)
        with self.start(*command, headers=headers, **fields) as stream:
            return stream.outcome(stream.started())

    def shell(self, script: str, **fields: Any) -> Outcome:
        return self.run("/bin/sh", "-c", script, **fields)

    def pids(self) -> list[int]:
        return [info["pid"] for info in self.call("process.Process/List", {})["processes"]]

    def rss_kib(self) -> int:
        return rss_kib(self.process.pid)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Keep the agent from running meanwhile."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def is_idle(self) -> bool:
        """Whether its event loop waits for something to happen."""
        return Path(f"/proc/{self.process.pid}/wchan").read_text() in ("ep_poll", "do_epoll_wait")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def rss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


@contextmanager
def running(command: Sequence[str | Path]) -> Iterator[Agent]:
    agent = Agent(command)
    try:
        yield agent
    finally:
        assert agent.stop() == 0


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False  # gone before it was opened, or before it was read
    return state != "Z"


def wait_gone(pid: int, limit_s: float = 10) -> None:
    """Return once *pid* is no running process; the kernel tells through a pidfd where it can."""
    deadline = time.monotonic() + limit_s
    while is_alive(pid):
        assert time.monotonic() < deadline, f"{pid} is still alive"
        os.sched_yield()


def wait_until(condition: Any, limit_s: float = 10) -> None:
    """Ask until it is so."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not become so"
        os.sched_yield()
