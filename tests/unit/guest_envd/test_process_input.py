"""process.Process: standard input, streams of it, and terminals."""

import base64
import hashlib
import json
import socket
import struct

import pytest

from tests.unit.guest_envd.agent import Agent, Stream, StreamError, frame, wait_until

pytestmark = pytest.mark.needs("root", "mount", "envd")


def selector(pid: int) -> dict[str, dict[str, int]]:
    return {"process": {"pid": pid}}


def send(agent: Agent, pid: int, data: bytes, to: str = "stdin") -> None:
    text = base64.b64encode(data).decode()
    assert agent.call("process.Process/SendInput", {**selector(pid), "input": {to: text}}) == {}


def test_input_is_passed_on_and_ends_when_it_is_closed(agent: Agent) -> None:
    with agent.start("/bin/sh", "-c", "cat; echo .; exec sleep 60") as stream:
        pid = stream.started()
        send(agent, pid, b"one ")
        send(agent, pid, b"\xff\x00two")
        for _ in range(2):
            assert agent.call("process.Process/CloseStdin", selector(pid)) == {}
        assert stream.until_output(b".\n") == b"one \xff\x00two.\n"


def test_input_larger_than_a_pipe_waits_for_its_reader(agent: Agent) -> None:
    data = bytes(range(256)) * 8192
    with agent.start("sha256sum") as stream:
        pid = stream.started()
        send(agent, pid, data)
        agent.call("process.Process/CloseStdin", selector(pid))
        assert stream.outcome(pid).stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_input_that_nobody_reads_is_given_up_at_the_deadline_of_the_call(agent: Agent) -> None:
    text = base64.b64encode(bytes(1 << 20)).decode()
    with agent.start("sleep", "60") as stream:
        message = {**selector(stream.started()), "input": {"stdin": text}}
        failed = agent.failure("process.Process/SendInput", message, {"Connect-Timeout-Ms": "200"})
        assert failed == (504, "deadline_exceeded")


def test_input_to_a_closed_standard_input_is_an_error(agent: Agent) -> None:
    message = {"input": {"stdin": "eA=="}}
    with agent.start("sleep", "60", stdin=False) as stream:
        pid = stream.started()
        assert agent.failure("process.Process/SendInput", {**selector(pid), **message}) == (500, "internal")
    with agent.start("/bin/sh", "-c", "exec <&-; echo closed; exec sleep 60") as stream:
        pid = stream.started()
        stream.until_output(b"closed")
        assert agent.failure("process.Process/SendInput", {**selector(pid), **message}) == (500, "internal")


@pytest.mark.parametrize("given", [{}, {"stdin": "eA==", "pty": "eA=="}, {"stdin": "not base64!"}, {"stdin": 5}])
def test_malformed_input_is_refused(agent: Agent, given: dict[str, object]) -> None:
    with agent.start("cat") as stream:
        message = {**selector(stream.started()), "input": given}
        assert agent.failure("process.Process/SendInput", message) == (400, "invalid_argument")


def test_a_message_over_four_mebibytes_is_refused(agent: Agent) -> None:
    text = base64.b64encode(bytes(4 << 20)).decode()
    with agent.start("cat") as stream:
        message = {**selector(stream.started()), "input": {"stdin": text}}
        assert agent.failure("process.Process/SendInput", message) == (429, "resource_exhausted")


def test_a_stream_of_input_is_written_as_it_comes(agent: Agent) -> None:
    with agent.start("cat") as stream:
        pid = stream.started()
        sender = OpenCall(agent, "process.Process/StreamInput")
        sender.send(frame({"start": selector(pid)}))
        for word in (b"one", b"two"):
            sender.send(frame({"data": {"input": {"stdin": base64.b64encode(word).decode()}}}))
            stream.until_output(word)
        sender.send(frame({"keepalive": {}}))
        assert sender.finish() == [(0, {}), (2, {})]
        agent.call("process.Process/CloseStdin", selector(pid))
        assert stream.outcome(pid).end["exitCode"] == 0


def test_a_frame_may_come_in_pieces(agent: Agent) -> None:
    with agent.start("cat") as stream:
        pid = stream.started()
        sender = OpenCall(agent, "process.Process/StreamInput")
        data = frame({"start": selector(pid)}) + frame({"data": {"input": {"stdin": "aGVsbG8="}}})
        for at in range(0, len(data), 7):
            sender.send(data[at : at + 7])
        stream.until_output(b"hello")
        assert sender.finish() == [(0, {}), (2, {})]


def test_a_stream_of_input_for_nobody_fails_while_the_client_is_still_sending(agent: Agent) -> None:
    sender = OpenCall(agent, "process.Process/StreamInput")
    sender.send(frame({"start": selector(999_999_999)}))
    ((flags, message),) = sender.answer()
    assert (flags, message["error"]["code"]) == (2, "not_found")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"keepalive": {}}],
        [{"data": {"input": {"stdin": "eA=="}}}],
        [{}],
        [{"start": {"process": {}}}],
    ],
)
def test_a_stream_of_input_must_begin_with_start(agent: Agent, messages: list[dict[str, object]]) -> None:
    with agent.stream("process.Process/StreamInput", messages) as stream, pytest.raises(StreamError) as failed:
        next(stream)
    assert failed.value.code == "invalid_argument"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x00\x00\x00\x00\x05{}", "invalid_argument"),
        (b"\x00\x7f\xff\xff\xff", "resource_exhausted"),
        (b"\x01\x00\x00\x00\x00", "unimplemented"),
        (b"\x00\x00\x00\x00\x03{{{", "invalid_argument"),
    ],
)
def test_a_broken_frame_ends_the_call(agent: Agent, data: bytes, code: str) -> None:
    sender = OpenCall(agent, "process.Process/StreamInput")
    sender.send(data)
    ((flags, message),) = sender.finish()
    assert (flags, message["error"]["code"]) == (2, code)


def start_terminal(agent: Agent, *command: str) -> Stream:
    envs = {"TERM": "dumb", "PS1": "$ "}
    return agent.start(*command, pty={"size": {"cols": 80, "rows": 24}}, process={"envs": envs})


def test_a_terminal_has_the_size_that_was_asked_for_and_can_be_resized(agent: Agent) -> None:
    with start_terminal(
        agent, "/bin/sh", "-c", "stty size; read x; stty size; tty; test -t 2 && ls -n $(tty)"
    ) as stream:
        pid = stream.started()
        stream.until_output(b"24 80")
        size = {"size": {"cols": 100, "rows": 30}}
        assert agent.call("process.Process/Update", {**selector(pid), "pty": size}) == {}
        send(agent, pid, b"\n", "pty")
        outcome = stream.outcome(pid)
    assert b"30 100" in outcome.pty
    assert b"/dev/pts/" in outcome.pty
    assert b" 1000 " in outcome.pty, "the terminal belongs to the user"
    assert outcome.end["exitCode"] == 0


def test_a_terminal_turns_control_characters_into_signals(agent: Agent) -> None:
    with start_terminal(
        agent, "/bin/sh", "-c", "trap 'echo caught; exit 5' INT; echo on; while :; do sleep 0.1; done"
    ) as stream:
        pid = stream.started()
        stream.until_output(b"on")
        send(agent, pid, b"\x03", "pty")
        outcome = stream.outcome(pid)
    assert b"caught" in outcome.pty
    assert outcome.end["exitCode"] == 5


def test_a_killed_terminal_is_told_in_the_words_clients_wait_for(agent: Agent) -> None:
    with start_terminal(agent, "/bin/sh") as stream:
        pid = stream.started()
        agent.call("process.Process/SendSignal", {**selector(pid), "signal": "SIGNAL_SIGKILL"})
        end = stream.outcome(pid).end
    assert (end["exitCode"], end["status"], end["error"]) == (-1, "signal: killed", "signal: killed")


def test_pipes_and_terminals_take_only_their_own_input(agent: Agent) -> None:
    with start_terminal(agent, "cat") as stream:
        pid = stream.started()
        assert agent.failure("process.Process/SendInput", {**selector(pid), "input": {"stdin": "eA=="}})[0] == 400
        assert agent.failure("process.Process/CloseStdin", selector(pid))[0] == 400
        send(agent, pid, b"\x04", "pty")
        assert stream.outcome(pid).end["exitCode"] == 0
    with agent.start("cat") as stream:
        pid = stream.started()
        assert agent.failure("process.Process/SendInput", {**selector(pid), "input": {"pty": "eA=="}})[0] == 400
        size = {"size": {"cols": 1, "rows": 1}}
        assert agent.failure("process.Process/Update", {**selector(pid), "pty": size})[0] == 400


def test_an_impossible_size_is_refused(agent: Agent) -> None:
    with agent.start("cat", pty={"size": {"cols": 70_000, "rows": 1}}) as stream, pytest.raises(StreamError) as failed:
        next(stream)
    assert failed.value.code == "invalid_argument"
    wait_until(lambda: agent.pids() == [])


class OpenCall:
    """A streaming call whose body is sent piece by piece, on a bare socket."""

    def __init__(self, agent: Agent, method: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", agent.port), timeout=30)
        kind = "application/connect+json"
        head = [f"POST /{method} HTTP/1.1", "Host: x", f"Content-Type: {kind}", "Transfer-Encoding: chunked", "", ""]
        self.socket.sendall("\r\n".join(head).encode())

    def send(self, data: bytes) -> None:
        self.socket.sendall(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def finish(self) -> list[tuple[int, dict[str, dict[str, str]]]]:
        self.socket.sendall(b"0\r\n\r\n")
        return self.answer()

    def answer(self) -> list[tuple[int, dict[str, dict[str, str]]]]:
        """The frames of the answer, which must be complete."""
        with self.socket, self.socket.makefile("rb") as file:
            assert b" 200 " in file.readline()
            length = None
            while (line := file.readline()) != b"\r\n":
                name, value = line.decode().lower().split(":", 1)
                length = int(value) if name == "content-length" else length
            assert length is not None
            body = file.read(length)
        frames = []
        while body:
            flags, size = struct.unpack(">BI", body[:5])
            frames.append((flags, json.loads(body[5 : 5 + size])))
            body = body[5 + size :]
        return frames
