"""The command lines of QEMU and of the guest kernel."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.model.errors import Invalid
from agentenv.model.ids import SandboxId
from agentenv.model.machine import BlockTarget, Machine
from agentenv.network.contract import GUEST_MAC as NETWORK_MAC
from agentenv.vmm.contract import SparePlan, VmPlan
from agentenv.vmm.plan import (
    GUEST_MAC,
    Engine,
    argv,
    block_node,
    check,
    furnishing,
    kernel_command_line,
    spare_argv,
)

TCG = Engine("tcg", tb_size_mib=32, tsc_khz=2_500_000)
KVM = Engine("kvm", tb_size_mib=32)
QEMU = Path("/usr/bin/qemu-system-x86_64")
PLAN = VmPlan(
    sandbox_id=SandboxId("7f4c1a52-9a5c-4a65-9c55-1a4f3cf5b7b1"),
    generation=3,
    machine=Machine(vcpu_count=2, memory_mib=512, disk_mib=1024),
    kernel=Path("/guest/vmlinuz"),
    initramfs=Path("/guest/initramfs.img"),
    memory_path=Path("/store/memory"),
    disk=BlockTarget(Path("/store/disk"), "qcow2"),
    netns=Path("/run/netns/slot-1"),
    tap="tap0",
    run_dir=Path("/run/aenv/vm/one"),
)


def line(plan: VmPlan = PLAN, engine: Engine = TCG, *, incoming: bool = False) -> list[str]:
    return argv(QEMU, plan, engine, monitor_fd=3, incoming=incoming)


def values(words: list[str], option: str) -> list[str]:
    return [words[i + 1] for i, word in enumerate(words) if word == option]


def unescaped_fields(value: str) -> list[str]:
    """Cut an option's value as QEMU does: at single commas, two standing for one."""
    return [part.replace("\0", ",") for part in value.replace(",,", "\0").split(",")]


def test_the_guest_has_the_mac_address_of_the_network_contract() -> None:
    assert GUEST_MAC == NETWORK_MAC


def test_a_restore_has_the_devices_of_a_boot_and_no_kernel() -> None:
    boot, restore = line(), line(incoming=True)

    kernel = ["-kernel", "/guest/vmlinuz", "-initrd", "/guest/initramfs.img", "-append", kernel_command_line(PLAN, TCG)]
    assert boot[-len(kernel) :] == kernel
    assert restore == [*boot[: -len(kernel)], "-S", "-incoming", "defer"]


def test_a_spare_is_a_restore_without_memory_and_disk_until_it_is_told_them() -> None:
    spare = SparePlan("spare-1", PLAN.machine, PLAN.netns, PLAN.tap, Path("/run/aenv/vm/spare-1"))
    restore, waiting = line(incoming=True), spare_argv(QEMU, spare, TCG, monitor_fd=3)

    told = dict(furnishing(PLAN))
    assert list(told) == ["object-add", "qom-set", "blockdev-add", "x-exit-preconfig"]
    assert told["blockdev-add"] == json.loads(values(restore, "-blockdev")[0])
    memory = {f"{key}={value}" for key, value in told["object-add"].items() if key in ("id", "mem-path")}
    assert memory <= set(unescaped_fields(values(restore, "-object")[0]))
    for option in ("-device", "-chardev", "-netdev", "-smp", "-m", "-cpu", "-accel", "-global"):
        assert values(waiting, option) == values(restore, option)
    assert [f"{value},memory-backend=memory" for value in values(waiting, "-machine")] == values(restore, "-machine")
    assert waiting[-1] == "-preconfig"


def test_the_balloon_is_the_last_device_so_that_the_others_keep_their_slots() -> None:
    without, with_balloon = values(line(), "-device"), values(line(replace(PLAN, balloon=True)), "-device")

    assert with_balloon[:-1] == without
    assert with_balloon[-1].startswith("virtio-balloon-device,")


def test_memory_is_a_private_mapping_of_the_plan_s_path() -> None:
    (memory,) = [value for value in values(line(), "-object") if value.startswith("memory-backend-file")]

    assert "share=off" in unescaped_fields(memory)
    assert "mem-path=/store/memory" in unescaped_fields(memory)
    assert "size=512M" in unescaped_fields(memory)


def test_nothing_the_guest_says_goes_to_a_file() -> None:
    backends = [value.partition(",")[0] for value in values(line(), "-chardev")]

    assert sorted(backends) == ["ringbuf", "ringbuf", "socket"]


def test_a_guest_that_ends_itself_waits_to_be_read_out() -> None:
    (action,) = values(line(), "-action")

    assert {"reboot=shutdown", "shutdown=pause"} <= set(action.split(","))


@pytest.mark.parametrize(
    ("engine", "accelerator", "cpu"),
    [(TCG, "tcg,tb-size=32", "max,-erms,-fsrm"), (KVM, "kvm", "host")],
    ids=["tcg", "kvm"],
)
def test_the_engine_decides_accelerator_and_cpu(engine: Engine, accelerator: str, cpu: str) -> None:
    words = line(engine=engine)

    assert values(words, "-accel") == [accelerator]
    assert values(words, "-cpu") == [cpu]


def test_an_emulated_guest_is_told_the_speed_of_its_counter() -> None:
    assert "tsc_early_khz=2500000" in kernel_command_line(PLAN, TCG).split()
    assert "tsc_early_khz" not in kernel_command_line(PLAN, KVM)


def test_the_image_s_own_init_is_passed_on() -> None:
    assert "aenv.init=/sbin/init" in kernel_command_line(replace(PLAN, init="/sbin/init"), TCG).split()
    assert "aenv.init" not in kernel_command_line(PLAN, TCG)


# What a path on this system can be: anything but NUL, and not a surrogate.
paths = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40).map(
    lambda name: Path("/store") / f"x{name}"
)


@given(path=paths)
def test_no_path_can_add_an_option(path: Path) -> None:
    plan = replace(PLAN, memory_path=path, disk=BlockTarget(path, "raw"))

    words = line(plan)

    (memory,) = [value for value in values(words, "-object") if value.startswith("memory-backend-file")]
    assert f"mem-path={path}" in unescaped_fields(memory)
    assert len(unescaped_fields(memory)) == 5
    (disk,) = values(words, "-blockdev")
    assert json.loads(disk)["file"]["filename"] == str(path)
    assert len(words) == len(line())


def test_a_disk_is_flushed_when_the_guest_flushes_and_shrinks_when_it_discards() -> None:
    node = block_node("disk-0", PLAN.disk)

    assert node["discard"] == "unmap"
    assert "cache" not in node  # QEMU's default: host page cache, guest flush is fdatasync
    assert "backing" not in node  # the chain is the file's own


@pytest.mark.parametrize(
    "plan",
    [
        replace(PLAN, run_dir=Path("/" + "x" * 100)),
        replace(PLAN, run_dir=Path("/" + "ä" * 50)),
        replace(PLAN, machine=Machine(0, 512, 1024)),
        replace(PLAN, machine=Machine(65, 512, 1024)),
        replace(PLAN, machine=Machine(1, 63, 1024)),
        replace(PLAN, machine=Machine(1, -512, 1024)),
        replace(PLAN, tap=""),
        replace(PLAN, tap="tap0,ifname=eth0"),
        replace(PLAN, tap="x" * 16),
        replace(PLAN, init="sbin/init"),
        replace(PLAN, init="/sbin/init single"),
        replace(PLAN, init="/sbin/init\nx"),
        replace(PLAN, init="/" + "x" * 300),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(plan: VmPlan) -> None:
    with pytest.raises(Invalid):
        check(plan)


def test_a_socket_path_of_the_longest_length_is_taken() -> None:
    longest = Path("/" + "x" * (107 - len("//qmp.sock")))

    check(replace(PLAN, run_dir=longest))
    with pytest.raises(Invalid, match="108 bytes"):
        check(replace(PLAN, run_dir=Path(f"{longest}x")))
