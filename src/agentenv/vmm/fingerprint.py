"""What device state made here needs in order to load elsewhere, found out by asking QEMU itself."""

import hashlib
import socket
from pathlib import Path
from typing import Final

import structlog

from agentenv.model.errors import Unavailable, Unsupported
from agentenv.model.machine import Fingerprint
from agentenv.vmm.console import OutputLog, tail
from agentenv.vmm.plan import CPU_MODELS, Engine, probe_argv
from agentenv.vmm.process import Process, kill_all
from agentenv.vmm.qmp import Json, Monitor
from agentenv.vmm.spawn import FIRST_INHERITED, Spawner

OLDEST: Final = (7, 2)
NEEDED_COMMANDS: Final = (
    "xen-save-devices-state", "migrate-incoming", "getfd", "add-fd", "blockdev-add", "blockdev-snapshot",
    "ringbuf-read",
)  # fmt: skip
_INSTALL: Final = "install QEMU 7.2 or newer, on Debian the package qemu-system-x86"

_log = structlog.get_logger(__name__)


async def probe(binary: Path, engine: Engine, *, guest_digest: str, spawner: Spawner, timeout_s: float) -> Fingerprint:
    """Start *binary* without a machine and ask it. Raises `Unsupported`, with what to install, if it will not do."""
    ours, theirs = socket.socketpair()
    output = OutputLog.create()
    try:
        with theirs:
            argv = probe_argv(binary, engine, monitor_fd=FIRST_INHERITED)
            started = await spawner.spawn(argv, netns=None, output=output.fileno(), inherit=[theirs.fileno()])
    except BaseException:
        ours.close()
        output.close()
        raise
    process = Process(started.identity, pidfd=started.pidfd)
    try:
        monitor = await Monitor.over(ours, timeout_s=timeout_s)
        try:
            return Fingerprint(
                driver="qemu",
                vmm_version=await _version(monitor),
                accelerator=engine.accelerator,
                cpu_model=cpu_model(engine),
                guest_digest=guest_digest,
            )
        finally:
            monitor.close()
    except Unavailable as error:
        said = tail(output.text().strip())
        raise Unsupported(
            f"{binary} does not start with {engine.accelerator}: {said or error}", hint=_INSTALL
        ) from error
    finally:
        process.kill()
        process.close()
        kill_all([started.identity], timeout_s=1.0)
        output.close()


async def _version(monitor: Monitor) -> str:
    """Return major.minor: within it device state stays loadable, so security updates keep snapshots alive."""
    answer = await monitor.execute("query-version")
    match answer:
        case {"qemu": {"major": int(major), "minor": int(minor), "micro": int(micro)}}:
            _log.info("QEMU %d.%d.%d %s", major, minor, micro, answer.get("package", ""))
        case _:
            raise Unsupported(f"QEMU does not say its version: {answer!r}", hint=_INSTALL)
    if (major, minor) < OLDEST:
        raise Unsupported(f"QEMU {major}.{minor} is too old", hint=_INSTALL)
    commands = _names(await monitor.execute("query-commands"))
    lacking = [name for name in NEEDED_COMMANDS if name not in commands]
    if lacking:
        raise Unsupported(
            f"this QEMU {major}.{minor} was built without {', '.join(lacking)}",
            hint="Debian's and Ubuntu's packages have it; a build of your own needs --enable-xen",
        )
    if "microvm" not in _names(await monitor.execute("query-machines")):
        raise Unsupported(f"this QEMU {major}.{minor} was built without the machine type microvm", hint=_INSTALL)
    return f"{major}.{minor}"


def _names(answer: Json) -> set[str]:
    return {item["name"] for item in answer if isinstance(item, dict) and isinstance(item.get("name"), str)}


def cpu_model(engine: Engine) -> str:
    """Return QEMU's name of the CPU; under KVM it stands for this host's CPU, so that is told too."""
    name = CPU_MODELS[engine.accelerator]
    if engine.accelerator == "tcg":
        return name
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags")
    first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    fields = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    said = {key.strip(): value.strip() for key, value in fields.items()}
    described = "\n".join(f"{key}={said.get(key, '')}" for key in wanted)
    return f"{name}:{hashlib.sha256(described.encode()).hexdigest()[:16]}"
