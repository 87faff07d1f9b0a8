"""Building and loading guest images, with a kernel package made for the test."""

import gzip
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentenv.guest.image import BOOT_MODULES, WORKLOAD_MODULES, build_guest, load_guest
from agentenv.guest.kernel import KernelTree, fetch_kernel, open_kernel
from agentenv.model.errors import Invalid, NotFound, Unavailable, Unsupported
from tests.unit.guest_image.modules import make_module, make_tree
from tests.unit.guest_image.test_cpio import read_back

AGENT = b"\x7fELF" + b"agent" * 100


@pytest.fixture
def kernel(tmp_path: Path) -> KernelTree:
    root = tmp_path / "package"
    modules = {f"{name}.ko": make_module() for name in (*BOOT_MODULES, *WORKLOAD_MODULES)}
    make_tree(root / "lib/modules/6.1.0-test", modules)
    (root / "boot").mkdir()
    (root / "boot/vmlinuz-6.1.0-test").write_bytes(b"kernel" * 1000)
    return open_kernel(root)


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    path = tmp_path / "envd"
    path.write_bytes(AGENT)
    return path


def test_the_initramfs_has_the_agent_as_init_and_modules_in_load_order(
    tmp_path: Path, kernel: KernelTree, agent: Path
) -> None:
    image = build_guest(agent, tmp_path / "out", kernel=kernel)

    entries = read_back(gzip.decompress(image.initramfs.read_bytes()))
    by_name = {name: (mode, data) for name, mode, data in entries}
    assert by_name["init"] == (0o100755, AGENT)
    assert by_name["dev/console"][0] == 0o020600
    assert {"dev", "proc", "sys", "root-fs"} <= by_name.keys()
    loaded = [name for name in by_name if name.startswith("modules/")]
    assert loaded == sorted(loaded)
    assert [name.split("-", 1)[1] for name in loaded] == [f"{name}.ko" for name in (*BOOT_MODULES, *WORKLOAD_MODULES)]


def test_the_same_input_gives_the_same_image(tmp_path: Path, kernel: KernelTree, agent: Path) -> None:
    first = build_guest(agent, tmp_path / "one", kernel=kernel)
    os.utime(agent, (1, 1))
    second = build_guest(agent, tmp_path / "two", kernel=kernel)

    assert first.digest == second.digest
    assert first.initramfs.read_bytes() == second.initramfs.read_bytes()


def test_an_older_image_stays_loadable_when_a_newer_one_is_built(
    tmp_path: Path, kernel: KernelTree, agent: Path
) -> None:
    out = tmp_path / "out"
    older = build_guest(agent, out, kernel=kernel)
    agent.write_bytes(AGENT + b"newer")
    newer = build_guest(agent, out, kernel=kernel)

    assert load_guest(out) == newer
    assert load_guest(out, older.digest) == older
    assert newer.digest != older.digest


def test_builds_at_the_same_time_leave_one_whole_image(tmp_path: Path, kernel: KernelTree, agent: Path) -> None:
    out = tmp_path / "out"
    with ThreadPoolExecutor(4) as pool:
        images = list(pool.map(lambda _: build_guest(agent, out, kernel=kernel), range(4)))

    assert len(set(images)) == 1
    assert sorted(path.name for path in out.iterdir()) == sorted(["current", images[0].digest])


def test_a_damaged_image_is_not_loaded(tmp_path: Path, kernel: KernelTree, agent: Path) -> None:
    image = build_guest(agent, tmp_path / "out", kernel=kernel)
    with image.initramfs.open("r+b") as out:
        out.seek(100)
        out.write(b"\xff")

    with pytest.raises(Invalid, match="damaged"):
        load_guest(tmp_path / "out")


@pytest.mark.parametrize("digest", ["", "../../etc", "x" * 32 + "/", "zz"])
def test_a_strange_digest_is_refused(tmp_path: Path, digest: str) -> None:
    with pytest.raises(Invalid):
        load_guest(tmp_path, digest)


def test_nothing_built_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        load_guest(tmp_path)


def test_a_dynamic_agent_is_refused(tmp_path: Path, kernel: KernelTree, agent: Path) -> None:
    agent.write_bytes(b"\x7fELF" + bytes(600) + b"/lib64/ld-linux-x86-64.so.2\0")

    with pytest.raises(Invalid, match="statically"):
        build_guest(agent, tmp_path / "out", kernel=kernel)


@pytest.mark.parametrize("content", [None, b"#!/bin/sh\n"])
def test_an_agent_that_is_no_program_is_refused(tmp_path: Path, kernel: KernelTree, content: bytes | None) -> None:
    path = tmp_path / "agent"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises((NotFound, Invalid)):
        build_guest(path, tmp_path / "out", kernel=kernel)
    assert not (tmp_path / "out").exists()


def test_a_package_with_two_kernels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "boot").mkdir()
    for version in ("1", "2"):
        (tmp_path / f"boot/vmlinuz-{version}").touch()

    with pytest.raises(Invalid, match="2 kernels"):
        open_kernel(tmp_path)


def fake_programs(folder: Path, **scripts: str) -> Path:
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name.replace("_", "-")).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name.replace("_", "-")).chmod(0o755)
    return folder


def test_a_host_without_apt_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(Unsupported) as caught:
        fetch_kernel(tmp_path / "cache")
    assert caught.value.hint is not None


def test_an_unreachable_mirror_says_what_apt_said_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = fake_programs(tmp_path / "bin", apt_get="echo 'E: no route to mirror' >&2; exit 100", dpkg_deb="exit 1")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    for _ in range(2):
        with pytest.raises(Unavailable, match="no route to mirror"):
            fetch_kernel(tmp_path / "cache")
    assert not (tmp_path / "cache/tree").exists()
