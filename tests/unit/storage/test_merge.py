"""Merged layers hold what their chain showed."""

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentenv.model.errors import Bug, Unsupported
from agentenv.model.machine import BlockTarget
from agentenv.storage.files import new_file, open_sealed
from agentenv.storage.merge import merge
from agentenv.storage.qcow2 import Backing, write_empty
from agentenv.storage.workers import Abort, Aborted
from tests.unit.storage.disk_guest import CLUSTER, GuestDisk, write_zero_cluster

MIB = 1 << 20
SIZE = 1200 * MIB + 512  # three second-level tables, and an end inside a cluster
SPOTS = [*range(12), 8190, 8191, 8192, 8193, SIZE // CLUSTER]


def layer(path: Path, size: int, backing: Backing | None) -> Path:
    with new_file(path) as fd:
        write_empty(fd, size, backing)
    return path


@contextmanager
def opened(paths: list[Path]) -> Iterator[list[int]]:
    fds = [os.open(path, os.O_RDONLY) for path in paths]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def merged(paths: list[Path], target: Path, backing: Backing | None) -> Path:
    with opened(paths) as fds, new_file(target) as fd:
        assert merge(fds, fd, backing, lambda: None) == SIZE
    return target


def random_chain(tmp_path: Path, seed: int, depth: int, *, base: bool) -> list[Path]:
    rng = random.Random(seed)
    backing = None
    if base:
        (tmp_path / "base.raw").write_bytes(rng.randbytes(20 * CLUSTER))
        os.truncate(tmp_path / "base.raw", SIZE)
        backing = Backing("base.raw", "raw")
    chain = []
    for number in range(depth):
        path = layer(tmp_path / f"{number}.qcow2", SIZE, backing)
        backing = Backing(path.name, "qcow2")
        chain.append(path)
        disk = GuestDisk(BlockTarget(path, "qcow2"))
        for spot in rng.sample(SPOTS, rng.randrange(5)):
            if rng.random() < 0.3:
                write_zero_cluster(path, spot)
            else:
                disk.write(spot * CLUSTER + rng.randrange(500), rng.randbytes(12))
    return chain


@pytest.mark.parametrize("seed", range(12))
def test_a_merged_layer_shows_what_the_chain_showed(tmp_path: Path, seed: int) -> None:
    chain = random_chain(tmp_path, seed, depth=5, base=seed % 3 > 0)
    first = seed % 2  # merge all, or all but the lowest layer
    below = Backing(chain[0].name, "qcow2") if first else (Backing("base.raw", "raw") if seed % 3 else None)
    result = GuestDisk(BlockTarget(merged(chain[first:], tmp_path / "merged.qcow2", below), "qcow2"))
    top = GuestDisk(BlockTarget(chain[-1], "qcow2"))
    for spot in [*SPOTS, 15, 19, 9000]:
        length = min(CLUSTER, SIZE - spot * CLUSTER)
        assert result.read(spot * CLUSTER, length) == top.read(spot * CLUSTER, length), spot


@pytest.mark.needs("qemu-img")
@pytest.mark.parametrize("seed", range(100, 104))
def test_qemu_agrees(tmp_path: Path, seed: int) -> None:
    chain = random_chain(tmp_path, seed, depth=8, base=True)
    result = merged(chain, tmp_path / "merged.qcow2", Backing("base.raw", "raw"))
    for command in (["check", "-f", "qcow2", result], ["compare", "-f", "qcow2", "-F", "qcow2", chain[-1], result]):
        done = subprocess.run(["qemu-img", *map(str, command)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Leaked" not in done.stdout


@pytest.mark.needs("qemu-io")
def test_what_qemu_wrote_is_merged(tmp_path: Path) -> None:
    (tmp_path / "base.raw").write_bytes(b"\x11" * MIB)
    os.truncate(tmp_path / "base.raw", SIZE)
    chain = [layer(tmp_path / "0.qcow2", SIZE, Backing("base.raw", "raw"))]
    chain.append(layer(tmp_path / "1.qcow2", SIZE, Backing("0.qcow2", "qcow2")))
    for path, writes in zip(
        chain, (["write -P 2 0 200k", "write -P 3 700M 1M"], ["discard 64k 64k", "write -z 704M 64k"]), strict=True
    ):
        subprocess.run(["qemu-io", "-f", "qcow2", *(f"-c{w}" for w in writes), path], check=True, capture_output=True)
    result = GuestDisk(BlockTarget(merged(chain, tmp_path / "merged.qcow2", Backing("base.raw", "raw")), "qcow2"))
    assert result.read(0, 3 * CLUSTER) == b"\2" * CLUSTER + bytes(CLUSTER) + b"\2" * CLUSTER
    assert result.read(700 * MIB, MIB) == b"\3" * MIB
    assert result.read(704 * MIB, CLUSTER) == bytes(CLUSTER)
    assert result.read(4 * CLUSTER, CLUSTER) == b"\x11" * CLUSTER


def test_empty_layers_make_an_empty_layer(tmp_path: Path) -> None:
    chain = [layer(tmp_path / f"{number}.qcow2", SIZE, None) for number in range(3)]
    result = merged(chain, tmp_path / "merged.qcow2", None)
    assert result.stat().st_blocks * 512 <= 64 << 10


def test_layers_of_different_sizes_are_refused(tmp_path: Path) -> None:
    chain = [layer(tmp_path / "0.qcow2", MIB, None), layer(tmp_path / "1.qcow2", 2 * MIB, None)]
    with pytest.raises(Unsupported), opened(chain) as fds, new_file(tmp_path / "merged") as fd:
        merge(fds, fd, None, lambda: None)
    assert not (tmp_path / "merged").exists()


@pytest.mark.needs("qemu-img")
def test_compressed_clusters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(b"x" * MIB)
    subprocess.run(
        ["qemu-img", "convert", "-c", "-O", "qcow2", tmp_path / "raw", tmp_path / "c.qcow2"],
        check=True,
        capture_output=True,
    )
    with pytest.raises(Unsupported), opened([tmp_path / "c.qcow2"]) as fds, new_file(tmp_path / "merged") as fd:
        merge(fds, fd, None, lambda: None)


def test_a_cut_layer_is_noticed(tmp_path: Path) -> None:
    path = layer(tmp_path / "0.qcow2", SIZE, None)
    disk = GuestDisk(BlockTarget(path, "qcow2"))
    disk.write(0, b"x" * CLUSTER)
    disk.write(CLUSTER, b"y" * CLUSTER)
    os.truncate(path, path.stat().st_size - 2 * CLUSTER)
    with pytest.raises(Bug), opened([path]) as fds, new_file(tmp_path / "merged") as fd:
        merge(fds, fd, None, lambda: None)


def test_a_merge_that_nobody_wants_stops(tmp_path: Path) -> None:
    chain = random_chain(tmp_path, 1, depth=3, base=False)
    abort = Abort()
    abort.ask()
    with pytest.raises(Aborted), opened(chain) as fds, new_file(tmp_path / "merged") as fd:
        merge(fds, fd, None, abort)
    with open_sealed(chain[0]):
        assert not (tmp_path / "merged").exists()
