"""Headers and tables against QEMU's own tools, and against damage."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentenv.model.errors import Bug, Invalid
from agentenv.model.machine import BlockTarget
from agentenv.storage.files import new_file, open_sealed
from agentenv.storage.qcow2 import (
    CLUSTER_BYTES,
    Backing,
    holds_data,
    plan_layout,
    read_header,
    rename_backing,
    write_empty,
)
from tests.unit.storage.disk_guest import GuestDisk

MIB = 1 << 20
GIB = 1 << 30


def make(path: Path, size: int, backing: Backing | None = None) -> Path:
    with new_file(path) as fd:
        write_empty(fd, size, backing)
    return path


def qemu_img(*arguments: str | Path) -> str:
    done = subprocess.run(["qemu-img", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.needs("qemu-img")
@pytest.mark.parametrize("size", [512, 65536, 65537 * 512, 2 * GIB, 512 * MIB + 512, 5 * (1 << 40), 64 << 40])
def test_qemu_finds_nothing_wrong_with_an_empty_disk(tmp_path: Path, size: int) -> None:
    path = make(tmp_path / "disk.qcow2", size)
    check = json.loads(qemu_img("check", "--output=json", "-f", "qcow2", path))
    assert check["check-errors"] == 0
    assert {"leaks", "corruptions"}.isdisjoint(check)
    info = json.loads(qemu_img("info", "--output=json", path))
    assert info["virtual-size"] == size
    assert info["format-specific"]["data"]["compat"] == "1.1"
    assert info["format-specific"]["data"]["lazy-refcounts"] is False
    assert path.stat().st_blocks * 512 <= 32 << 10


@pytest.mark.needs("qemu-img")
def test_qemu_follows_the_chain_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base.raw").write_bytes(b"\x11" * 3 * MIB)
    make(tmp_path / "a.qcow2", 3 * MIB, Backing("base.raw", "raw"))
    make(tmp_path / "b.qcow2", 3 * MIB, Backing("a.qcow2", "qcow2"))
    monkeypatch.chdir("/")
    chain = json.loads(qemu_img("info", "--backing-chain", "--output=json", tmp_path / "b.qcow2"))
    assert [layer.get("backing-filename-format") for layer in chain] == ["qcow2", "raw", None]
    flat = tmp_path / "flat"
    qemu_img("convert", "-O", "raw", tmp_path / "b.qcow2", flat)
    assert flat.read_bytes() == b"\x11" * 3 * MIB


@pytest.mark.needs("qemu-img", "qemu-io")
def test_qemu_writes_to_an_overlay_of_ours(tmp_path: Path) -> None:
    (tmp_path / "base.raw").write_bytes(b"\x11" * MIB)
    path = make(tmp_path / "a.qcow2", MIB, Backing("base.raw", "raw"))
    writes = ["write -P 0x22 70000 100", "write -z 196608 65536", "discard 262144 65536"]
    subprocess.run(
        ["qemu-io", "-f", "qcow2", *(f"-c{write}" for write in writes), path], check=True, capture_output=True
    )
    disk = GuestDisk(BlockTarget(path, "qcow2"))
    assert disk.read(69999, 102) == b"\x11" + b"\x22" * 100 + b"\x11"
    assert disk.read(196608, 65536) == bytes(65536)
    with open_sealed(path) as fd:
        assert holds_data(fd)
        assert read_header(fd).backing == Backing("base.raw", "raw")


@pytest.mark.needs("qemu-img")
def test_the_test_guest_writes_what_qemu_reads(tmp_path: Path) -> None:
    (tmp_path / "base.raw").write_bytes(b"\x11" * 2 * MIB)
    disk = GuestDisk(BlockTarget(make(tmp_path / "a.qcow2", 2 * MIB, Backing("base.raw", "raw")), "qcow2"))
    disk.write(65536 * 3 - 10, b"\x33" * 70000)
    assert "No errors were found" in qemu_img("check", "-f", "qcow2", disk.target.path)
    qemu_img("convert", "-O", "raw", disk.target.path, tmp_path / "flat")
    assert (tmp_path / "flat").read_bytes() == disk.read(0, 2 * MIB)


@pytest.mark.parametrize("size", [0, -512, 511, 513, (64 << 40) + 512])
def test_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(Invalid):
        plan_layout(size, 0)


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 24))
def test_every_cluster_has_a_reference_count(sectors: int, body: int) -> None:
    layout = plan_layout(sectors * 512, body)
    assert layout.refcount_blocks * (CLUSTER_BYTES // 2) >= layout.clusters
    assert layout.refcount_table_clusters * (CLUSTER_BYTES // 8) >= layout.refcount_blocks


def test_a_backing_file_can_be_renamed_in_place(tmp_path: Path) -> None:
    path = make(tmp_path / "a.qcow2", MIB, Backing("0000.qcow2", "qcow2"))
    fd = os.open(path, os.O_RDWR)
    try:
        before = os.pread(fd, CLUSTER_BYTES, 0)
        assert rename_backing(fd, "1111.qcow2")
        after = os.pread(fd, CLUSTER_BYTES, 0)
        assert read_header(fd).backing == Backing("1111.qcow2", "qcow2")
        changed = [at for at in range(len(before)) if before[at] != after[at]]
        assert changed[0] // 512 == changed[-1] // 512, "a power failure could leave half of each name"
        assert not rename_backing(fd, "longer.qcow2")
        assert os.pread(fd, CLUSTER_BYTES, 0) == after
    finally:
        os.close(fd)


@pytest.mark.parametrize("name", ["../up.raw", "a/b", "json:{}", "nbd:x", ""])
def test_a_backing_name_cannot_lead_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(Bug):
        make(tmp_path / "a.qcow2", MIB, Backing(name, "raw"))
    assert list(tmp_path.iterdir()) == []


def test_an_empty_disk_holds_nothing_and_a_written_one_does(tmp_path: Path) -> None:
    path = make(tmp_path / "a.qcow2", 1 << 40)
    with open_sealed(path) as fd:
        assert not holds_data(fd)
    GuestDisk(BlockTarget(path, "qcow2")).write((1 << 40) - 512, b"x")
    with open_sealed(path) as fd:
        assert holds_data(fd)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = make(tmp_path_factory.mktemp("sound") / "a.qcow2", GIB, Backing("base.raw", "raw"))
    return path.read_bytes()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=4),
    st.sampled_from([0, 3, 100, 104, 600, 1 << 20]),
)
@example([(40, 0x80)], 1 << 20)  # a table further on than any offset can say
def test_a_damaged_header_is_noticed_or_harmless(sound: bytes, damages: list[tuple[int, int]], length: int) -> None:
    damaged = bytearray(sound)
    for at, value in damages:
        damaged[at] = value
    fd = os.memfd_create("damaged")
    try:
        os.pwrite(fd, damaged[:length], 0)
        try:
            header = read_header(fd)
            holds_data(fd)
        except Bug:
            return
        assert header.size_bytes <= 64 << 40
    finally:
        os.close(fd)
