"""Ctrl-C and the shell: what a person at a terminal does, against an agent behind the proxy."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.unit.cli.world import WAIT_S, Terminal, World, started

pytestmark = pytest.mark.slow


@pytest.fixture
def sandbox(world: World) -> str:
    return world.node.add_sandbox().id


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_ctrl_c_asks_the_command_to_end_and_the_second_one_kills_it(world: World, aenv: Terminal, sandbox: str) -> None:
    with started(
        aenv.command("exec", sandbox, "stubborn"), env=aenv.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"on\n"
        child.send_signal(signal.SIGINT)
        wait_until(lambda: world.agent.signals == ["SIGNAL_SIGTERM"])
        assert child.poll() is None, "it waits for what the command does about it"
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=WAIT_S)

    assert world.agent.signals == ["SIGNAL_SIGTERM", "SIGNAL_SIGKILL"]
    assert (child.returncode, said) == (137, b"")


def test_ctrl_c_before_the_command_has_started_ends_us(world: World, aenv: Terminal, sandbox: str) -> None:
    with started(
        aenv.command("exec", sandbox, "mute"), env=aenv.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        wait_until(lambda: bool(world.agent.started))
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=WAIT_S)

    assert child.returncode == 130
    assert b"Traceback" not in said
    assert world.agent.signals == []


@dataclass(slots=True)
class Shell:
    """`aenv shell` on a terminal whose far end is ours."""

    child: "subprocess.Popen[bytes]"
    end: int
    terminal: int
    seen: bytes = b""

    def type(self, keys: bytes) -> None:
        os.write(self.end, keys)

    def wait_seen(self, text: bytes) -> None:
        while text not in self.seen:
            self.seen += os.read(self.end, 65536)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.child.send_signal(signal.SIGWINCH)  # the kernel tells the group in the foreground, which it is not here

    def is_cooked(self) -> bool:
        return bool(termios.tcgetattr(self.terminal)[3] & termios.ICANON)


@contextmanager
def shell(aenv: Terminal, *arguments: str) -> Iterator[Shell]:
    end, terminal = pty.openpty()
    environment = {**aenv.environment, "TERM": "vt220"}
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    try:
        with started(
            aenv.command("shell", *arguments), env=environment, stdin=terminal, stdout=terminal, stderr=terminal
        ) as child:
            yield (opened := Shell(child, end, terminal))
            if opened.child.poll() is None:
                opened.child.kill()
    finally:
        os.close(end)
        os.close(terminal)


def test_a_shell_gets_every_key_and_its_terminal_s_size(world: World, aenv: Terminal, sandbox: str) -> None:
    with shell(aenv, "--user", "root", "--shell", "/bin/zsh", sandbox) as opened:
        opened.wait_seen(b"ready\r\n")
        assert not opened.is_cooked()
        opened.type(b"a\r")
        opened.wait_seen(b"typed 610d\r\n")
        opened.type(b"\x03")  # Ctrl-C is a key for the shell, and not for us
        opened.wait_seen(b"typed 03\r\n")
        opened.resize(132, 43)
        wait_until(lambda: world.agent.sizes[-1] == {"cols": 132, "rows": 43})
        opened.type(b"\x04")
        assert opened.child.wait(WAIT_S) == 0
        assert opened.is_cooked()

    assert world.agent.sizes[0] == {"cols": 80, "rows": 24}
    (started,) = world.agent.started
    assert started["process"] == {"cmd": "/bin/zsh", "args": ["-i", "-l"], "envs": {"TERM": "vt220"}}
    assert world.agent.signals == []
    assert re.fullmatch(rb"ready\r\ntyped 610d\r\ntyped 03\r\n", opened.seen)


def test_what_is_typed_before_the_shell_is_there_is_not_lost(aenv: Terminal, sandbox: str) -> None:
    with shell(aenv, sandbox) as opened:
        opened.type(b"early\n")
        opened.wait_seen(b"typed 6561726c790a\r\n")
        opened.type(b"\x04")
        assert opened.child.wait(WAIT_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_shell_that_is_ended_gives_the_terminal_back_and_leaves_no_shell(
    world: World, aenv: Terminal, sandbox: str, number: signal.Signals
) -> None:
    with shell(aenv, sandbox) as opened:
        opened.wait_seen(b"ready\r\n")
        assert not opened.is_cooked()
        opened.child.send_signal(number)
        assert opened.child.wait(WAIT_S) == 128 + number
        assert opened.is_cooked()

    assert world.agent.signals == ["SIGNAL_SIGKILL"]
