"""Last words, and that no guest can make them many."""

import base64
import os
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.model.errors import Unavailable
from agentenv.vmm.console import CONSOLE_RING, CONSOLE_RING_BYTES, LOG_BYTES, Console, OutputLog, tail
from agentenv.vmm.qmp import Monitor


@pytest.fixture
def log() -> Iterator[OutputLog]:
    log = OutputLog.create()
    yield log
    log.close()


class TestOutputLog:
    def test_tells_what_a_process_said(self, log: OutputLog) -> None:
        subprocess.run(["sh", "-c", "echo one; echo two >&2"], stdout=log.fileno(), stderr=log.fileno(), check=True)

        assert log.text() == "one\ntwo\n"

    def test_does_not_grow_and_does_not_stop_who_writes(self, log: OutputLog) -> None:
        script = "yes x | head -c 1000000 2>/dev/null; echo ended >/dev/null"

        done = subprocess.run(["sh", "-c", script], stdout=log.fileno(), stderr=log.fileno(), check=False)

        assert done.returncode == 0
        assert os.fstat(log.fileno()).st_size == LOG_BYTES
        assert len(log.text()) <= LOG_BYTES
        assert log.text().startswith("x\nx\n")

    def test_is_found_again_by_the_process_that_writes_to_it(self, log: OutputLog) -> None:
        with subprocess.Popen(
            ["sh", "-c", "echo hello >&2; read line"], stdin=subprocess.PIPE, stderr=log.fileno()
        ) as vmm:
            found = OutputLog.of(vmm.pid)
            assert found is not None
            vmm.communicate(b"\n")

        assert found.text() == "hello\n"
        found.close()

    def test_of_a_process_that_writes_elsewhere_is_none(self) -> None:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as other:
            assert OutputLog.of(other.pid) is None
        assert OutputLog.of(2**22 + 1) is None

    def test_is_empty_once_closed(self, log: OutputLog) -> None:
        os.write(log.fileno(), b"words")
        log.close()
        log.close()

        assert log.text() == ""


class Rings:
    """A monitor that has rings, and nothing else."""

    def __init__(self, *reads: bytes) -> None:
        self.reads = list(reads)

    async def execute(self, command: str, arguments: Mapping[str, Any], *, timeout_s: float) -> object:
        assert command == "ringbuf-read"
        assert timeout_s > 0
        if arguments["device"] != CONSOLE_RING:
            return ""
        if not self.reads:
            raise Unavailable("gone")
        return base64.b64encode(self.reads.pop(0)).decode()


def console(*reads: bytes) -> Console:
    return Console(cast(Monitor, Rings(*reads)))


class TestConsole:
    async def test_keeps_what_it_has_taken(self) -> None:
        guest = console(b"first\n", b"second\n")

        for _ in range(3):
            await guest.drain()

        assert guest.text() == "first\nsecond\n"

    async def test_keeps_no_more_than_a_ring(self) -> None:
        guest = console(*[b"x" * CONSOLE_RING_BYTES] * 3, b"end")

        for _ in range(4):
            await guest.drain()

        assert len(guest.text()) == CONSOLE_RING_BYTES
        assert guest.text().endswith("xend")

    async def test_does_not_mind_what_is_not_text(self) -> None:
        guest = console(b"\xff\x00ok")

        await guest.drain()

        assert guest.text().endswith("ok")


@given(st.text(max_size=60), st.integers(1, 20))
def test_a_tail_is_an_end_and_no_longer_than_asked_for(text: str, limit: int) -> None:
    end = tail(text, limit)

    assert text.endswith(end)
    assert len(end) <= limit
    assert end or not text


def test_a_tail_starts_with_a_whole_line() -> None:
    assert tail("first line\nsecond line\nthird", 20) == "second line\nthird"
    assert tail("short", 20) == "short"
    assert tail("x" * 30, 20) == "x" * 20
