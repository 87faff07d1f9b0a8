"""What the machine must have before anything can be built, all looked at before the first complaint."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tools.setup.console import SetupError

ROOT = Path(__file__).resolve().parent.parent.parent
MIN_PYTHON = (3, 11)
MIN_FREE_GIB = 6
PATHS = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"


class Need(NamedTuple):
    """Something that a Debian package brings."""

    what: str
    package: str
    is_there: Callable[[], bool]


def program(name: str) -> Callable[[], bool]:
    return lambda: shutil.which(name, path=PATHS) is not None


def library(name: str) -> Callable[[], bool]:
    def is_there() -> bool:
        try:
            ctypes.CDLL(name)
        except OSError:
            return False
        return True

    return is_there


def file(pattern: str) -> Callable[[], bool]:
    return lambda: next(Path("/").glob(pattern), None) is not None


def venv_works() -> bool:
    done = subprocess.run([sys.executable, "-c", "import ensurepip, venv"], stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 0


NEEDS = (
    Need("venv and ensurepip of Python", "python3-venv", venv_works),
    Need("gcc", "gcc", program("gcc")),
    Need("the static C library", "libc6-dev", file("usr/lib/*/libc.a")),
    Need("CA certificates", "ca-certificates", file("etc/ssl/certs/ca-certificates.crt")),
    Need("QEMU", "qemu-system-x86", program("qemu-system-x86_64")),
    Need("qemu-img", "qemu-utils", program("qemu-img")),
    Need("mke2fs", "e2fsprogs", program("mke2fs")),
    Need("nftables", "nftables", program("nft")),
    Need("libnftables", "libnftables1", library("libnftables.so.1")),
    Need("ip", "iproute2", program("ip")),
    Need("ps", "procps", program("ps")),
    Need("mmdebstrap", "mmdebstrap", program("mmdebstrap")),
    Need("Debian's archive keys", "debian-archive-keyring", file("usr/share/keyrings/debian-archive-keyring.gpg")),
    Need("kmod", "kmod", program("modprobe")),
    Need("cpio", "cpio", program("cpio")),
    Need("zstd", "zstd", program("zstd")),
    Need("xz", "xz-utils", program("xz")),
    Need("openssl", "openssl", program("openssl")),
    Need("fio", "fio", program("fio")),
)


def missing_packages() -> list[str]:
    return sorted({need.package for need in NEEDS if not need.is_there()})


def check(purpose: str) -> list[str]:
    """Raise `SetupError` with everything that stands in the way of *purpose*; return what is only worth knowing."""
    wrong: list[str] = []
    notes: list[str] = []
    if sys.platform != "linux":
        wrong.append(f"this is {sys.platform}: sandboxes need Linux")
    if platform.machine() != "x86_64":
        wrong.append(
            f"unsupported CPU architecture {platform.machine()}: only x86_64 has a guest kernel and a VMM set-up"
        )
    wrong += _cargo_trouble()
    free_gib = shutil.disk_usage(ROOT).free / (1 << 30)
    if free_gib < MIN_FREE_GIB and not (ROOT / ".cache/stamps/base").exists():
        wrong.append(f"{free_gib:.1f} GiB free on the disk of {ROOT}, set-up and the demo take up to {MIN_FREE_GIB}")
    if purpose != "check":
        # Without these the unit tests still run; a sandbox does not.
        (wrong if purpose == "demo" else notes).extend(_sandbox_trouble())
    if wrong:
        raise SetupError("this machine cannot run it yet:\n" + "\n".join(f"  - {line}" for line in wrong))
    return notes


def _cargo_trouble() -> list[str]:
    cargo = shutil.which("cargo")
    if cargo is None:
        return ["no cargo: install Rust (the guest agent is built from source)"]
    wanted = re.search(r'^rust-version = "([\d.]+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    shown = subprocess.run([cargo, "--version"], stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT).stdout
    found = re.search(r"cargo ([\d.]+)", shown)
    if wanted is None or found is None:
        return [] if found else ["cargo is there but does not run"]
    if _numbers(found.group(1)) < _numbers(wanted.group(1)):
        return [f"cargo {found.group(1)} is too old: {wanted.group(1)} or newer is needed"]
    return []


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _sandbox_trouble() -> list[str]:
    wrong = []
    if os.geteuid() != 0:
        wrong.append("not root: network namespaces, firewall rules and root disks need it (use sudo)")
    tun = Path("/dev/net/tun")
    try:
        os.close(os.open(tun, os.O_RDWR))
    except OSError as error:
        reason = error.strerror
        wrong.append(f"{tun}: {reason}; sandboxes have no network (modprobe tun; in a container add that device)")
    return wrong
