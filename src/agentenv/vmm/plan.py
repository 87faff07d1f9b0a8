"""From a plan to QEMU's command line and the guest kernel's. Pure: values in, text out.

The devices and their order are part of every snapshot: device state loads only into
a machine that is put together in the same way. What differs between a boot and a
restore is listed in `argv`, and nothing else may differ. A spare (`spare_argv`) is
given the rest of its machine later, by `furnishing`.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from agentenv.model.errors import Invalid
from agentenv.model.machine import INIT_PATH, BlockTarget
from agentenv.vmm.console import CONSOLE_RING, CONSOLE_RING_BYTES, EARLY_RING, EARLY_RING_BYTES
from agentenv.vmm.contract import SparePlan, VmPlan

GUEST_MAC: Final = "02:ae:00:00:00:21"  # of the network contract: it is in every guest's memory
MONITOR_SOCKET: Final = "qmp.sock"
PID_FILE: Final = "pid"
DISK_DEVICE: Final = "disk"
FIRST_DISK_NODE: Final = "disk-0"
# Emulated, "rep movsb" copies byte by byte and "rep movsq" eight at a time: a kernel that believes the first
# to be fast takes twice as long over pages, pipes and files.
CPU_MODELS: Final = {"tcg": "max,-erms,-fsrm", "kvm": "host"}

# The kernel's limit is 108 bytes with the closing zero.
MAX_SOCKET_PATH_BYTES: Final = 107
MAX_VCPUS: Final = 64
MEMORY_MIB: Final = range(64, 1 << 20)
_INTERFACE_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,15}")

_INCOMING: Final = ("-S", "-incoming", "defer")
SANDBOX: Final = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
MEMORY: Final = "memory"  # the name of the object that guest memory is
_MACHINE: Final = "microvm,acpi=on,pit=off,pic=off,rtc=on,mem-merge=off,dump-guest-core=off,suppress-vmdesc=on"


@dataclass(frozen=True, slots=True)
class Engine:
    """How guests run on this host. ``tsc_khz`` is needed to boot, not to restore, under tcg."""

    accelerator: Literal["tcg", "kvm"]
    tb_size_mib: int
    tsc_khz: int | None = None


def check(plan: VmPlan) -> None:
    """Raise `Invalid` for a plan that no VMM can be started from."""
    socket_bytes = len(os.fsencode(monitor_path(plan)))
    if socket_bytes > MAX_SOCKET_PATH_BYTES:
        raise Invalid(
            f"the path of the monitor socket has {socket_bytes} bytes, and may have {MAX_SOCKET_PATH_BYTES}",
            hint="choose a shorter runtime directory",
        )
    check_shape(plan)
    if plan.init is not None and not re.fullmatch(INIT_PATH, plan.init):
        raise Invalid(f"{plan.init!r} cannot be given to the guest kernel as the path of an init")


def check_shape(plan: VmPlan | SparePlan) -> None:
    """Raise `Invalid` for a machine that no VMM makes."""
    machine = plan.machine
    if not 1 <= machine.vcpu_count <= MAX_VCPUS:
        raise Invalid(f"{machine.vcpu_count} virtual CPUs: between 1 and {MAX_VCPUS} are possible")
    if machine.memory_mib not in MEMORY_MIB:
        raise Invalid(f"{machine.memory_mib} MiB of memory: between 64 and {MEMORY_MIB.stop - 1} are possible")
    if not _INTERFACE_NAME.fullmatch(plan.tap):
        raise Invalid(f"{plan.tap!r} is not the name of a network interface")


def monitor_path(plan: VmPlan | SparePlan) -> Path:
    return plan.run_dir / MONITOR_SOCKET


def argv(binary: Path, plan: VmPlan, engine: Engine, *, monitor_fd: int, incoming: bool) -> list[str]:
    """Return the command line of a VMM: a fresh boot, or with *incoming* one that waits for device state.

    A restore loads no kernel: the guest has long copied it, a reboot ends the VM,
    and leaving it out saves the VMM a copy of it in memory and a third of its start.
    """
    return [
        *_process(binary, plan, plan.sandbox_id, monitor_fd),
        *("-machine", f"{_MACHINE},memory-backend={MEMORY}", "-object", _memory(plan)),
        *("-blockdev", json.dumps(block_node(FIRST_DISK_NODE, plan.disk))),
        *_parts(plan, engine),
        *(_INCOMING if incoming else _kernel(plan, engine)),
    ]


def spare_argv(binary: Path, plan: SparePlan, engine: Engine, *, monitor_fd: int) -> list[str]:
    """Return the command line of a VMM that waits, its machine not yet built, to be told memory and disk.

    Told them by `furnishing` it is what `argv` starts with *incoming*, device for device.
    """
    return [
        *_process(binary, plan, plan.name, monitor_fd),
        *("-machine", _MACHINE),
        *_parts(plan, engine),
        *_INCOMING,
        "-preconfig",
    ]


def furnishing(plan: VmPlan) -> list[tuple[str, dict[str, object]]]:
    """Return the commands of the monitor, in order, that make a spare the VMM of *plan*."""
    memory: dict[str, object] = {
        "qom-type": "memory-backend-file",
        "id": MEMORY,
        "size": plan.machine.memory_bytes,
        "mem-path": str(plan.memory_path),
        "share": False,
    }
    backend: dict[str, object] = {"path": "/machine", "property": "memory-backend", "value": f"/objects/{MEMORY}"}
    return [
        ("object-add", memory),
        ("qom-set", backend),
        ("blockdev-add", block_node(FIRST_DISK_NODE, plan.disk)),
        ("x-exit-preconfig", {}),
    ]


def _process(binary: Path, plan: VmPlan | SparePlan, name: str, monitor_fd: int) -> list[str]:
    return [
        str(binary),
        *("-name", f"guest={_escaped(name)},process=aenv-vm"),
        *("-pidfile", str(plan.run_dir / PID_FILE)),
        *("-nodefaults", "-no-user-config", "-display", "none", "-sandbox", SANDBOX),
        # A guest that powers off, reboots or panics stands still until its last words have been read.
        *("-action", "reboot=shutdown,shutdown=pause,panic=pause"),
        *("-chardev", f"socket,id=monitor,fd={monitor_fd},server=on,wait=off"),
        *("-mon", "chardev=monitor,mode=control"),
    ]


def _parts(plan: VmPlan | SparePlan, engine: Engine) -> list[str]:
    return [
        *("-accel", _accelerator(engine), "-cpu", CPU_MODELS[engine.accelerator]),
        *("-smp", str(plan.machine.vcpu_count), "-m", f"{plan.machine.memory_mib}M"),
        *("-global", "migration.send-configuration=off", "-global", "migration.x-events=on"),
        *_devices(plan),
    ]


def probe_argv(binary: Path, engine: Engine, *, monitor_fd: int) -> list[str]:
    """Return the command line of a VMM without a machine that can be asked what it is able to do."""
    return [
        str(binary),
        *("-nodefaults", "-no-user-config", "-display", "none", "-sandbox", SANDBOX),
        *("-machine", "none", "-accel", _accelerator(engine)),
        *("-chardev", f"socket,id=monitor,fd={monitor_fd}", "-mon", "chardev=monitor,mode=control"),
    ]


def block_node(name: str, target: BlockTarget, *, without_backing: bool = False) -> dict[str, object]:
    """Return what QEMU calls a block node: *target*, with the backing files that its header names.

    Writes go to the host's page cache and a guest's flush is an fdatasync of it;
    what a guest discards is given back to the host's file system.
    """
    node: dict[str, object] = {
        "driver": target.format,
        "node-name": name,
        "discard": "unmap",
        "file": {"driver": "file", "filename": str(target.path), "discard": "unmap"},
    }
    if without_backing:
        node["backing"] = None
    return node


def kernel_command_line(plan: VmPlan, engine: Engine) -> str:
    """Return what the guest kernel is told at a fresh boot; restored guests keep what theirs was told."""
    words = [
        "console=hvc0",
        # Until the modules of the real console are loaded, so that a boot that fails early can be explained.
        "earlyprintk=serial,ttyS0",
        "quiet",
        # A panic ends the VM at once; a hung guest is the agent client's to notice. By triple fault: the
        # other ways to restart need devices that this machine lacks, and spin on the way through them.
        "panic=-1",
        "reboot=t",
        "nowatchdog",
        # Huge pages are cleared and captured whole for a few bytes in them.
        "transparent_hugepage=madvise",
    ]
    if engine.tsc_khz is not None:
        words += [f"tsc_early_khz={engine.tsc_khz}", "tsc=reliable"]
    if plan.init is not None:
        words.append(f"aenv.init={plan.init}")
    return " ".join(words)


def _accelerator(engine: Engine) -> str:
    return f"tcg,tb-size={engine.tb_size_mib}" if engine.accelerator == "tcg" else engine.accelerator


def _memory(plan: VmPlan) -> str:
    size = f"{plan.machine.memory_mib}M"
    return f"memory-backend-file,id=memory,size={size},mem-path={_escaped(plan.memory_path)},share=off"


def _devices(plan: VmPlan | SparePlan) -> list[str]:
    """In the order of their slots. A new one goes last, or no older snapshot loads."""
    devices = [
        *("-chardev", f"ringbuf,id={EARLY_RING},size={EARLY_RING_BYTES}", "-serial", f"chardev:{EARLY_RING}"),
        *("-chardev", f"ringbuf,id={CONSOLE_RING},size={CONSOLE_RING_BYTES}"),
        *("-device", "virtio-serial-device", "-device", f"virtconsole,chardev={CONSOLE_RING}"),
        *("-netdev", f"tap,id=net,ifname={plan.tap},script=no,downscript=no,vhost=off"),
        *("-device", f"virtio-net-device,netdev=net,mac={GUEST_MAC}"),
        *("-device", f"virtio-blk-device,id={DISK_DEVICE},drive={FIRST_DISK_NODE}"),
        *("-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-device,rng=rng"),
    ]
    if plan.balloon:
        devices += ["-device", "virtio-balloon-device,id=balloon,deflate-on-oom=on,free-page-reporting=on"]
    return devices


def _kernel(plan: VmPlan, engine: Engine) -> tuple[str, ...]:
    files = ("-kernel", str(plan.kernel), "-initrd", str(plan.initramfs))
    return *files, "-append", kernel_command_line(plan, engine)


def _escaped(value: object) -> str:
    """QEMU ends an option's value at a single comma."""
    return str(value).replace(",", ",,")
