"""Root disks from folders and archives, good, damaged and hostile; read back with debugfs and by mounting nothing."""

import asyncio
import gzip
import os
import select
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.model.errors import Invalid, NoSpace, NotFound, Unsupported
from agentenv.templates import rootfs
from agentenv.templates.rootfs import build_ext4
from tests.unit.templates.tars import device, directory, hardlink, make_tar, member, symlink

pytestmark = [pytest.mark.needs("root", "mke2fs", "debugfs"), pytest.mark.slow]


def debugfs(image: Path, request: str) -> str:
    return subprocess.run(["debugfs", "-R", request, image], capture_output=True, text=True, check=True).stdout


def content(image: Path, path: str) -> bytes:
    return subprocess.run(["debugfs", "-R", f"cat {path}", image], capture_output=True, check=True).stdout


def assert_sound(image: Path) -> None:
    checked = subprocess.run(["e2fsck", "-fn", image], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def assert_no_unpacker(folder: Path) -> None:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(folder) not in listed


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.fixture(params=["in memory", "on disk", "in too little memory"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of unpacking: the last begins in memory, finds it too small, and goes to the disk."""
    size = {"in memory": 64 << 20, "on disk": 0, "in too little memory": 40 << 10}[request.param]
    monkeypatch.setattr(rootfs, "_memory_for", lambda _max_bytes: size)


@pytest.mark.usefixtures("way")
@pytest.mark.needs("mount")
async def test_everything_that_a_root_holds_is_kept(tmp_path: Path) -> None:
    capability = b"\x01\x00\x00\x02\x00\x04\x00\x00" + bytes(12)
    owned = member("home/user/file", mode=0o640)
    owned.uid, owned.gid, owned.mtime = 1000, 1001, 86_400
    suid = member("usr/bin/su", mode=0o4755)
    capable = member(
        "usr/bin/ping",
        mode=0o755,
        headers={"SCHILY.xattr.security.capability": capability.decode("utf-8", "surrogateescape")},
    )
    archive = make_tar(
        tmp_path / "root.tar",
        directory("."), directory("usr"), directory("usr/bin", 0o755), directory("tmp", 0o1777),
        symlink("bin", "usr/bin"), (owned, b"hello"), (suid, b"su"), (capable, b"ping"),
        hardlink("usr/bin/sudo", "usr/bin/su"), device("dev/null", 1, 3), device("dev/loop0", 7, 0, tarfile.BLKTYPE),
        member("run/fifo", tarfile.FIFOTYPE), (member("big"), bytes(8 << 20) + b"end"),
        (member("bin/through-link"), b"x"),
    )  # fmt: skip

    info = await build_ext4(archive, tmp_path / "disk", 64)

    image = tmp_path / "disk"
    assert_sound(image)
    assert content(image, "/home/user/file") == b"hello"
    status = debugfs(image, "stat /home/user/file")
    assert "Mode:  0640" in status
    assert "User:  1000   Group:  1001" in status
    assert "mtime: 0x00015180" in status
    assert "Mode:  04755" in debugfs(image, "stat /usr/bin/su")
    assert "Links: 2" in debugfs(image, "stat /usr/bin/sudo")
    assert "Mode:  01777" in debugfs(image, "stat /tmp")
    assert "security.capability" in debugfs(image, "ea_list /usr/bin/ping")
    assert "Device major/minor number: 01:03" in debugfs(image, "stat /dev/null")
    assert "Type: block special" in debugfs(image, "stat /dev/loop0")
    assert "Type: FIFO" in debugfs(image, "stat /run/fifo")
    assert 'Fast link dest: "usr/bin"' in debugfs(image, "stat /bin")
    assert content(image, "/usr/bin/through-link") == b"x"
    assert content(image, "/big") == bytes(8 << 20) + b"end"
    assert info.size_bytes == 64 << 20
    assert info.used_bytes < 1 << 20, "the hole of 8 MiB takes no space"
    assert leftovers(tmp_path) == []
    assert_no_unpacker(tmp_path)


async def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc/passwd").write_text("user:x:1000:1000::/home/user:/bin/sh\n")
    os.chown(root / "etc/passwd", 7, 8)

    info = await build_ext4(root, tmp_path / "disk", 32)

    assert_sound(tmp_path / "disk")
    assert "User:     7   Group:     8" in debugfs(tmp_path / "disk", "stat /etc/passwd")
    assert "lost+found" not in debugfs(tmp_path / "disk", "ls /")
    assert info.files == 2


async def test_an_image_with_nothing_but_empty_directories_is_a_root(tmp_path: Path) -> None:
    (tmp_path / "root/nothing").mkdir(parents=True)

    await build_ext4(tmp_path / "root", tmp_path / "disk", 16)

    assert_sound(tmp_path / "disk")


@pytest.mark.parametrize("packing", ["gz", "xz", "zst"])
async def test_a_packed_archive_is_unpacked(tmp_path: Path, packing: str) -> None:
    plain = make_tar(tmp_path / "root.tar", directory("etc"), (member("etc/name"), b"packed"))
    packed = tmp_path / f"root.tar.{packing}"
    program = {"gz": "gzip", "xz": "xz", "zst": "zstd"}[packing]
    packed.write_bytes(subprocess.run([program, "-qc", plain], capture_output=True, check=True).stdout)
    seen: list[tuple[int, int]] = []

    await build_ext4(packed, tmp_path / "disk", 16, progress=lambda done, total: seen.append((done, total)))

    assert content(tmp_path / "disk", "/etc/name") == b"packed"
    assert seen[-1] == (packed.stat().st_size, packed.stat().st_size)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A file on the host that no archive may touch."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    yield victim
    assert victim.read_text() == "untouched"


@pytest.mark.parametrize("name", ["../victim", "a/../../victim", "/../victim"])
async def test_a_path_that_climbs_is_refused(tmp_path: Path, outside: Path, name: str) -> None:
    archive = make_tar(tmp_path / "evil.tar", directory("a"), (member(name), b"owned"))

    with pytest.raises(Invalid, match="climbs"):
        await build_ext4(archive, tmp_path / "disk", 16)
    assert not (tmp_path / "disk").exists()
    assert leftovers(tmp_path) == []


async def test_a_path_longer_than_any_system_call_takes_is_refused(tmp_path: Path) -> None:
    archive = make_tar(tmp_path / "deep.tar", (member("a/" * 3000 + "b"), b"x"))

    with pytest.raises(Invalid, match="no system call takes"):
        await build_ext4(archive, tmp_path / "disk", 16)
    assert leftovers(tmp_path) == []


async def test_an_absolute_path_lands_inside(tmp_path: Path, outside: Path) -> None:
    archive = make_tar(tmp_path / "evil.tar", directory("etc"), (member(str(outside)), b"inside"))

    await build_ext4(archive, tmp_path / "disk", 16)

    assert content(tmp_path / "disk", str(outside)) == b"inside"


async def test_a_link_to_the_host_leads_inside(tmp_path: Path, outside: Path) -> None:
    archive = make_tar(
        tmp_path / "evil.tar",
        directory("etc"), directory(str(tmp_path)), symlink("out", str(tmp_path)), symlink("up", "../../../../.."),
        (member("out/victim"), b"owned"), (member("up/owned"), b"owned"),
    )  # fmt: skip

    await build_ext4(archive, tmp_path / "disk", 16)

    assert content(tmp_path / "disk", f"{tmp_path}/victim") == b"owned"
    assert content(tmp_path / "disk", "/owned") == b"owned"


async def test_a_hard_link_to_the_host_is_refused(tmp_path: Path, outside: Path) -> None:
    archive = make_tar(tmp_path / "evil.tar", directory("etc"), hardlink("stolen", str(outside)))

    with pytest.raises(Invalid, match="stolen"):
        await build_ext4(archive, tmp_path / "disk", 16)


async def test_a_file_over_a_device_node_replaces_it(tmp_path: Path) -> None:
    # Opening what is there would write to the device: here /dev/full, which says so.
    archive = make_tar(tmp_path / "evil.tar", directory("dev"), device("dev/x", 1, 7), (member("dev/x"), b"file"))

    await build_ext4(archive, tmp_path / "disk", 16)

    assert content(tmp_path / "disk", "/dev/x") == b"file"


async def test_a_file_over_a_link_replaces_it(tmp_path: Path, outside: Path) -> None:
    archive = make_tar(
        tmp_path / "root.tar",
        directory("etc"),
        (member("target"), b"kept"),
        symlink("etc/x", "/target"),
        (member("etc/x"), b"new"),
    )

    await build_ext4(archive, tmp_path / "disk", 16)

    assert content(tmp_path / "disk", "/target") == b"kept"
    assert content(tmp_path / "disk", "/etc/x") == b"new"


async def test_kinds_may_change_from_entry_to_entry(tmp_path: Path) -> None:
    archive = make_tar(
        tmp_path / "root.tar",
        directory("a/b/c"), (member("a/b"), b"now a file"), directory("a/b"), (member("a/b/d"), b"x"),
        (member("f"), b"1"), directory("f"),
        hardlink("g", "a/b/d"), symlink("dangling", "/nowhere"), (member("dangling/x"), b"y"), (member("f2"), b""),
        (member("f2/x/y"), b"z"),
    )  # fmt: skip

    await build_ext4(archive, tmp_path / "disk", 16)

    assert content(tmp_path / "disk", "/g") == b"x"
    assert "Type: directory" in debugfs(tmp_path / "disk", "stat /f")
    assert content(tmp_path / "disk", "/dangling/x") == b"y"
    assert content(tmp_path / "disk", "/f2/x/y") == b"z"


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("packing", ["plain", "gz", "zst"])
async def test_a_cut_off_archive_is_refused(tmp_path: Path, packing: str, keep: float) -> None:
    files = [(member(f"etc/{number}"), os.urandom(3000)) for number in range(40)]
    data = make_tar(tmp_path / "whole", directory("etc"), *files).read_bytes()
    if packing == "gz":
        data = gzip.compress(data)
    elif packing == "zst":
        data = subprocess.run(["zstd", "-qc", tmp_path / "whole"], capture_output=True, check=True).stdout
    (tmp_path / "cut").write_bytes(data[: int(len(data) * keep)])

    with pytest.raises(Invalid):
        await build_ext4(tmp_path / "cut", tmp_path / "disk", 16)
    assert leftovers(tmp_path) == []


async def test_an_archive_cut_between_two_entries_is_refused(tmp_path: Path) -> None:
    whole = make_tar(tmp_path / "whole", directory("etc"), (member("etc/a"), b"a" * 512)).read_bytes()
    (tmp_path / "cut").write_bytes(whole[: 3 * 512])

    with pytest.raises(Invalid, match="end mark"):
        await build_ext4(tmp_path / "cut", tmp_path / "disk", 16)


@pytest.mark.parametrize(
    "data", [b"", b"#!/bin/sh\n", os.urandom(4096), b"\x1f\x8b" + bytes(100), b"\x28\xb5\x2f\xfd" + bytes(100)]
)
async def test_what_is_no_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)

    with pytest.raises(Invalid):
        await build_ext4(tmp_path / "file", tmp_path / "disk", 16)


async def test_a_container_image_is_told_from_a_root(tmp_path: Path) -> None:
    archive = make_tar(
        tmp_path / "image.tar", directory("blobs"), (member("oci-layout"), b"{}"), (member("index.json"), b"{}")
    )

    with pytest.raises(Invalid, match="container image"):
        await build_ext4(archive, tmp_path / "disk", 16)


async def test_a_bomb_is_stopped_at_the_size_of_the_disk(tmp_path: Path) -> None:
    bomb = make_tar(tmp_path / "bomb.tar.gz", directory("etc"), (member("zeros"), bytes(64 << 20)), mode="w:gz")
    assert bomb.stat().st_size < 1 << 20

    with pytest.raises(Invalid, match="more than 16 MiB"):
        await build_ext4(bomb, tmp_path / "disk", 16)


async def test_too_many_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootfs, "MAX_ENTRIES", 10)
    archive = make_tar(tmp_path / "many.tar", *(directory(f"d{number}") for number in range(11)))

    with pytest.raises(Invalid, match="more than 10 entries"):
        await build_ext4(archive, tmp_path / "disk", 16)


async def test_a_giant_header_does_not_take_the_memory_of_the_host(tmp_path: Path) -> None:
    header = tarfile.TarInfo("././@PaxHeader")
    header.type, header.size = tarfile.XHDTYPE, 1 << 40
    (tmp_path / "evil.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20))

    with pytest.raises(Invalid):
        await build_ext4(tmp_path / "evil.tar", tmp_path / "disk", 16)


async def test_a_root_that_does_not_fit_says_what_it_takes(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc/big").write_bytes(os.urandom(20 << 20))

    with pytest.raises(Invalid, match="does not fit") as caught:
        await build_ext4(root, tmp_path / "disk", 20)

    assert caught.value.hint is not None
    enough_mib = int(caught.value.hint.split()[-2])
    await build_ext4(root, tmp_path / "disk", enough_mib)
    assert_sound(tmp_path / "disk")


@pytest.mark.parametrize("size_mib", [-1, 0, 15, (16 << 20) + 1])
async def test_a_strange_size_is_refused(tmp_path: Path, size_mib: int) -> None:
    with pytest.raises(Invalid):
        await build_ext4(tmp_path, tmp_path / "disk", size_mib)


async def test_no_such_source_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await build_ext4(tmp_path / "nothing", tmp_path / "disk", 16)


async def test_a_host_without_mke2fs_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(Unsupported) as caught:
        await build_ext4(tmp_path, tmp_path / "disk", 16)
    assert caught.value.hint == "install e2fsprogs"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.needs("mount")
async def test_a_full_disk_is_no_space_and_leaves_nothing(tmp_path: Path, small_disk: Path, folder: bool) -> None:
    (tmp_path / "root/etc").mkdir(parents=True)
    (tmp_path / "root/etc/big").write_bytes(os.urandom(6 << 20))
    archive = make_tar(tmp_path / "root.tar", directory("etc"), (member("etc/big"), os.urandom(6 << 20)))

    with pytest.raises(NoSpace):
        await build_ext4(tmp_path / "root" if folder else archive, small_disk / "disk", 64)
    assert list(small_disk.iterdir()) == []


@pytest.mark.needs("mount")
async def test_a_file_system_mounted_inside_the_root_is_refused(tmp_path: Path, small_disk: Path) -> None:
    with pytest.raises(Invalid, match="mounted inside"):
        await build_ext4(small_disk.parent, tmp_path / "disk", 64)


async def test_a_cancelled_build_leaves_no_process(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    entries = make_tar(tmp_path / "tar", *(directory(f"d{number}") for number in range(1500))).read_bytes()
    at_work = asyncio.Event()
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as reading, os.fdopen(write_end, "wb", buffering=0) as writing:
        command = [sys.executable, "-m", "agentenv.templates.unpack", str(root), "1000000", "10000", "0"]
        building = asyncio.create_task(rootfs._run_unpacker(command, reading.fileno(), at_work.set))
        await asyncio.to_thread(writing.write, entries[: 1400 * 512])  # and then nothing: the unpacker waits for more
        async with asyncio.timeout(60):
            await at_work.wait()

        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building

    assert_no_unpacker(tmp_path)


@pytest.mark.needs("mount")
async def test_an_unpacker_whose_caller_was_killed_ends(tmp_path: Path) -> None:
    archive = make_tar(tmp_path / "root.tar", directory("etc"))
    (tmp_path / "root").mkdir()
    command = [sys.executable, "-m", "agentenv.templates.unpack", str(tmp_path / "root"), "1000000", "100", "1000000"]
    with archive.open("rb") as data:
        unpacker = subprocess.Popen(command, stdin=data, stdout=subprocess.PIPE)
    assert unpacker.stdout is not None
    assert b"done" in unpacker.stdout.readline()
    assert unpacker.poll() is None, "it keeps what it unpacked"
    assert Path(f"/proc/{unpacker.pid}/root/etc").is_dir()

    unpacker.stdout.close()  # what the kernel does for a process that is killed

    assert await asyncio.to_thread(unpacker.wait, 60) == 0


_AT_WORK = {
    "the unpacker": """
import asyncio, sys
from agentenv.templates import rootfs
command = [sys.executable, "-m", "agentenv.templates.unpack", sys.argv[1], "1000000", "10000", "0"]
asyncio.run(rootfs._run_unpacker(command, 0, lambda: print("at work", flush=True)))
""",
    "any other program": """
import asyncio, os
from pathlib import Path
from agentenv.templates import rootfs
async def main():
    running = asyncio.create_task(rootfs._run("sleep", "infinity"))
    me = os.getpid()
    while not (child := Path(f"/proc/{me}/task/{me}/children").read_text().strip()):
        await asyncio.sleep(0)
    while Path(f"/proc/{child}/comm").read_text() != "sleep\\n":
        await asyncio.sleep(0)
    print("at work", flush=True)
    await running
asyncio.run(main())
""",
}


@pytest.mark.parametrize("which", _AT_WORK)
async def test_no_program_of_a_build_outlives_a_server_that_was_killed(tmp_path: Path, which: str) -> None:
    entries = make_tar(tmp_path / "tar", *(directory(f"d{number}") for number in range(1500))).read_bytes()
    root = tmp_path / "root"
    root.mkdir()
    read_end, write_end = os.pipe()  # never closed before the end: the unpacker waits for more
    with os.fdopen(read_end, "rb") as reading, os.fdopen(write_end, "wb", buffering=0) as writing:
        server = subprocess.Popen(
            [sys.executable, "-c", _AT_WORK[which], str(root)], stdin=reading, stdout=subprocess.PIPE
        )
        if which == "the unpacker":
            await asyncio.to_thread(writing.write, entries[: 1400 * 512])
        assert server.stdout is not None
        assert await asyncio.to_thread(server.stdout.readline) == b"at work\n"
        (child,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        watched = os.pidfd_open(int(child))

        server.kill()
        server.wait()

        ended, _, _ = await asyncio.to_thread(select.select, [watched], [], [], 60)
        os.close(watched)
        server.stdout.close()
    assert ended
