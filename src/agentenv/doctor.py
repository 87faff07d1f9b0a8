"""What this host can do for sandboxes, found out by trying it, and what follows from each answer.

Every check is a function of the places it looks at; none changes anything, and none
raises. Blocks for up to a few seconds: for a command, not for a server.
"""

import asyncio
import ctypes
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from agentenv.guest.image import HOW_TO_GET_ONE, load_guest
from agentenv.model.errors import AgentEnvError
from agentenv.storage.choice import choose, lack_of_layered
from agentenv.storage.layout import BackEnd, written_by
from agentenv.vmm.accelerator import probe_accelerator
from agentenv.vmm.qemu import QemuVmm

MIN_KERNEL: Final = (5, 10)  # pidfd_open, close_range, clone3 into a cgroup
PAGEMAP_SCAN_KERNEL: Final = (6, 7)
UBLK_KERNEL: Final = (6, 0)
DISK_MIB: Final = (1024, 10_240)  # below the first nothing starts, below the second it will not last
MEMORY_MIB: Final = (512, 2048)
DESCRIPTORS_PER_SANDBOX: Final = 16
ENOUGH_DESCRIPTORS: Final = 16_384
# What making namespaces, links and rules, entering them and reading guest memory take.
CAPABILITIES: Final = {"net_admin": 12, "net_raw": 13, "sys_chroot": 18, "sys_ptrace": 19, "sys_admin": 21, "mknod": 27}
# Set where programs of this host need certificates of their own, as behind a proxy that opens TLS.
CA_VARIABLES: Final = ("SSL_CERT_FILE", "PIP_CERT", "NODE_EXTRA_CA_CERTS")
_PROBE_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer: True is well, None works with the *consequence*, False stops sandboxes from running."""

    name: str
    ok: bool | None
    detail: str
    consequence: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Places:
    """Where to look. Tests look elsewhere."""

    home: Path
    guest_dir: Path
    qemu: str
    daemon: str = "storaged"
    back_end: Literal["auto", "layered", "plain"] = "auto"
    dev: Path = Path("/dev")
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    ca_bundle: Path | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    machine: str = platform.machine()
    release: str = platform.release()


def examine(places: Places) -> list[Finding]:
    """Return every finding, in the order in which a person would mend them."""
    checks: tuple[Callable[[Places], Finding], ...] = (
        architecture, kernel, privileges, accelerator, qemu, guest, tun, namespaces, nftables, mke2fs, fuse, ublk,
        storage, cgroups, memory, disk, open_files, certificates,
    )  # fmt: skip
    return [check(places) for check in checks]


def architecture(places: Places) -> Finding:
    detail = f"{places.machine}, {os.cpu_count()} CPUs"
    if places.machine == "x86_64":
        return Finding("cpu", True, detail)
    return Finding("cpu", False, detail, "there is a guest kernel and a VMM set-up only for x86_64")


def kernel(places: Places) -> Finding:
    version = _version(places.release)
    if version < MIN_KERNEL:
        return Finding(
            "kernel", False, places.release, "the server uses calls that this kernel lacks", "Linux 5.10 or newer"
        )
    if version < PAGEMAP_SCAN_KERNEL:
        return Finding(
            "kernel", True, places.release, "before 6.7 a pause reads all of /proc/PID/pagemap: somewhat slower"
        )
    return Finding("kernel", True, places.release)


def privileges(places: Places) -> Finding:
    status = dict(line.split(":\t", 1) for line in _lines(places.proc / "self/status") if ":\t" in line)
    held = int(status.get("CapEff", "0"), 16)
    lacking = [f"CAP_{name.upper()}" for name, bit in CAPABILITIES.items() if not held >> bit & 1]
    user = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    if not lacking:
        return Finding("privileges", True, user)
    return Finding(
        "privileges",
        False,
        f"{user}, without {', '.join(lacking)}",
        "no network slot can be made",
        "run the server as root",
    )


def accelerator(places: Places) -> Finding:
    found = probe_accelerator(device=places.dev / "kvm", modules=places.sys / "module")
    if found.kind == "kvm":
        return Finding("kvm", True, found.reason)
    return Finding(
        "kvm", None, found.reason, "guests run in software emulation (TCG): everything works, several times slower"
    )


def qemu(places: Places) -> Finding:
    async def ask() -> str:
        vmm = QemuVmm(binary=places.qemu, guest_digest="", command_timeout_s=_PROBE_TIMEOUT_S)
        try:
            found = await vmm.fingerprint()
        finally:
            await vmm.close()
        return f"version {found.vmm_version}, guests would run on {found.accelerator}"

    try:
        return Finding("qemu", True, asyncio.run(ask()))
    except AgentEnvError as error:
        return Finding("qemu", False, error.message, "no sandbox can be started", error.hint or "")


def guest(places: Places) -> Finding:
    try:
        image = load_guest(places.guest_dir)
    except (AgentEnvError, OSError) as error:
        return Finding(
            "guest image", False, str(error), "no sandbox can be started",
            HOW_TO_GET_ONE,
        )  # fmt: skip
    return Finding("guest image", True, f"kernel {image.kernel_version}, {image.digest[:12]}")


def tun(places: Places) -> Finding:
    path = places.dev / "net/tun"
    trouble = _cannot_open(path)
    if trouble is None:
        return Finding("tun", True, str(path))
    return Finding(
        "tun",
        False,
        trouble,
        "sandboxes have no network link",
        "modprobe tun; in a container, add the device /dev/net/tun",
    )


def namespaces(_places: Places) -> Finding:
    said = _fails("unshare", "--net", "--mount", "true")
    if said is None:
        return Finding("namespaces", True, "network and mount namespaces can be made")
    return Finding(
        "namespaces", False, said, "sandboxes cannot be kept apart", "be root; in a container, allow unshare"
    )


def nftables(_places: Places) -> Finding:
    try:
        ctypes.CDLL("libnftables.so.1")
    except OSError as error:
        return Finding(
            "nftables", False, str(error), "no egress policy can be enforced", "install nftables (libnftables1)"
        )
    if (said := _fails("unshare", "--net", "nft", "add table inet probe")) is not None:
        return Finding("nftables", False, said, "no egress policy can be enforced", "modprobe nf_tables")
    return Finding("nftables", True, "rules can be loaded")


def mke2fs(_places: Places) -> Finding:
    lacking = [name for name in ("mke2fs", "debugfs") if shutil.which(name) is None]
    if lacking:
        return Finding(
            "mke2fs", False, f"no {' and no '.join(lacking)}", "no template can be built", "install e2fsprogs"
        )
    return Finding("mke2fs", True, str(shutil.which("mke2fs")))


def fuse(places: Places) -> Finding:
    trouble = _cannot_open(places.dev / "fuse")
    if trouble is None:
        return Finding("fuse", True, str(places.dev / "fuse"))
    return Finding("fuse", None, trouble, "no layered images over FUSE; plain files are used", "modprobe fuse")


def storage(places: Places) -> Finding:
    """Which back end a server would use here."""
    root = places.home / "storage"
    try:
        lack = lack_of_layered(places.daemon, fuse=places.dev / "fuse")
        chosen = choose(places.back_end, written_by(root), lack)
    except AgentEnvError as error:
        return Finding("storage", False, error.message, "the server does not start", error.hint or "")
    if chosen.back_end is BackEnd.LAYERED:
        return Finding("storage", True, f"layered images over FUSE: {chosen.reason}")
    less = "no balloon; a pause writes all that changed since the template"
    return Finding("storage", None, f"plain files: {chosen.reason}", less)


def ublk(places: Places) -> Finding:
    path = places.dev / "ublk-control"
    trouble = _cannot_open(path)
    if trouble is None:
        return Finding("ublk", True, str(path))
    hint = "modprobe ublk_drv" if _version(places.release) >= UBLK_KERNEL else "Linux 6.0 or newer has it"
    return Finding("ublk", None, trouble, "the storage daemon cannot show disks as block devices; files are used", hint)


def cgroups(places: Places) -> Finding:
    root = places.sys / "fs/cgroup"
    if (root / "cgroup.controllers").is_file():
        return Finding("cgroups", True, f"version 2: {' '.join(_lines(root / 'cgroup.controllers'))}")
    found = sorted(path.name for path in root.glob("*") if path.is_dir())
    if found:
        return Finding("cgroups", None, f"version 1: {' '.join(found)}", "limits of VMM processes are not enforced")
    return Finding("cgroups", None, "none are mounted", "limits of VMM processes are not enforced")


def memory(places: Places) -> Finding:
    fields = dict(line.split(":", 1) for line in _lines(places.proc / "meminfo") if ":" in line)
    free_mib = int(fields.get("MemAvailable", "0 kB").split()[0]) >> 10
    detail = f"{free_mib} MiB available"
    if free_mib < MEMORY_MIB[0]:
        return Finding("memory", False, detail, "not enough for one sandbox of 512 MiB")
    if free_mib < MEMORY_MIB[1]:
        return Finding("memory", None, detail, "enough for a few sandboxes")
    return Finding("memory", True, detail)


def disk(places: Places) -> Finding:
    where = next(path for path in (places.home, *places.home.absolute().parents) if path.exists())
    free_mib = shutil.disk_usage(where).free >> 20
    detail = f"{free_mib} MiB free for {places.home}"
    if free_mib < DISK_MIB[0]:
        return Finding(
            "disk", False, detail, "below sandbox.min_free_disk_mib nothing is started", "free space, or set paths.home"
        )
    if free_mib < DISK_MIB[1]:
        return Finding(
            "disk", None, detail, "enough for a template and a few sandboxes", "set paths.home to a larger disk"
        )
    return Finding("disk", True, detail)


def open_files(_places: Places) -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= ENOUGH_DESCRIPTORS:
        return Finding("open files", True, "no limit" if hard == resource.RLIM_INFINITY else f"up to {hard}")
    fits = hard // DESCRIPTORS_PER_SANDBOX
    return Finding(
        "open files", None, f"up to {hard}", f"about {fits} sandboxes at a time", "raise the hard limit (ulimit -Hn)"
    )


def certificates(places: Places) -> Finding:
    if places.ca_bundle is not None:
        trouble = _cannot_read(places.ca_bundle)
        if trouble is None:
            return Finding("certificates", True, f"guests get {places.ca_bundle}")
        return Finding("certificates", False, trouble, "the server does not start", "set guest.ca_bundle to a file")
    given = [name for name in CA_VARIABLES if places.environ.get(name)]
    if not given:
        return Finding("certificates", True, "guests trust what their template trusts")
    return Finding(
        "certificates",
        None,
        f"this host sets {', '.join(given)}; guest.ca_bundle is not set",
        "if a proxy opens TLS here, pip, npm and https fail inside sandboxes",
        f"set guest.ca_bundle (AENV_GUEST_CA_BUNDLE), perhaps to {places.environ[given[0]]}",
    )


def _version(release: str) -> tuple[int, ...]:
    def numbers() -> Iterator[int]:
        for part in release.split("-", 1)[0].split(".")[:2]:
            if not part.isdigit():
                return
            yield int(part)

    return tuple(numbers())


def _cannot_open(path: Path) -> str | None:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def _cannot_read(path: Path) -> str | None:
    try:
        path.read_bytes()
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def _fails(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return f"no program {command[0]}"
    except subprocess.TimeoutExpired:
        return f"{' '.join(command)} does not end"
    return None if done.returncode == 0 else (done.stderr.strip() or f"{' '.join(command)} failed")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
