"""One run of the lab host: files and a command go in, a console and results come out.

The machine is thrown away afterwards. Its disks carry plain tar archives, so nothing
is mounted and nothing needs root on this side.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tools.lab import host

MEMORY_MIB = 3072
RESULTS_MIB = 512
LIMIT_S = 900.0
MODULES = ("kvm_amd", "ublk_drv", "fuse", "loop", "tun", "virtio_net", "virtio_console")
_FIRST_QEMU_FOR_TWO_CPUS = 10
# Without cmpxchg16b, which QEMU 7.2 sometimes emulates with wrong flags: the lab dies in its allocator.
_CPU = "max,-cx16"
_BLOCK_BYTES = 512


class LabError(Exception):
    """The lab host did not bring its results back; the message says what it said last."""


@dataclass(frozen=True, slots=True)
class Job:
    """*files*: name inside the job's folder, where the command runs, and what it is a copy of."""

    command: str
    files: Mapping[str, Path]
    modules: Sequence[str] = MODULES
    limit_s: float = LIMIT_S
    memory_mib: int = MEMORY_MIB


@dataclass(frozen=True, slots=True)
class Outcome:
    """*results*: a folder with what the job wrote to /mnt/results, beside ``status`` and ``dmesg``."""

    status: int
    console: Path
    results: Path
    seconds: float


def qemu() -> str:
    return os.environ.get("AENV_QEMU", "qemu-system-x86_64")


def cpus() -> int:
    """QEMU 7.2 kills a lab of two CPUs with a double fault as soon as guests run in it; 10 does not."""
    said = subprocess.run([qemu(), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"version (\d+)", said)
    return 2 if found and int(found.group(1)) >= _FIRST_QEMU_FOR_TWO_CPUS else 1


def run(job: Job, folder: Path, *, show: IO[str] | None = None) -> Outcome:
    """Boot the lab host, have it do *job*, and bring everything into *folder*. Blocks.

    The console is copied to *show* as it comes. Raises `LabError` when the machine
    panics, hangs (after ``limit_s``) or ends without results.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    given, taken, said = folder / "job.tar", folder / "results.tar", folder / "console.log"
    _pack(job, given)
    with taken.open("wb") as file:
        file.truncate(RESULTS_MIB << 20)
    command = [
        qemu(), "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", _CPU, "-smp", str(cpus()),
        "-m", f"{job.memory_mib}M", "-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio",
        "-kernel", str(host.kernel_image()), "-initrd", str(host.INITRAMFS),
        "-append", "console=ttyS0 quiet panic=-1 mitigations=off",
        "-drive", f"file={host.ROOT_DISK},if=virtio,format=raw,snapshot=on,cache=unsafe",
        "-drive", f"file={given},if=virtio,format=raw,readonly=on",
        "-drive", f"file={taken},if=virtio,format=raw,cache=unsafe",
    ]  # fmt: skip
    started = time.monotonic()
    _boot(command, said, job.limit_s, show)
    seconds = time.monotonic() - started
    results = folder / "results"
    try:
        with tarfile.open(taken) as archive:
            archive.extractall(results, filter="data")
        status = int((results / "status").read_text())
    except (tarfile.TarError, OSError, ValueError) as error:
        raise LabError(
            f"the lab ended after {seconds:.0f} s without results; {said} ends with\n{_tail(said)}"
        ) from error
    taken.unlink()
    given.unlink()
    return Outcome(status, said, results, seconds)


def _boot(command: list[str], said: Path, limit_s: float, show: IO[str] | None) -> None:
    popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    too_long = threading.Timer(limit_s, popen.kill)
    with said.open("wb") as log, popen as child:
        too_long.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                log.write(line)
                log.flush()
                if show is not None:
                    show.write(line.decode(errors="replace").replace("\r", ""))
                    show.flush()
            child.wait()
        finally:
            too_long.cancel()
            child.kill()
    if child.returncode != 0:
        raise LabError(f"the lab did not end within {limit_s:.0f} s, or QEMU failed; {said} ends with\n{_tail(said)}")


def _pack(job: Job, out: Path) -> None:
    with tarfile.open(out, "w") as archive:
        for name, path in job.files.items():
            archive.add(path, name, recursive=True)
        for name, text in (("run", job.command), ("modules", " ".join(job.modules))):
            data = text.encode()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
    with out.open("ab") as file:
        file.truncate(-(-out.stat().st_size // _BLOCK_BYTES) * _BLOCK_BYTES)


def _tail(said: Path) -> str:
    return "\n".join(said.read_text(errors="replace").splitlines()[-30:])
