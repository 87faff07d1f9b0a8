"""Captures of real processes: what was read from outside is what the process sees."""

import ctypes
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv.model.errors import Bug, Unavailable
from agentenv.storage import capture as capturing
from agentenv.storage import transfer
from agentenv.storage.capture import Image, apply_delta, capture_delta, capture_flat, fill, zero_pages
from agentenv.storage.files import new_file, open_sealed
from agentenv.storage.pages import read_delta
from agentenv.storage.transfer import Buffer, Process
from agentenv.storage.workers import Abort, Aborted
from tests.unit.storage.memory_guest import MAP_SHARED, PAGE, MemoryGuest

MIB = 1 << 20
SIZE = 12 * MIB
MADV_HUGEPAGE, MADV_PAGEOUT = 14, 21


def never() -> None:
    """Nobody asks to stop."""


@pytest.fixture
def image(tmp_path: Path) -> Image:
    path = tmp_path / "image"
    path.write_bytes(random.Random(0).randbytes(3 * MIB))
    os.truncate(path, SIZE)
    return Image(path, SIZE)


@pytest.fixture
def blank(tmp_path: Path) -> Image:
    path = tmp_path / "blank"
    path.touch()
    os.truncate(path, SIZE)
    return Image(path, SIZE)


def delta_of(guest: MemoryGuest, image: Image, target: Path) -> Path:
    with new_file(target) as fd:
        capture_delta(guest.pid, image, "base", fd, never)
    return target


def filled(guest: MemoryGuest, image: Image, delta: Path, workers: int = 1) -> None:
    with open_sealed(delta) as fd:
        for worker in range(workers):
            fill(guest.pid, image, fd, read_delta(fd), never, worker=worker, workers=workers)


def scribble(guest: MemoryGuest, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        data = rng.choice([rng.randbytes(3000), bytes(PAGE * rng.randrange(1, 5)), b"x" * rng.randrange(1, 60_000)])
        guest.write(rng.randrange(SIZE - len(data) - PAGE) // PAGE * PAGE + rng.choice([0, 77]), data)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pieces", [(0,), (4 * MIB, 0), (PAGE, 5 * MIB, 3 * PAGE, 0)], ids=["one", "two", "four"])
def test_a_delta_brings_a_new_process_to_the_same_memory(
    image: Image, tmp_path: Path, seed: int, pieces: tuple[int, ...]
) -> None:
    with MemoryGuest(image.path, pieces=pieces) as guest, MemoryGuest(image.path, pieces=(7 * MIB, 0)) as other:
        scribble(guest, seed)
        before = guest.read(0, SIZE)
        delta = delta_of(guest, image, tmp_path / "delta")
        filled(other, image, delta, workers=1 + seed % 3)
        assert other.read(0, SIZE) == before
        assert guest.read(0, SIZE) == before


def test_a_delta_over_its_base_is_the_same_memory(image: Image, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    with MemoryGuest(image.path) as guest:
        scribble(guest, 1)
        with open_sealed(delta_of(guest, image, tmp_path / "delta")) as changes, new_file(flat) as fd:
            os.write(fd, image.path.read_bytes())
            apply_delta(changes, read_delta(changes), fd, never)
        assert flat.read_bytes() == guest.read(0, SIZE)


def test_what_was_filled_is_captured_again(image: Image, tmp_path: Path) -> None:
    with MemoryGuest(image.path) as guest, MemoryGuest(image.path) as second, MemoryGuest(image.path) as third:
        guest.write(5 * MIB, b"first")
        filled(second, image, delta_of(guest, image, tmp_path / "1"))
        second.write(6 * MIB, b"second")
        filled(third, image, delta_of(second, image, tmp_path / "2"))
        assert third.read(5 * MIB, 5) + third.read(6 * MIB, 6) == b"firstsecond"


def test_zero_pages_take_no_room(image: Image, tmp_path: Path) -> None:
    with MemoryGuest(image.path) as guest, MemoryGuest(image.path) as other:
        guest.write(0, bytes(2 * MIB))
        delta = delta_of(guest, image, tmp_path / "delta")
        assert delta.stat().st_size < 2 * PAGE
        filled(other, image, delta)
        assert other.read(0, 2 * MIB) == bytes(2 * MIB)


def test_nothing_changed_is_no_change(image: Image, tmp_path: Path) -> None:
    with MemoryGuest(image.path) as guest, new_file(tmp_path / "delta") as fd:
        guest.touch(0, SIZE)
        assert not capture_delta(guest.pid, image, "base", fd, never).is_change


def test_a_flat_capture_is_all_of_memory_with_holes_for_zeros(blank: Image, tmp_path: Path) -> None:
    with MemoryGuest(blank.path) as guest, new_file(tmp_path / "flat") as fd:
        guest.write(MIB, b"x" * 10 * PAGE)
        guest.write(2 * MIB, bytes(MIB))
        guest.write(SIZE - 1, b"z")
        capture_flat(guest.pid, blank, fd, never)
        assert (tmp_path / "flat").read_bytes() == guest.read(0, SIZE)
        assert (tmp_path / "flat").stat().st_blocks * 512 <= 16 * PAGE


@pytest.mark.parametrize(("start", "length"), [(0, MIB), (MIB, 2 * MIB), (SIZE - MIB, MIB), (0, SIZE - PAGE)], ids=str)
def test_memory_that_a_balloon_took_is_zero(image: Image, tmp_path: Path, start: int, length: int) -> None:
    with MemoryGuest(image.path) as guest, MemoryGuest(image.path) as other:
        guest.write(start, b"before" * 1000)
        guest.drop(start, length)
        guest.write(start + 8 * PAGE, b"after")
        expected = guest.read(0, SIZE)
        assert expected[start : start + 8 * PAGE] == bytes(8 * PAGE)
        filled(other, image, delta_of(guest, image, tmp_path / "delta"))
        assert other.read(0, SIZE) == expected


def test_huge_pages_are_captured(image: Image, tmp_path: Path) -> None:
    with MemoryGuest(image.path) as guest, MemoryGuest(image.path) as other:
        guest.drop(0, SIZE - MIB)
        guest.advise(0, SIZE - MIB, MADV_HUGEPAGE)
        scribble(guest, 3)
        filled(other, image, delta_of(guest, image, tmp_path / "delta"))
        assert other.read(0, SIZE) == guest.read(0, SIZE)


def test_swapped_pages_are_captured(image: Image, tmp_path: Path) -> None:
    with MemoryGuest(image.path) as guest, MemoryGuest(image.path) as other:
        scribble(guest, 4)
        expected = guest.read(0, SIZE)
        guest.advise(0, SIZE, MADV_PAGEOUT)  # without swap space they just stay
        filled(other, image, delta_of(guest, image, tmp_path / "delta"))
        assert other.read(0, SIZE) == expected


def test_an_image_that_was_removed_meanwhile_is_still_captured(image: Image, tmp_path: Path) -> None:
    with MemoryGuest(image.path) as guest:
        guest.write(0, b"x")
        image.path.unlink()
        with open_sealed(delta_of(guest, image, tmp_path / "delta")) as fd:
            assert read_delta(fd).data == ((0, 1),)


def test_a_shared_mapping_is_refused(image: Image, tmp_path: Path) -> None:
    with MemoryGuest(image.path, flags=MAP_SHARED) as guest, pytest.raises(Bug, match="shared"):
        delta_of(guest, image, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_a_process_without_the_image_is_unavailable(image: Image, tmp_path: Path) -> None:
    with pytest.raises(Unavailable), new_file(tmp_path / "delta") as fd:
        capture_delta(os.getpid(), image, "base", fd, never)


@pytest.mark.parametrize("pid", [0, -1, 1 << 22, 1 << 31])
def test_a_pid_that_cannot_be_is_unavailable(image: Image, tmp_path: Path, pid: int) -> None:
    with pytest.raises(Unavailable), new_file(tmp_path / "delta") as fd:
        capture_delta(pid, image, "base", fd, never)


def test_a_process_that_is_not_reaped_yet_is_unavailable(image: Image, tmp_path: Path) -> None:
    with MemoryGuest(image.path) as guest:
        guest.write(0, b"x")
        os.kill(guest.pid, signal.SIGKILL)
        os.waitid(os.P_PID, guest.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(Unavailable):
            delta_of(guest, image, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


@pytest.mark.parametrize("step", range(6))
def test_a_process_that_dies_in_the_middle_leaves_nothing(image: Image, tmp_path: Path, step: int) -> None:
    steps = 0
    with MemoryGuest(image.path) as guest:
        guest.write(0, b"x" * 6 * MIB)

        def check() -> None:
            nonlocal steps
            if steps == step:
                guest.kill()
            steps += 1

        with pytest.raises(Unavailable), new_file(tmp_path / "delta") as fd:
            capture_delta(guest.pid, image, "base", fd, check)
    assert not (tmp_path / "delta").exists()


def test_a_process_that_dies_after_the_last_read_is_noticed(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its pid could be someone else's by then, and what was read theirs.
    with MemoryGuest(image.path) as guest:
        guest.write(0, b"x")
        passed_on = capturing._pass_on

        def kill_then_pass_on(*arguments: object) -> None:
            guest.kill()
            passed_on(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(capturing, "_pass_on", kill_then_pass_on)
        with pytest.raises(Unavailable, match="has ended"):
            delta_of(guest, image, tmp_path / "delta")


def test_a_capture_that_nobody_wants_stops(image: Image, tmp_path: Path) -> None:
    abort = Abort()
    abort.ask()
    with MemoryGuest(image.path) as guest:
        guest.write(0, b"x")
        with pytest.raises(Aborted), new_file(tmp_path / "delta") as fd:
            capture_delta(guest.pid, image, "base", fd, abort)


def test_a_damaged_delta_never_reaches_a_process(image: Image, tmp_path: Path) -> None:
    with MemoryGuest(image.path) as guest, MemoryGuest(image.path) as other:
        guest.write(4 * MIB, b"x" * PAGE)
        delta = delta_of(guest, image, tmp_path / "delta")
        with delta.open("r+b") as file:
            file.seek(PAGE + 100)
            file.write(b"y")
        with pytest.raises(Bug, match="damaged"):
            filled(other, image, delta)
        assert other.read(4 * MIB, PAGE) == bytes(PAGE)


def test_a_delta_of_another_size_is_refused(image: Image, tmp_path: Path) -> None:
    with MemoryGuest(image.path) as guest:
        guest.write(0, b"x")
        delta = delta_of(guest, image, tmp_path / "delta")
        with pytest.raises(Bug, match="do not fit"):
            filled(guest, Image(image.path, SIZE - PAGE), delta)


def test_filling_a_process_that_is_gone_is_unavailable(image: Image, tmp_path: Path) -> None:
    with MemoryGuest(image.path) as guest:
        guest.write(0, b"x" * PAGE)
        delta = delta_of(guest, image, tmp_path / "delta")
    with pytest.raises(Unavailable):
        filled(guest, image, delta)


def test_reads_do_not_hold_up_other_threads(image: Image) -> None:
    """The heavy calls let go of the interpreter: others run while one process reads for long."""
    done = threading.Event()
    turns = 0

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1

    with MemoryGuest(image.path) as guest, Process(guest.pid) as process:
        (area,) = process.areas(image.path, SIZE)
        buffer = Buffer(SIZE)
        counter = threading.Thread(target=count)
        counter.start()
        for _ in range(50):
            process.read([(area.start, area.end)], buffer)
        done.set()
        counter.join()
    assert turns > 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (bytes(PAGE), [0]),
        (b"x" + bytes(PAGE - 1), []),
        (bytes(PAGE - 1) + b"x", []),
        (bytes(1000) + b"x" + bytes(PAGE - 1001), []),
        (bytes(2048) + b"x" + bytes(PAGE - 2049), []),
        (b"x" * PAGE + bytes(2 * PAGE) + b"y" * PAGE + bytes(PAGE), [1, 2, 4]),
    ],
)
def test_zero_pages_are_found(content: bytes, expected: list[int]) -> None:
    assert zero_pages(memoryview(content)) == expected


@pytest.mark.parametrize("moved", [1, PAGE, PAGE + 1, 3 * PAGE - 1])
def test_a_partial_transfer_goes_on_where_it_stopped(image: Image, monkeypatch: pytest.MonkeyPatch, moved: int) -> None:
    with MemoryGuest(image.path) as guest, Process(guest.pid) as process:
        guest.write(0, random.Random(5).randbytes(8 * PAGE))
        (area,) = process.areas(image.path, SIZE)
        pieces = [(area.start, area.start + 2 * PAGE), (area.start + 3 * PAGE, area.start + 4 * PAGE)]
        whole: Callable[..., int] = transfer._libc.process_vm_readv

        class Short:
            calls = 0

            def process_vm_readv(self, pid: int, local: int, count: int, remote: int, pieces: int, flags: int) -> int:
                Short.calls += 1
                if Short.calls == 1:
                    words = (ctypes.c_uint64 * 2).from_address(local)
                    words[1] = moved
                return whole(pid, local, count, remote, pieces, flags)

        monkeypatch.setattr(transfer, "_libc", Short())
        buffer = Buffer(4 * PAGE)
        assert process.read(pieces, buffer) == 3 * PAGE
        assert bytes(buffer.view[: 3 * PAGE]) == guest.read(0, 2 * PAGE) + guest.read(3 * PAGE, PAGE)
        assert Short.calls == 2
