"""Processes of the host: told apart, watched, ended."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from agentenv.model.errors import NotFound, Unavailable
from agentenv.model.machine import ProcessIdentity
from agentenv.vmm.process import Process, is_alive, kill_all, open_pidfd, read_identity, read_start_time


def identity_of(pid: int) -> ProcessIdentity:
    identity = read_identity(pid)
    assert identity is not None
    return identity


@pytest.fixture
def child() -> Iterator[ProcessIdentity]:
    """A child that does nothing until it is told to end: its standard input closes."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    yield identity_of(child.pid)
    child.kill()
    child.wait()
    assert child.stdin is not None
    child.stdin.close()


@pytest.fixture
def stranger() -> Iterator[ProcessIdentity]:
    """A process that is not our child: started by one that has ended."""
    script = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    identity = identity_of(int(done.stdout))
    yield identity
    kill_all([identity], timeout_s=10.0)


class TestIdentity:
    def test_is_that_of_the_process(self) -> None:
        mine = identity_of(os.getpid())

        assert mine.pid == os.getpid()
        assert is_alive(mine)
        assert not is_alive(replace(mine, start_time=mine.start_time + 1))

    def test_of_no_process_is_none(self) -> None:
        assert read_identity(2**22 + 1) is None
        assert read_start_time(2**22 + 1) is None

    def test_of_a_zombie_is_none(self) -> None:
        zombie = subprocess.Popen(["true"])
        pidfd = os.pidfd_open(zombie.pid)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        os.close(pidfd)

        assert read_identity(zombie.pid) is None
        found = read_start_time(zombie.pid)
        assert found is not None
        assert found[1] is False
        zombie.wait()

    def test_does_not_mind_a_strange_name(self) -> None:
        script = "import ctypes; ctypes.CDLL(None).prctl(15, b') R 1 (x'); print(flush=True); input()"
        with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as named:
            assert named.stdout is not None
            named.stdout.readline()

            started = read_start_time(named.pid)
            mine = read_start_time(os.getpid())
            named.kill()

        assert started is not None
        assert mine is not None
        assert started[0] >= mine[0]

    def test_a_pidfd_is_opened_of_that_very_process_only(self, child: ProcessIdentity) -> None:
        os.close(open_pidfd(child))

        with pytest.raises(NotFound):
            open_pidfd(replace(child, start_time=child.start_time - 1))


class TestProcess:
    async def test_everyone_who_waits_learns_how_it_ended(self, child: ProcessIdentity) -> None:
        process = Process(child)
        waiting = [asyncio.create_task(process.wait()) for _ in range(3)]

        process.kill()

        assert await asyncio.gather(*waiting) == [-signal.SIGKILL] * 3
        assert await process.wait() == -signal.SIGKILL

    async def test_an_exit_status_is_told(self) -> None:
        child = subprocess.Popen(["sh", "-c", "read line; exit 7"], stdin=subprocess.PIPE)
        process = Process(identity_of(child.pid))
        assert child.stdin is not None
        child.stdin.close()

        assert await process.wait() == 7
        child.returncode = 7  # reaped by us

    async def test_the_status_of_a_stranger_is_not_known(self, stranger: ProcessIdentity) -> None:
        process = Process(stranger)

        process.kill()

        assert await process.wait() is None
        assert not is_alive(stranger)

    async def test_a_stopped_process_can_be_killed(self, child: ProcessIdentity) -> None:
        os.kill(child.pid, signal.SIGSTOP)
        process = Process(child)

        process.kill()

        assert await process.wait() == -signal.SIGKILL

    async def test_whoever_wants_to_be_called_is_called_once(self, child: ProcessIdentity) -> None:
        process, called = Process(child), []
        process.on_end(lambda: called.append("before"))

        process.kill()
        await process.wait()
        process.on_end(lambda: called.append("after"))
        process.kill()

        assert called == ["before", "after"]

    async def test_letting_go_leaves_it_alive_and_wakes_who_waits(self, child: ProcessIdentity) -> None:
        process = Process(child)
        waiting = asyncio.create_task(process.wait())
        await asyncio.sleep(0)

        process.close()
        process.close()
        process.kill()

        with pytest.raises(Unavailable):
            await waiting
        assert is_alive(child)

    async def test_only_that_very_process_is_watched(self, child: ProcessIdentity) -> None:
        with pytest.raises(NotFound):
            Process(replace(child, start_time=child.start_time + 1))


class TestKillAll:
    def test_ends_children_and_strangers(self, child: ProcessIdentity, stranger: ProcessIdentity) -> None:
        assert kill_all([child, stranger], timeout_s=10.0) == []
        assert not is_alive(child)
        assert not is_alive(stranger)

    def test_passes_over_those_that_are_gone(self, child: ProcessIdentity) -> None:
        other = replace(child, start_time=child.start_time + 1)

        assert kill_all([other], timeout_s=10.0) == []
        assert is_alive(child)

    def test_tells_which_outlast_the_time(self, child: ProcessIdentity) -> None:
        assert kill_all([child], timeout_s=0.0) == [child]
