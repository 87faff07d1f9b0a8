"""What the lab host is made of: a kernel from backports, an initramfs that mounts a disk, and a Debian root.

Made once, with the same stamps as set-up; a run changes none of it.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from agentenv.guest import cpio
from agentenv.guest.kernel import open_kernel
from agentenv.guest.kmod import ModuleTree
from tools.setup import console
from tools.setup.console import SetupError
from tools.setup.host import ROOT
from tools.setup.steps import CACHE, Step, contents, log

LAB = CACHE / "lab"
KERNEL_TREE = LAB / "kernel"
ROOT_DISK = LAB / "root.img"
INITRAMFS = LAB / "initramfs.img"

_INIT = b"""#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
for module in /modules/*; do /bin/busybox insmod $module; done
/bin/busybox mount -t ext4 -o rw /dev/vda /new && exec /bin/busybox switch_root /new /lab/init
/bin/busybox poweroff -f
"""


def ready() -> None:
    """Bring the lab host up to date. Blocks. Raises `SetupError`."""
    LAB.mkdir(parents=True, exist_ok=True)
    for step in STEPS:
        step.bring_up_to_date()


def is_ready() -> bool:
    return all(step.is_current() for step in STEPS)


def kernel_image() -> Path:
    return open_kernel(KERNEL_TREE).image


def _build_kernel() -> None:
    _script("lab kernel", "lab-kernel", "tools/lab/kernel.sh", str(KERNEL_TREE))


def _build_root() -> None:
    if os.geteuid() != 0:
        raise SetupError("not root: the root disk of the lab is made with mmdebstrap, as root")
    _script("lab root disk", "lab-root", "tools/lab/root.sh", str(KERNEL_TREE), str(ROOT_DISK))


def _build_initramfs() -> None:
    modules = ModuleTree(open_kernel(KERNEL_TREE).modules).load_order(("virtio_pci", "virtio_blk", "ext4"))
    entries = [cpio.directory(name) for name in ("bin", "dev", "new", "modules")]
    entries.append(cpio.file("bin/busybox", _busybox(), 0o755))
    entries.append(cpio.file("init", _INIT, 0o755))
    for place, module in enumerate(modules):
        entries.append(cpio.file(f"modules/{place:02d}-{module.name}.ko", module.data))
    archive = io.BytesIO()
    cpio.write(entries, archive)
    INITRAMFS.write_bytes(archive.getvalue())


def _busybox() -> bytes:
    """The static one that the root disk has: nothing more need be installed here."""
    shown = subprocess.run(
        ["debugfs", "-R", "cat /bin/busybox", str(ROOT_DISK)],
        env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"},
        capture_output=True,
        check=True,
    ).stdout
    if not shown.startswith(b"\x7fELF"):
        raise SetupError(f"{ROOT_DISK} has no busybox")
    return shown


def _script(what: str, name: str, *command: str) -> None:
    quiet = {"LC_ALL": "C", "PYTHON": sys.executable}
    console.run(what, "Debian", ["sh", *command], log(name), cwd=ROOT, env=quiet)


_GUEST_PARTS = ("src/agentenv/guest/cpio.py", "src/agentenv/guest/kmod.py")


def _kernel_version() -> list[bytes]:
    return [open_kernel(KERNEL_TREE).version.encode()] if KERNEL_TREE.is_dir() else []


STEPS = (
    Step(
        "lab-kernel",
        lambda: contents("tools/lab/kernel.sh", "tools/backports_apt.sh", "tools/apt_sources.py"),
        (KERNEL_TREE,),
        _build_kernel,
    ),
    Step(
        "lab-root",
        lambda: [*contents("tools/lab/root.sh", "tools/lab/init.sh", "tools/apt_sources.py"), *_kernel_version()],
        (ROOT_DISK,),
        _build_root,
    ),
    Step(
        "lab-initramfs",
        lambda: [*contents("tools/lab/host.py", "tools/lab/root.sh", *_GUEST_PARTS), *_kernel_version()],
        (INITRAMFS,),
        _build_initramfs,
    ),
)
