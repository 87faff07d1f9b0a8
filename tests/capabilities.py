"""What this machine can do for tests, found out by trying it.

A test says what it needs (``@pytest.mark.needs("root", "tun")``). Where something
is missing the test is skipped with the reason; where it is there, the test runs.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

REPO: Final = Path(__file__).resolve().parent.parent
GUEST_DIR: Final = Path(os.environ.get("AENV_GUEST_DIR", REPO / ".cache/guest"))
BASE_ROOTFS: Final = Path(os.environ.get("AENV_BASE_ROOTFS", REPO / ".cache/base-rootfs.tar"))
_NAMED_QEMU: Final = os.environ.get("AENV_QEMU", "qemu-system-x86_64")
QEMU: Final = str(Path(_NAMED_QEMU).resolve()) if "/" in _NAMED_QEMU else _NAMED_QEMU
_CLONE_NEWNET: Final = 0x4000_0000


def find_envd() -> Path | None:
    """Return the agent binary that set-up built, or None."""
    named = os.environ.get("AENV_ENVD")
    places = [Path(named)] if named else [REPO / "target" / part / "release/envd" for part in (_TARGET, "")]
    return next((place for place in places if place.is_file()), None)


def find_storaged() -> Path | None:
    """Return the storage daemon that set-up built, or None."""
    named = os.environ.get("AENV_STORAGE_DAEMON_BINARY")
    places = [Path(named)] if named else [REPO / "target" / part / "release/storaged" for part in (_TARGET, "")]
    return next((place.resolve() for place in places if place.is_file()), None)


_TARGET: Final = "x86_64-unknown-linux-gnu"


@cache
def lack_of(capability: str) -> str | None:
    """Return why *capability* is missing here, or None when it is there."""
    return PROBES[capability]()


def _root() -> str | None:
    return None if os.geteuid() == 0 else "not root"


def _program(name: str) -> Callable[[], str | None]:
    def probe() -> str | None:
        found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        return None if found else f"no program {name}"

    return probe


def _device(path: str) -> Callable[[], str | None]:
    def probe() -> str | None:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            return f"{path}: {error.strerror}"
        return None

    return probe


def _static_cc() -> str | None:
    build = ["gcc", "-static", "-x", "c", "-", "-o", "/dev/null"]
    try:
        done = subprocess.run(build, input="int main(void) { return 0; }", capture_output=True, text=True, check=False)
    except OSError as error:
        return f"no gcc: {error.strerror}"
    return None if done.returncode == 0 else f"gcc makes no static programs: {done.stderr.strip()[-200:]}"


def _network_namespaces() -> str | None:
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"no network namespaces: {done.stderr.strip()}"


def _nftables() -> str | None:
    try:
        ctypes.CDLL("libnftables.so.1")
    except OSError:
        return "no libnftables.so.1"
    tried = (
        "import ctypes; n = ctypes.CDLL('libnftables.so.1'); n.nft_ctx_new.restype = ctypes.c_void_p; "
        "c = ctypes.c_void_p(n.nft_ctx_new(0)); raise SystemExit(n.nft_run_cmd_from_buffer(c, b'add table inet probe'))"
    )
    done = subprocess.run(["unshare", "--net", "python3", "-c", tried], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"nftables does not work: {done.stderr.strip()}"


def _mount() -> str | None:
    done = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else f"cannot mount: {done.stderr.strip()}"


def _cgroup2() -> str | None:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    root = next((Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"), None)
    if root is None:
        return "no cgroup2 file system is mounted"
    probe = root / f"aenv-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return f"no control group can be made in {root}: {error.strerror}"
    return None


def _pagemap_scan() -> str | None:
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    return None if release >= (6, 7) else "the kernel is older than 6.7: no PAGEMAP_SCAN"


def _guest() -> str | None:
    return None if (GUEST_DIR / "current").is_file() else f"no guest image in {GUEST_DIR} (make guest)"


def _base() -> str | None:
    return None if BASE_ROOTFS.is_file() else f"no base root file system {BASE_ROOTFS} (make base)"


def _envd() -> str | None:
    return None if find_envd() else "the agent is not built (make envd)"


def _lab() -> str | None:
    # It takes minutes and two gigabytes: not for everybody who runs all tests.
    return None if os.environ.get("AENV_LAB") == "1" else "only in the lab host (make lab)"


def _storaged() -> str | None:
    return None if find_storaged() else "the storage daemon is not built (make storaged)"


PROBES: Final[Mapping[str, Callable[[], str | None]]] = {
    "root": _root,
    "qemu": _program(QEMU),
    "qemu-img": _program("qemu-img"),
    "qemu-io": _program("qemu-io"),
    "mke2fs": _program("mke2fs"),
    "debugfs": _program("debugfs"),
    "cpio": _program("cpio"),
    "openssl": _program("openssl"),
    "fio": _program("fio"),
    "static-cc": _static_cc,
    "mount": _mount,
    "cgroup2": _cgroup2,
    "pagemap-scan": _pagemap_scan,
    "netns": _network_namespaces,
    "nft": _nftables,
    "tun": _device("/dev/net/tun"),
    "loop": _device("/dev/loop-control"),
    "fuse": _device("/dev/fuse"),
    "kvm": _device("/dev/kvm"),
    "envd": _envd,
    "storaged": _storaged,
    "guest": _guest,
    "base": _base,
    "lab": _lab,
}
