"""Whether this host's KVM runs guests, found out by trying it.

A `/dev/kvm` that exists need not work: it may be closed to us, be a stub of an
outer machine, or belong to a host of the PVM kind, which runs only guest kernels
made for it (a stock one dies in instruction emulation).
"""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

_KVM_GET_API_VERSION: Final = 0xAE00
_KVM_CREATE_VM: Final = 0xAE01
_KVM_CREATE_VCPU: Final = 0xAE41
_KVM_API_VERSION: Final = 12  # the only one there has ever been since Linux 2.6.22


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What guests run on here, and why."""

    kind: Literal["kvm", "tcg"]
    reason: str


def probe_accelerator(*, device: Path = Path("/dev/kvm"), modules: Path = Path("/sys/module")) -> Accelerator:
    """Return KVM where a virtual machine with one CPU could be made just now, else software emulation.

    Takes well under a millisecond; leaves nothing behind. Never raises.
    """
    trouble = _trouble(device, modules)
    if trouble is None:
        return Accelerator("kvm", f"{device} made a virtual machine")
    return Accelerator("tcg", trouble)


def _trouble(device: Path, modules: Path) -> str | None:
    if not device.exists():
        return f"there is no {device}: this CPU or the machine around this one offers no virtualisation"
    if (modules / "kvm_pvm").exists():
        return "this host runs guests by PVM (module kvm_pvm), which only kernels made for it survive"
    try:
        kvm = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        return f"{device} may not be opened by this user: be root, or a member of its group"
    except OSError as error:
        return f"{device} does not open: {error.strerror}"
    try:
        return _try_machine(kvm)
    except OSError as error:
        return f"{device} makes no virtual machine: {error.strerror}"
    finally:
        os.close(kvm)


def _try_machine(kvm: int) -> str | None:
    version = fcntl.ioctl(kvm, _KVM_GET_API_VERSION, 0)
    if version != _KVM_API_VERSION:
        return f"KVM speaks version {version} of its interface, not {_KVM_API_VERSION}"
    machine = fcntl.ioctl(kvm, _KVM_CREATE_VM, 0)
    try:
        os.close(fcntl.ioctl(machine, _KVM_CREATE_VCPU, 0))
    finally:
        os.close(machine)
    return None
