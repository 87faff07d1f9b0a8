"""From a root file system, as a folder or a tar, to an ext4 disk.

The disk is made whole under another name and then renamed: under its own name it
is complete or not there. The work is done by two programs, the unpacker of this
package and ``mke2fs``; cancelling kills them and removes what they wrote, and they
do not outlive this process, so that the next one can remove it.
"""

import asyncio
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from agentenv.model.errors import AgentEnvError, Bug, Invalid, NoSpace, NotFound, Unsupported

MIN_SIZE_MIB: Final = 16
MAX_SIZE_MIB: Final = 16 << 20
MAX_ENTRIES: Final = 10_000_000
LABEL: Final = "aenv-root"
# Fixed, so that the same root gives the same superblock; a disk is told from another by what it is attached to.
UUID: Final = "61656e76-726f-4f74-8000-000000000001"
FEATURES: Final = (
    "none", "has_journal", "ext_attr", "resize_inode", "dir_index", "filetype", "extent", "64bit", "flex_bg",
    "sparse_super", "large_file", "huge_file", "dir_nlink", "extra_isize", "metadata_csum",
)  # fmt: skip
BLOCK_BYTES: Final = 4096
INODE_BYTES: Final = 256
_SAID_BYTES: Final = 2000
_IMAGE_ARCHIVE_MARKS: Final = frozenset({"oci-layout", "index.json", "manifest.json"})
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_LINE_BYTES: Final = 1 << 16
_PROGRAMS: Final = {"mke2fs": "e2fsprogs", "debugfs": "e2fsprogs", "setpriv": "util-linux"}
_ENDING_WITH_US: Final = ("setpriv", "--pdeathsig", "KILL")

Progress: TypeAlias = Callable[[int, int], None]
"""Bytes of the archive read, and in all. Called on the event loop; must not block."""


@dataclass(frozen=True, slots=True)
class RootfsInfo:
    """A disk that was made. Its files take ``used_bytes``, its sparse image ``allocated_bytes`` of this host."""

    size_bytes: int
    used_bytes: int
    allocated_bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class _Survey:
    entries: int
    blocks: int


async def build_ext4(source: Path, out: Path, size_mib: int, *, progress: Progress | None = None) -> RootfsInfo:
    """Make *out*, an ext4 image of *size_mib* MiB with the content of *source*.

    *source* is a directory, or a tar, plain or packed with gzip, xz or zstd.
    Ownership, modes, times, links, device nodes, file capabilities and holes are
    kept. Raises `NotFound` for no such source, `Invalid` when it is no root file
    system, is damaged or hostile, or does not fit, `NoSpace` when this host's disk
    is full, `Unsupported` without root or mke2fs. Cancelled or failed, *out* is not there.
    """
    _check(source, size_mib)
    async with AsyncExitStack() as taken:
        work = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=".rootfs-", dir=out.parent))
        taken.push_async_callback(asyncio.to_thread, shutil.rmtree, work, ignore_errors=True)
        root = source
        if not source.is_dir():  # noqa: ASYNC240 - one stat
            root = await _unpacked(source, work, size_mib << 20, progress, taken)
        survey = await asyncio.to_thread(_survey, root)
        _check_fit(survey, size_mib)
        image = work / "disk"
        await _make(root, image, size_mib, survey.entries)
        return await asyncio.to_thread(_publish, image, out, survey)


def _check(source: Path, size_mib: int) -> None:
    if not MIN_SIZE_MIB <= size_mib <= MAX_SIZE_MIB:
        raise Invalid(f"a disk has {MIN_SIZE_MIB} to {MAX_SIZE_MIB} MiB, not {size_mib}")
    if not source.exists():
        raise NotFound(f"there is no {source}")
    if os.geteuid() != 0:
        raise Unsupported("making a root disk needs root: its files belong to many users")
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            raise Unsupported(f"this host has no {program}", hint=f"install {package}")


async def _unpacked(
    archive: Path, work: Path, max_bytes: int, progress: Progress | None, taken: AsyncExitStack
) -> Path:
    """Unpack *archive* and return where; it is there until *taken* is left."""
    root = work / "root"
    await asyncio.to_thread(root.mkdir, 0o755)
    with await asyncio.to_thread(archive.open, "rb") as data:
        status = os.fstat(data.fileno())
        is_zstd = await asyncio.to_thread(os.pread, data.fileno(), len(_ZSTD), 0) == _ZSTD

        def report() -> None:
            if progress is not None:
                # Whoever reads the archive shares this descriptor's position.
                progress(os.lseek(data.fileno(), 0, os.SEEK_CUR), status.st_size)

        # Tens of thousands of files are made in memory in a tenth of the time; where there is enough of it.
        for memory_bytes in (await asyncio.to_thread(_memory_for, max_bytes), 0):
            command = [sys.executable, "-m", "agentenv.templates.unpack", str(root)]
            command += map(str, (max_bytes, MAX_ENTRIES, memory_bytes))
            os.lseek(data.fileno(), 0, os.SEEK_SET)
            unpack = _unpack_zstd if is_zstd else _run_unpacker
            try:
                unpacker = await unpack(command, data.fileno(), report)
            except (NoSpace, Unsupported):
                if not memory_bytes:
                    raise
            else:
                taken.push_async_callback(_end, unpacker)
                return Path(f"/proc/{unpacker.pid}/root")
    raise AssertionError("the last way of unpacking raises or returns")


def _memory_for(max_bytes: int) -> int:
    """Size of a file system in memory for at most *max_bytes*, 0 if that is too much of what is free."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    return available // 2 if max_bytes <= available // 4 else 0


async def _unpack_zstd(command: list[str], archive: int, report: Callable[[], None]) -> asyncio.subprocess.Process:
    if shutil.which("zstd") is None:
        raise Unsupported("the archive is packed with zstd, which is not installed", hint="install zstd")
    async with AsyncExitStack() as opened:
        read_end, write_end = os.pipe()
        reading = opened.enter_context(os.fdopen(read_end, "rb"))
        with os.fdopen(write_end, "wb") as writing:
            unzipper = await asyncio.create_subprocess_exec(
                *_ENDING_WITH_US, "zstd", "-dcq", stdin=archive, stdout=writing, stderr=asyncio.subprocess.DEVNULL
            )
        opened.push_async_callback(_end, unzipper)
        try:
            unpacker = await _run_unpacker(command, reading.fileno(), report)
        except Invalid as error:
            reading.close()  # a decompressor that nobody reads ends by SIGPIPE; one that had ended before was cut short
            if await unzipper.wait() > 0:
                raise Invalid("the archive is damaged: it does not decompress") from error
            raise
        opened.push_async_callback(_end, unpacker)
        if await unzipper.wait() != 0:
            raise Invalid("the archive is damaged: it does not decompress")
        opened.pop_all()
        reading.close()
        return unpacker


async def _run_unpacker(command: list[str], archive: int, report: Callable[[], None]) -> asyncio.subprocess.Process:
    """Return the unpacker, at its end but alive: it keeps what it unpacked. The caller ends it."""
    async with AsyncExitStack() as opened:
        child = await asyncio.create_subprocess_exec(
            *command, stdin=archive, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=_LINE_BYTES
        )
        opened.push_async_callback(_end, child)
        assert child.stdout is not None
        assert child.stderr is not None
        last: dict[str, object] = {}
        async for line in child.stdout:
            last = json.loads(line)
            report()
            if last.get("done"):
                opened.pop_all()
                return child
        said = (await child.stderr.read(_SAID_BYTES)).decode(errors="replace")
        raise _failure(last, await child.wait(), said)


def _failure(last: dict[str, object], status: int, said: str) -> AgentEnvError:
    message = str(last.get("message"))
    match last.get("error"):
        case NoSpace.kind:
            return NoSpace(message)
        case Invalid.kind:
            return Invalid(message)
        case Unsupported.kind:
            return Unsupported(message)
        case _:
            return Bug(f"the unpacker ended with status {status}: {said.strip()[-_SAID_BYTES:]}")


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.kill()
        await child.wait()


def _survey(root: Path) -> _Survey:
    """Count what is in *root*, and refuse what cannot be a root."""
    device = root.stat().st_dev
    with os.scandir(root) as listing:
        top = {entry.name: entry.is_dir(follow_symlinks=False) for entry in listing}
    if not any(top.values()):
        raise Invalid("this is no root file system: there is no directory in it")
    if top.keys() & _IMAGE_ARCHIVE_MARKS and not top.keys() & {"etc", "usr", "bin"}:
        raise Invalid("this is an archive of a container image, not of a root file system", hint="flatten it first")
    entries, blocks = 0, 0
    pending = [os.fspath(root)]
    links: set[int] = set()
    while pending:
        with os.scandir(pending.pop()) as listing:
            for entry in listing:
                status = entry.stat(follow_symlinks=False)
                entries += 1
                if stat.S_ISDIR(status.st_mode):
                    if status.st_dev != device:
                        raise Invalid(
                            f"{entry.path} is another file system, mounted inside the root", hint="unmount it"
                        )
                    pending.append(entry.path)
                if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
                    if status.st_ino in links:
                        continue
                    links.add(status.st_ino)
                blocks += -(-min(status.st_size, status.st_blocks * 512) // BLOCK_BYTES)
    return _Survey(entries, blocks)


def _check_fit(survey: _Survey, size_mib: int) -> None:
    needed = survey.blocks * BLOCK_BYTES + _inodes(survey.entries) * INODE_BYTES + (_journal_mib(size_mib) << 20)
    needed_mib = -(-needed * 102 // 100 >> 20)  # group descriptors and bitmaps take about a per cent
    if needed_mib > size_mib:
        raise _does_not_fit(size_mib, needed_mib)


def _does_not_fit(size_mib: int, needed_mib: int) -> Invalid:
    return Invalid(
        f"the root file system does not fit on a disk of {size_mib} MiB", hint=f"it takes at least {needed_mib + 1} MiB"
    )


def _inodes(entries: int) -> int:
    """As many again as there are, since sandboxes write; their tables take no space until they are used."""
    return 2 * entries + 16_384


def _journal_mib(size_mib: int) -> int:
    return 16 if size_mib >= 256 else 4


async def _make(root: Path, image: Path, size_mib: int, entries: int) -> None:
    extended = f"root_owner=0:0,hash_seed={UUID},assume_storage_prezeroed=1,nodiscard"
    arguments = [
        "-q", "-F", "-b", str(BLOCK_BYTES), "-I", str(INODE_BYTES), "-N", str(min(_inodes(entries), size_mib << 8)),
        "-m", "0", "-L", LABEL, "-U", UUID, "-J", f"size={_journal_mib(size_mib)}", "-O", ",".join(FEATURES),
        # The image is new, thus zero: said here, the guest does not write the inode tables again in the background.
        "-E", extended, "-d", str(root), str(image), f"{size_mib}M",
    ]  # fmt: skip
    status, said = await _run("mke2fs", *arguments)
    if "No space left on device" in said:
        raise NoSpace("the disk is full while making a root disk")
    if "Could not allocate" in said or "No free space" in said or "not enough" in said.lower():
        raise _does_not_fit(size_mib, size_mib * 5 // 4)
    if status != 0:
        raise Bug(f"mke2fs ended with status {status}: {said[-_SAID_BYTES:]}")
    # A root that was unpacked elsewhere has no lost+found, and a plain user's `find /` stumbles over it.
    await _run("debugfs", "-w", "-R", "rmdir lost+found", str(image))


async def _run(program: str, *arguments: str) -> tuple[int, str]:
    environment = {**os.environ, "LC_ALL": "C", "MKE2FS_CONFIG": "/dev/null"}  # what the host prefers must not matter
    child = await asyncio.create_subprocess_exec(
        *_ENDING_WITH_US,
        program,
        *arguments,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, said = await child.communicate()
    finally:
        await _end(child)
    assert child.returncode is not None
    return child.returncode, said.decode(errors="replace")


def _publish(image: Path, out: Path, survey: _Survey) -> RootfsInfo:
    with image.open("rb") as file:
        os.fsync(file.fileno())
        status = os.fstat(file.fileno())
    image.rename(out)
    return RootfsInfo(status.st_size, survey.blocks * BLOCK_BYTES, status.st_blocks * 512, survey.entries)
