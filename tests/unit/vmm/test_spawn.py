"""How a VMM's process is started: where it lives, and what it gets of ours."""

import asyncio
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agentenv.model.errors import NotFound, Unavailable, Unsupported
from agentenv.vmm.process import Process, is_alive
from agentenv.vmm.spawn import FIRST_INHERITED, Spawner, Started, inside

SH = "/bin/sh"


@pytest.fixture
async def spawner() -> AsyncIterator[Spawner]:
    spawner = Spawner(oom_score_adj=700)
    yield spawner
    await asyncio.to_thread(spawner.close)


async def run(spawner: Spawner, script: str, *inherit: int, netns: Path | None = None) -> str:
    """Run a shell script to its end and return what it printed."""
    with tempfile.TemporaryFile() as output:
        started = await spawner.spawn([SH, "-c", script], netns=netns, output=output.fileno(), inherit=inherit)
        await Process(started.identity, pidfd=started.pidfd).wait()
        output.seek(0)
        return output.read().decode()


async def start_waiting(spawner: Spawner, read_end: int) -> Started:
    """Start a program that lives until the other end of a pipe is closed."""
    with tempfile.TemporaryFile() as output:
        return await spawner.spawn(
            ["/bin/sh", "-c", "read line <&3; true"], netns=None, output=output.fileno(), inherit=[read_end]
        )


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe2(os.O_CLOEXEC)
    yield ends
    for end in ends:
        with suppress(OSError):
            os.close(end)


async def test_output_and_error_go_to_one_place(spawner: Spawner) -> None:
    assert await run(spawner, "echo out; echo error >&2") == "out\nerror\n"


async def test_input_is_empty(spawner: Spawner) -> None:
    assert await run(spawner, "cat; echo done") == "done\n"


async def test_a_program_leads_a_session_of_its_own(spawner: Spawner) -> None:
    session, pid = (await run(spawner, "cut -d' ' -f6 /proc/$$/stat; echo $$")).split()

    assert session == pid


async def test_descriptors_become_what_was_asked_for_whatever_they_were(spawner: Spawner) -> None:
    """The second is moved to the number that the first has here, and the other way round."""
    with tempfile.TemporaryFile() as low, tempfile.TemporaryFile() as high:
        low.write(b"low")
        high.write(b"high")
        for file in (low, high):
            file.seek(0)
        first, second = os.dup2(low.fileno(), FIRST_INHERITED + 1 + 50), os.dup2(high.fileno(), FIRST_INHERITED + 50)
        try:
            script = "cat /proc/self/fd/3; echo; cat /proc/self/fd/4"
            assert await run(spawner, script, first, second) == "low\nhigh"
        finally:
            os.close(first)
            os.close(second)


async def test_nothing_else_is_inherited(spawner: Spawner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_API_KEY", "secret")

    with tempfile.TemporaryFile() as held:
        os.set_inheritable(held.fileno(), True)

        seen = await run(spawner, "exec ls /proc/self/fd")
        environment = await run(spawner, "env")

    assert "secret" not in environment
    descriptors = seen.split()
    assert descriptors == ["0", "1", "2", "3"]  # the last is the directory that is listed


async def test_signals_are_as_a_program_expects_them(spawner: Spawner) -> None:
    """Python ignores SIGPIPE, and an ignored signal stays ignored over exec."""
    status = await run(spawner, "grep -E '^Sig(Blk|Ign)' /proc/self/status")

    masks = {line.split(":")[0]: int(line.split()[1], 16) for line in status.splitlines()}
    assert masks["SigBlk"] == 0
    assert not masks["SigIgn"] >> (signal.SIGPIPE - 1) & 1


async def test_it_leaves_no_core_with_guest_memory_in_it(spawner: Spawner, pipe: tuple[int, int]) -> None:
    started = await start_waiting(spawner, pipe[0])

    assert resource.prlimit(started.identity.pid, resource.RLIMIT_CORE) == (0, 0)
    process = Process(started.identity, pidfd=started.pidfd)
    process.kill()
    await process.wait()


async def test_the_kernel_kills_it_before_the_server(spawner: Spawner, pipe: tuple[int, int]) -> None:
    started = await start_waiting(spawner, pipe[0])

    assert Path(f"/proc/{started.identity.pid}/oom_score_adj").read_text().strip() == "700"
    process = Process(started.identity, pidfd=started.pidfd)
    process.kill()
    await process.wait()


async def test_a_program_that_is_missing_is_unsupported(spawner: Spawner, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a program")
    for program in ("/nonexistent/program", str(tmp_path), str(text)):
        with pytest.raises(Unsupported):
            await spawner.spawn([program], netns=None, output=2)


async def test_a_namespace_that_is_missing_is_not_found(spawner: Spawner) -> None:
    with pytest.raises(NotFound):
        await spawner.spawn([SH, "-c", "true"], netns=Path("/nonexistent/netns"), output=2)


async def test_an_interface_that_is_missing_is_not_found(spawner: Spawner) -> None:
    with pytest.raises(NotFound):
        await spawner.spawn([SH, "-c", "true"], netns=None, output=2, interface="no-such-tap")


async def test_a_start_that_nobody_waits_for_any_more_is_undone(spawner: Spawner, pipe: tuple[int, int]) -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    starting = [asyncio.create_task(start_waiting(spawner, pipe[0])) for _ in range(8)]
    await asyncio.sleep(0)

    for task in starting:
        task.cancel()
    await asyncio.wait(starting)
    await asyncio.to_thread(spawner.close)

    assert all(task.cancelled() for task in starting)
    assert [pid for pid in children.read_text().split() if "read line" in command_of(pid)] == []


def command_of(pid: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


async def test_a_start_that_nobody_waits_for_does_not_touch_descriptors_that_were_closed(spawner: Spawner) -> None:
    """The caller closes its own as soon as it is cancelled; another file may have their numbers by then."""
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    async def start() -> None:
        with tempfile.TemporaryFile() as output:
            await spawner.spawn(["/bin/true"], netns=None, output=output.fileno(), inherit=[output.fileno()])

    starting = [asyncio.create_task(start()) for _ in range(30)]
    await asyncio.sleep(0)
    for task in starting:
        task.cancel()
    await asyncio.wait(starting)
    await asyncio.to_thread(spawner.close)
    await asyncio.sleep(0)

    assert failures == []
    with pytest.raises(Unavailable):
        await spawner.spawn(["/bin/true"], netns=None, output=2)


async def test_a_program_outlives_the_spawner(pipe: tuple[int, int]) -> None:
    spawner = Spawner()
    started = await start_waiting(spawner, pipe[0])

    await asyncio.to_thread(spawner.close)

    assert is_alive(started.identity)
    process = Process(started.identity, pidfd=started.pidfd)
    os.close(pipe[1])
    assert await process.wait() == 0


@pytest.fixture
def netns(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "netns"
    path.touch()
    subprocess.run(["unshare", "--net", "mount", "--bind", "/proc/self/ns/net", path], check=True)
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


@pytest.mark.needs("root", "netns", "mount")
async def test_a_program_starts_in_its_namespace_and_the_server_stays_in_its_own(spawner: Spawner, netns: Path) -> None:
    ours = Path("/proc/self/ns/net").stat().st_ino

    inside_it, outside = await asyncio.gather(
        run(spawner, "stat -Lc %i /proc/self/ns/net", netns=netns), run(spawner, "stat -Lc %i /proc/self/ns/net")
    )

    assert int(inside_it) == netns.stat().st_ino != ours
    assert int(outside) == ours
    for task in Path("/proc/self/task").iterdir():
        assert (task / "ns/net").stat().st_ino == ours


@pytest.mark.needs("root", "netns", "mount")
async def test_a_thread_comes_back_from_a_namespace_after_an_error(spawner: Spawner, netns: Path) -> None:
    ours = Path("/proc/self/ns/net").stat().st_ino

    def enter_and_fail() -> None:
        with inside(netns):
            assert Path("/proc/thread-self/ns/net").stat().st_ino == netns.stat().st_ino
            raise KeyError("inside")

    with pytest.raises(KeyError):
        await asyncio.to_thread(enter_and_fail)
    with pytest.raises(Unsupported):
        await spawner.spawn(["/nonexistent/program"], netns=netns, output=2)

    for task in Path("/proc/self/task").iterdir():
        assert (task / "ns/net").stat().st_ino == ours
