"""Real QEMU guests for tests: namespaces with taps, memory, disks, and a template to restore from.

The guest is the product's own kernel and agent on an empty root file system. It is
booted once in a session; tests restore from that, which takes 30 ms.
"""

import asyncio
import ctypes
import http.client
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.guest.image import GuestImage
from agentenv.model.ids import new_sandbox_id
from agentenv.model.machine import BlockTarget, Machine
from agentenv.network.contract import GUEST_ADDRESS
from agentenv.storage.qcow2 import Backing, write_empty
from agentenv.vmm.contract import VmPlan
from agentenv.vmm.process import read_identity
from agentenv.vmm.qemu import QemuVmm
from agentenv.vmm.spawn import inside
from tests.capabilities import QEMU

MACHINE = Machine(vcpu_count=1, memory_mib=192, disk_mib=64)
NEEDS = ("root", "qemu", "netns", "tun", "guest", "mke2fs")
SECRET = "a-control-secret-of-the-tests"
READY_S = 60.0
PAGE = 4096
_UMOUNT_DETACH = 2


@dataclass(frozen=True)
class Template:
    """What a paused guest left: everything that a sandbox is restored from."""

    memory: Path
    disk: Path
    state: Path


@dataclass
class Lab:
    """A directory with a short name (socket paths are limited) and the namespaces made in it."""

    guest: GuestImage
    root: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def driver(self, **options: Any) -> QemuVmm:
        return QemuVmm(binary=QEMU, accelerator="tcg", guest_digest=self.guest.digest, **options)

    def netns(self) -> Path:
        """Return a new namespace with a tap."""
        path = self.root / f"netns-{next(self._numbers)}"
        path.touch()
        name = str(path)
        script = (
            f"mount --bind /proc/self/ns/net {name} && ip link set lo up && ip tuntap add tap0 mode tap"
            " && ip addr add 169.254.0.22/30 dev tap0 && ip link set tap0 up"
        )
        # Bound from outside its own mount namespace, so that everybody sees it.
        subprocess.run(["unshare", "--net", "sh", "-c", script], check=True)
        return path

    def zeroed_memory(self) -> Path:
        path = self.root / f"memory-{next(self._numbers)}"
        path.touch()
        os.truncate(path, MACHINE.memory_bytes)
        return path

    def empty_disk(self) -> Path:
        path = self.root / f"disk-{next(self._numbers)}"
        path.touch()
        os.truncate(path, MACHINE.disk_mib << 20)
        subprocess.run(["mke2fs", "-q", "-t", "ext4", "-E", "root_owner=0:0", path], check=True)
        return path

    def overlay(self, backing: BlockTarget) -> BlockTarget:
        """Return an empty qcow2 file on top of *backing*, in its directory."""
        path = backing.path.parent / f"overlay-{next(self._numbers)}"
        with path.open("xb") as file:
            write_empty(file.fileno(), MACHINE.disk_mib << 20, Backing(backing.path.name, backing.format))
        return BlockTarget(path, "qcow2")

    def boot_plan(self) -> VmPlan:
        """Return the plan of a guest that boots on zeroed memory and a fresh disk."""
        return self._plan(self.zeroed_memory(), BlockTarget(self.empty_disk(), "raw"))

    def restore_plan(self, template: Template) -> VmPlan:
        """Return the plan of a guest that is restored from *template*, with a disk of its own on top of it."""
        return self._plan(template.memory, self.overlay(BlockTarget(template.disk, "raw")))

    def _plan(self, memory: Path, disk: BlockTarget) -> VmPlan:
        return VmPlan(
            sandbox_id=new_sandbox_id(),
            generation=1,
            machine=MACHINE,
            kernel=self.guest.kernel,
            initramfs=self.guest.initramfs,
            memory_path=memory,
            disk=disk,
            netns=self.netns(),
            tap="tap0",
            run_dir=self.root / "vm" / f"run-{next(self._numbers)}",
        )

    def close(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for path in self.root.glob("netns-*"):
            libc.umount2(os.fsencode(path), _UMOUNT_DETACH)
        shutil.rmtree(self.root)


@contextmanager
def open_lab(guest: GuestImage) -> Iterator[Lab]:
    """A lab, and proof that nothing of it is left running."""
    lab = Lab(guest, Path(tempfile.mkdtemp(prefix="vmm-lab-")))
    try:
        yield lab
        left = running_below(lab.root)
        assert left == [], f"VMMs left behind: {left}"
    finally:
        for pid in running_below(lab.root):
            os.kill(pid, 9)
        lab.close()


def running_below(root: Path) -> list[int]:
    """Return the pids of processes, zombies excluded, whose command line names a path below *root*."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and read_identity(int(entry.name)) is not None:
            try:
                if os.fsencode(root / "vm") in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def make_template(lab: Lab) -> Template:
    """Boot a guest, give its agent a secret, and write it down. Runs an event loop of its own."""
    return asyncio.run(_make_template(lab))


async def _make_template(lab: Lab) -> Template:
    vmm = lab.driver()
    plan = lab.boot_plan()
    instance = await vmm.boot(plan)
    try:
        await asyncio.to_thread(wait_healthy, plan.netns)
        assert await asyncio.to_thread(call, plan.netns, "POST", "/init", {"controlSecret": SECRET}) == 204
        await instance.pause()
        template = Template(lab.root / "template-memory", plan.disk.path, lab.root / "template-state")
        await instance.save_device_state(template.state)
        copy_memory(instance.process.pid, plan.memory_path, template.memory)
        return template
    finally:
        await instance.stop()
        await vmm.close()


def copy_memory(pid: int, mapped: Path, target: Path) -> None:
    """Write what process *pid* sees at its private mapping of *mapped* to *target*."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    start, end = next(
        (int(part, 16) for part in line.split()[0].split("-")) for line in lines if line.endswith(str(mapped))
    )
    shutil.copyfile(mapped, target)
    entries = array("Q")
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
        entries.frombytes(os.pread(pagemap.fileno(), (end - start) // PAGE * 8, start // PAGE * 8))
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory, target.open("r+b", buffering=0) as out:
        for index, entry in enumerate(entries):
            if entry >> 62 and not entry >> 61 & 1:
                os.pwrite(out.fileno(), os.pread(memory.fileno(), PAGE, start + index * PAGE), index * PAGE)


def call(netns: Path, method: str, path: str, body: object = None, *, timeout_s: float = 60.0) -> int:
    """Ask the agent of the guest in *netns*; return the status. Blocks; runs in a thread of a pool."""
    return ask(netns, method, path, body, timeout_s=timeout_s)[0]


def ask(netns: Path, method: str, path: str, body: object = None, *, timeout_s: float = 60.0) -> tuple[int, bytes]:
    with inside(netns):
        connection = http.client.HTTPConnection(str(GUEST_ADDRESS), 49983, timeout=timeout_s)
        try:
            data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
            kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
            headers = {"Content-Type": kind, "X-Agentenv-Control": SECRET}
            connection.request(method, path, body=data, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def wait_healthy(netns: Path, *, within_s: float = READY_S) -> None:
    """Return when the agent answers. A connection that nobody takes is tried again."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            with inside(netns):
                connection = http.client.HTTPConnection(str(GUEST_ADDRESS), 49983, timeout=0.5)
                try:
                    connection.request("GET", "/health")
                    connection.getresponse().read()
                    return
                finally:
                    connection.close()
        except (OSError, http.client.HTTPException):
            time.sleep(0.01)
    raise AssertionError(f"the guest did not answer within {within_s} s")


def marker() -> bytes:
    return uuid.uuid4().hex.encode()


async def no_preparation(pid: int) -> None:
    assert pid > 0
