"""The machine under a node: what it is, how busy it is, and what is allocated on it."""

import asyncio
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

import agentenv
from agentenv.aio.clock import Clock
from agentenv.model.lifecycle import State
from agentenv.node.contract import DiskUse, NodeInfo

if TYPE_CHECKING:
    from agentenv.node.host import Host

SAMPLE_EVERY_S = 5.0
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Counts:
    """Since this server started, except ``starting``."""

    starting: int = 0
    create_successes: int = 0
    create_fails: int = 0


class Gauge:
    """Samples CPU, memory and disks in the background, so that asking costs nothing."""

    def __init__(self) -> None:
        self.cpu_percent = 0.0
        self.memory_total_bytes = 0
        self.memory_used_bytes = 0
        self.disks: tuple[DiskUse, ...] = ()
        self.cpu: dict[str, str] = {}  # what /proc/cpuinfo says of the first one
        self._busy_idle = (0, 0)

    async def run(self, clock: Clock) -> None:
        while True:
            try:
                await asyncio.to_thread(self.sample)
            except (OSError, ValueError, LookupError):  # a page that shows old figures, not a node without any
                log.exception("the machine could not be measured")
            await clock.sleep(SAMPLE_EVERY_S)

    def sample(self) -> None:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = fields[3] + fields[4]
        busy = sum(fields) - idle
        was_busy, was_idle = self._busy_idle
        if elapsed := busy - was_busy + idle - was_idle:
            self.cpu_percent = 100.0 * (busy - was_busy) / elapsed
        self._busy_idle = (busy, idle)

        memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        kib = {name: int(value.split()[0]) for name, value in memory.items()}
        self.memory_total_bytes = kib["MemTotal"] << 10
        self.memory_used_bytes = (kib["MemTotal"] - kib["MemAvailable"]) << 10
        self.disks = tuple(_disks())
        self.cpu = self.cpu or _first_cpu()


def _disks() -> list[DiskUse]:
    """Mounted block devices, each once."""
    found: dict[str, DiskUse] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, mount_point, filesystem = (_unescaped(field) for field in line.split(" ")[:3])
        if not device.startswith("/dev/") or device in found:
            continue
        try:
            usage = os.statvfs(mount_point)
        except OSError:
            continue
        total = usage.f_blocks * usage.f_frsize
        found[device] = DiskUse(mount_point, device, filesystem, total - usage.f_bfree * usage.f_frsize, total)
    return list(found.values())


def _unescaped(field: str) -> str:
    """Blanks and backslashes in a mount point are octal there."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _first_cpu() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def info(host: "Host", counts: Counts, gauge: Gauge, *, stopping: bool) -> NodeInfo:
    """A snapshot of the node's figures."""
    sandboxes = host.registry.all()
    paused = [s for s in sandboxes if s.state in (State.PAUSED, State.RESUMING)]
    active = [s for s in sandboxes if s.state not in (State.PAUSED, State.RESUMING, State.ERROR)]
    cpu = gauge.cpu
    return NodeInfo(
        id=host.settings.node_id,
        version=agentenv.__version__,
        status="draining" if stopping else "ready",
        driver=host.fingerprint.driver,
        accelerator=host.fingerprint.accelerator,
        cpu_architecture=platform.machine(),
        cpu_family=cpu.get("cpu family", ""),
        cpu_model=cpu.get("model", ""),
        cpu_model_name=cpu.get("model name", ""),
        cpu_count=os.cpu_count() or 1,
        cpu_percent=gauge.cpu_percent,
        memory_total_bytes=gauge.memory_total_bytes,
        memory_used_bytes=gauge.memory_used_bytes,
        disks=gauge.disks,
        running=sum(s.state.has_guest for s in sandboxes),
        starting=counts.starting,
        paused=sum(s.state is State.PAUSED for s in sandboxes),
        errored=sum(s.state is State.ERROR for s in sandboxes),
        create_successes=counts.create_successes,
        create_fails=counts.create_fails,
        allocated_cpu=sum(s.machine.vcpu_count for s in active),
        allocated_memory_bytes=sum(s.machine.memory_bytes for s in active),
        paused_allocated_cpu=sum(s.machine.vcpu_count for s in paused),
        paused_allocated_memory_bytes=sum(s.machine.memory_bytes for s in paused),
    )
