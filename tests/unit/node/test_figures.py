"""What a node tells of its machine, and that telling costs the loop nothing."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentenv.node import figures
from agentenv.node.figures import SAMPLE_EVERY_S, Gauge
from agentenv.testing.clock import JumpingClock
from agentenv.testing.host import FakeHost


def test_a_sample_measures_this_machine() -> None:
    gauge = Gauge()

    gauge.sample()

    assert gauge.memory_total_bytes > gauge.memory_used_bytes > 0
    assert 0 <= gauge.cpu_percent <= 100
    assert gauge.cpu
    assert all(disk.total_bytes >= disk.used_bytes >= 0 for disk in gauge.disks)


def test_a_mount_point_with_blanks_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "a b\\c"
    place.mkdir()
    escaped = str(place).replace("\\", "\\134").replace(" ", "\\040")
    mounts = f"/dev/vdz {escaped} ext4 rw 0 0\n/dev/gone /no/such/place ext4 rw 0 0\nproc /proc proc rw 0 0\n"
    read_text = Path.read_text

    def fake_read_text(self: Path, *args: Any, **kwargs: Any) -> str:
        return mounts if str(self) == "/proc/self/mounts" else read_text(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", fake_read_text)

    (disk,) = figures._disks()

    assert (disk.mount_point, disk.device) == (str(place), "/dev/vdz")


async def test_a_machine_that_cannot_be_measured_once_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, gauge = JumpingClock(), Gauge()
    outcomes: list[Exception | None] = [OSError("no /proc"), ValueError("odd"), KeyError("MemTotal"), None]
    samples = 0

    def sample() -> None:
        nonlocal samples
        samples += 1
        if outcomes and (error := outcomes.pop(0)) is not None:
            raise error

    monkeypatch.setattr(gauge, "sample", sample)
    running = asyncio.create_task(gauge.run(clock))
    for expected in range(1, 5):
        await clock.wait_sleepers(1)
        assert samples == expected
        await clock.advance(SAMPLE_EVERY_S)
    running.cancel()


async def test_info_reads_no_file(fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> str:
        raise AssertionError("a file was read on the loop")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", refuse)
        patched.setattr(Path, "open", refuse)
        info = fake.node.info()

    assert info.id == "node"
