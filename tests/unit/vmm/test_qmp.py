"""QEMU's protocol: what it says, and a monitor that says it late, wrongly or not at all."""

import array
import asyncio
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.model.errors import AgentEnvError, Bug, Exhausted, NoSpace, Unavailable, Unsupported
from agentenv.vmm.qmp import MAX_MESSAGE_BYTES, Answer, Event, Greeting, Lines, Monitor, Refusal, parse, refusal

GREETING = {"QMP": {"version": {}, "capabilities": ["oob"]}}


class TestParse:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (json.dumps(GREETING), Greeting()),
            ('{"return": {}, "id": 7}', Answer(7, {})),
            ('{"return": [1], "id": "other"}', Answer(None, [1])),
            ('{"return": null}', Answer(None, None)),
            (
                '{"id": 2, "error": {"class": "GenericError", "desc": "no"}}',
                Refusal(2, "GenericError", "no"),
            ),
            ('{"event": "STOP", "timestamp": {}}', Event("STOP", {})),
            ('{"event": "X", "data": {"a": 1}}', Event("X", {"a": 1})),
            ('{"event": "X", "data": 5}', Event("X", {})),
        ],
    )
    def test_knows_every_kind_of_message(self, line: str, message: object) -> None:
        assert parse(line.encode()) == message

    @pytest.mark.parametrize("line", ["", "{", "[]", "5", "{}", '{"error": "no"}', '{"event": 5}', "[" * 100_000])
    def test_refuses_the_rest(self, line: str) -> None:
        with pytest.raises(ValueError):  # noqa: PT011 - the parser's only kind
            parse(line.encode())

    @given(st.binary(max_size=200))
    def test_raises_nothing_else(self, line: bytes) -> None:
        with contextlib.suppress(ValueError):
            parse(line)


class TestLines:
    @given(st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")), max_size=8), st.data())
    def test_are_the_same_however_the_bytes_come(self, lines: list[bytes], data: st.DataObject) -> None:
        stream = b"".join(line + b"\n" for line in lines)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
        parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        cutter = Lines()

        got = [line for part in parts for line in cutter.feed(part)]

        assert got == [line for line in lines if line.strip()]

    def test_have_a_greatest_length(self) -> None:
        cutter = Lines()
        part = b"x" * (1 << 20)

        for _ in range(MAX_MESSAGE_BYTES // len(part)):
            assert cutter.feed(part) == []
        with pytest.raises(ValueError, match="more than"):
            cutter.feed(part)


@pytest.mark.parametrize(
    ("error_class", "text", "kind"),
    [
        ("CommandNotFound", "The command xen-save-devices-state has not been found", Unsupported),
        ("GenericError", "Could not write: No space left on device", NoSpace),
        ("GenericError", "cannot set up guest memory: Cannot allocate memory", Exhausted),
        ("GenericError", "node is busy", Bug),
    ],
)
def test_a_refusal_keeps_its_words_and_gets_a_kind(error_class: str, text: str, kind: type[AgentEnvError]) -> None:
    error = refusal("some-command", Refusal(1, error_class, text))

    assert type(error) is kind
    assert text in error.message


class Qemu:
    """The other end of a monitor's socket, played by the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._listener.setblocking(False)
        self.connection: socket.socket | None = None
        self.fds: list[int] = []

    async def accept(self, *, greet: bool = True) -> None:
        self.connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        self.connection.setblocking(False)
        if greet:
            await self.say(GREETING)
            await self.answer({})

    async def say(self, *messages: object) -> None:
        await self.say_bytes(b"".join(json.dumps(message).encode() + b"\r\n" for message in messages))

    async def say_bytes(self, data: bytes) -> None:
        assert self.connection is not None
        await asyncio.get_running_loop().sock_sendall(self.connection, data)

    async def hear(self) -> dict[str, Any]:
        """Return the next command; descriptors that come with it are kept."""
        assert self.connection is not None
        loop, data = asyncio.get_running_loop(), b""
        while not data.endswith(b"\n"):
            readable = asyncio.Event()
            loop.add_reader(self.connection.fileno(), readable.set)
            await readable.wait()
            loop.remove_reader(self.connection.fileno())
            part, ancillary, _, _ = self.connection.recvmsg(65536, socket.CMSG_SPACE(16))
            assert part
            data += part
            for _, _, content in ancillary:
                fds = array.array("i")
                fds.frombytes(content)
                self.fds += fds
        command: dict[str, Any] = json.loads(data)
        return command

    async def answer(self, value: object) -> dict[str, Any]:
        command = await self.hear()
        await self.say({"return": value, "id": command["id"]})
        return command

    def hang_up(self) -> None:
        assert self.connection is not None
        self.connection.close()

    def close(self) -> None:
        self._listener.close()
        if self.connection is not None:
            self.connection.close()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def qemu() -> Iterator[Qemu]:
    with tempfile.TemporaryDirectory(prefix="vmm-qmp-") as directory:
        qemu = Qemu(Path(directory, "qmp.sock"))
        yield qemu
        qemu.close()


@pytest.fixture
async def monitor(qemu: Qemu) -> AsyncIterator[Monitor]:
    async with asyncio.TaskGroup() as group:
        connecting = group.create_task(Monitor.connect(qemu.path, timeout_s=5.0))
        group.create_task(qemu.accept())
    yield connecting.result()
    connecting.result().close()


async def both(command: Awaitable[Any], step: Coroutine[Any, Any, Any]) -> Any:
    """Await a command of ours while the other end does its part; the part ends with the command."""
    playing = asyncio.create_task(step)
    try:
        return await command
    finally:
        playing.cancel()
        await asyncio.wait([playing])


class TestMonitor:
    async def test_returns_what_a_command_returns(self, qemu: Qemu, monitor: Monitor) -> None:
        assert await both(monitor.execute("query-status"), qemu.answer({"status": "paused"})) == {"status": "paused"}

    async def test_sends_arguments_and_descriptors(self, qemu: Qemu, monitor: Monitor) -> None:
        reader, writer = os.pipe()
        try:
            heard = asyncio.create_task(qemu.answer({}))
            await monitor.execute("getfd", {"fdname": "state"}, fds=(reader,))
            command = await heard
            os.write(writer, b"through the socket")
        finally:
            os.close(reader)
            os.close(writer)

        assert command["execute"] == "getfd"
        assert command["arguments"] == {"fdname": "state"}
        assert os.read(qemu.fds[0], 100) == b"through the socket"

    async def test_raises_what_qemu_refuses_and_goes_on(self, qemu: Qemu, monitor: Monitor) -> None:
        async def refuse() -> None:
            command = await qemu.hear()
            await qemu.say({"id": command["id"], "error": {"class": "GenericError", "desc": "the words of QEMU"}})

        refusing = asyncio.create_task(refuse())
        with pytest.raises(Bug, match="the words of QEMU"):
            await monitor.execute("stop")
        await refusing

        assert await both(monitor.execute("cont"), qemu.answer({})) == {}

    async def test_sends_one_command_at_a_time(self, qemu: Qemu, monitor: Monitor) -> None:
        first = asyncio.create_task(monitor.execute("first"))
        second = asyncio.create_task(monitor.execute("second"))

        command = await qemu.hear()
        assert command["execute"] == "first"
        assert qemu.connection is not None
        with pytest.raises(BlockingIOError):
            qemu.connection.recv(1)
        await qemu.say({"return": 1, "id": command["id"]})
        await qemu.answer(2)

        assert list(await asyncio.gather(first, second)) == [1, 2]

    async def test_gives_up_on_a_silent_qemu_and_drops_its_late_answer(self, qemu: Qemu, monitor: Monitor) -> None:
        with pytest.raises(Unavailable, match="query-status"):
            await monitor.execute("query-status", timeout_s=0.01)
        late = await qemu.hear()

        asked = asyncio.create_task(monitor.execute("query-version"))
        command = await qemu.hear()
        await qemu.say({"return": "late", "id": late["id"]}, {"return": "right", "id": command["id"]})

        assert await asked == "right"

    async def test_waiting_for_one_s_turn_counts_as_time(self, qemu: Qemu, monitor: Monitor) -> None:
        first = asyncio.create_task(monitor.execute("first"))
        await qemu.hear()

        with pytest.raises(Unavailable, match="second"):
            await monitor.execute("second", timeout_s=0.01)

        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first

    async def test_can_be_used_after_a_caller_was_cancelled(self, qemu: Qemu, monitor: Monitor) -> None:
        asked = asyncio.create_task(monitor.execute("stop"))
        command = await qemu.hear()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await qemu.say({"return": {}, "id": command["id"]})

        assert await both(monitor.execute("cont"), qemu.answer("fine")) == "fine"

    async def test_tells_events_between_answers(self, qemu: Qemu, monitor: Monitor) -> None:
        seen: list[str] = []
        monitor.listen(lambda event: seen.append(event.name))
        stopped = monitor.expect(lambda event: event.name == "STOP")

        asked = asyncio.create_task(monitor.execute("stop"))
        command = await qemu.hear()
        await qemu.say({"event": "RTC_CHANGE", "data": {"offset": 1}}, {"event": "STOP"})
        await qemu.say({"return": {}, "id": command["id"]})
        await asked

        assert (await stopped).name == "STOP"
        assert seen == ["RTC_CHANGE", "STOP"]
        assert repr(monitor) == "<Monitor connected, 0 waiting for events>"

    async def test_a_lost_connection_fails_whoever_waits(self, qemu: Qemu, monitor: Monitor) -> None:
        event = monitor.expect(lambda _: True)
        asked = asyncio.create_task(monitor.execute("stop"))
        await qemu.hear()

        qemu.hang_up()

        with pytest.raises(Unavailable):
            await asked
        with pytest.raises(Unavailable):
            await event
        with pytest.raises(Unavailable):
            await monitor.execute("cont")
        with pytest.raises(Unavailable):
            await monitor.expect(lambda _: True)
        assert monitor.is_lost

    @pytest.mark.parametrize("noise", [b"SSH-2.0-OpenSSH\r\n", b'{"what": 1}\n', b"\xff\n", b"x" * (1 << 16)])
    async def test_noise_ends_the_connection(self, qemu: Qemu, monitor: Monitor, noise: bytes) -> None:
        asked = asyncio.create_task(monitor.execute("stop"))
        await qemu.hear()

        with pytest.raises(Unavailable, match="QMP"):
            await both(asked, self._repeat(qemu, noise, asked))

    @staticmethod
    async def _repeat(qemu: Qemu, noise: bytes, asked: "asyncio.Task[Any]") -> None:
        while not asked.done():
            try:
                await qemu.say_bytes(noise)
            except OSError:
                return
            await asyncio.sleep(0)

    async def test_a_qemu_that_does_not_read_is_unavailable(self, qemu: Qemu, monitor: Monitor) -> None:
        del qemu
        why = []
        for _ in range(100):
            with pytest.raises(Unavailable) as raised:
                await monitor.execute("x", {"padding": "x" * 50_000}, timeout_s=0.001)
            why.append(raised.value.message)

        assert "does not read" in why[-1]

    async def test_closing_twice_is_closing(self, monitor: Monitor) -> None:
        monitor.close()
        monitor.close()

        with pytest.raises(Unavailable, match="closed"):
            await monitor.execute("stop")


class TestConnect:
    async def test_needs_a_socket(self, tmp_path: Path) -> None:
        with pytest.raises(Unavailable, match="No such file"):
            await Monitor.connect(tmp_path / "missing", timeout_s=1.0)

    async def test_needs_someone_who_listens(self, qemu: Qemu) -> None:
        qemu.close()

        with pytest.raises(Unavailable, match="refused"):
            await Monitor.connect(qemu.path, timeout_s=1.0)

    async def test_gives_up_on_one_that_does_not_greet(self, qemu: Qemu) -> None:
        with pytest.raises(Unavailable, match="greet"):
            await both(Monitor.connect(qemu.path, timeout_s=0.02), qemu.accept(greet=False))

    async def test_gives_up_on_one_that_hangs_up(self, qemu: Qemu) -> None:
        async def slam() -> None:
            await qemu.accept(greet=False)
            qemu.hang_up()

        with pytest.raises(Unavailable):
            await both(Monitor.connect(qemu.path, timeout_s=5.0), slam())

    async def test_gives_up_on_one_that_is_never_free(self, qemu: Qemu) -> None:
        waiting = []
        for _ in range(3):
            one = socket.socket(socket.AF_UNIX)
            one.setblocking(False)
            one.connect_ex(str(qemu.path))
            waiting.append(one)

        with pytest.raises(Unavailable, match="takes no connection"):
            await Monitor.connect(qemu.path, timeout_s=0.05)

        for one in waiting:
            one.close()

    async def test_is_served_once_the_one_before_has_left(self, qemu: Qemu, monitor: Monitor) -> None:
        connecting = asyncio.create_task(Monitor.connect(qemu.path, timeout_s=5.0))
        monitor.close()
        qemu.hang_up()
        await qemu.accept()

        second = await connecting

        assert await both(second.execute("query-status"), qemu.answer("here")) == "here"
        second.close()
