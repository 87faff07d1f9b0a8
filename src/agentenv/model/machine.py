"""The shape of a virtual machine, and what must match for its state to load elsewhere."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

# Of an init in an image: one word of a kernel's command line.
INIT_PATH: Final = r"/[A-Za-z0-9._/+-]{1,200}"


@dataclass(frozen=True, slots=True)
class Machine:
    """Fixed when a template is built; part of every snapshot made from it."""

    vcpu_count: int
    memory_mib: int
    disk_mib: int

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib << 20


@dataclass(frozen=True, slots=True)
class BlockTarget:
    """A file or device that holds a disk, and how to read it."""

    path: Path
    format: Literal["raw", "qcow2"]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a device state was made with."""

    driver: str  # "qemu" or "firecracker"
    vmm_version: str
    accelerator: str  # "tcg" or "kvm"
    cpu_model: str
    guest_digest: str  # kernel and initramfs that the guest was booted with

    def loads_on(self, host: "Fingerprint") -> bool:
        """Whether a device state made with this loads on *host*.

        The guest's own kernel and agent are part of the state and come with it: a newer
        guest image on the host is for the templates that are built from now on.
        """
        return replace(self, guest_digest="") == replace(host, guest_digest="")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, told apart from a later one that was given the same pid.

    ``start_time`` is field 22 of /proc/PID/stat, in clock ticks since boot.
    """

    pid: int
    start_time: int
