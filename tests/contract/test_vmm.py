"""What every VMM driver promises, and its fake.

A driver passes by giving `VmmSuite` a `Host`: a driver on it, plans that it can run,
and a way to be the outside world. Nothing here knows which VMM it is, or asks the guest anything.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from agentenv.guest.image import GuestImage
from agentenv.model.errors import Bug, Conflict, NotFound, Unavailable
from agentenv.model.ids import new_sandbox_id
from agentenv.model.machine import BlockTarget, Machine, ProcessIdentity
from agentenv.testing.vmm import FakeHypervisor, FakeVmm
from agentenv.vmm.contract import Instance, Prepare, Spare, SparePlan, Vmm, VmPlan
from agentenv.vmm.process import read_identity
from tests.unit.vmm import lab as qemu
from tests.unit.vmm.lab import Lab, Template, make_template, no_preparation, open_lab


class Host(Protocol):
    """A host with a driver. ``ahead``: its VMMs are started before they are needed."""

    ahead: bool
    root: Path
    state: Path  # device state that loads into any `restore_plan`

    @property
    def vmm(self) -> Vmm: ...

    def restart(self) -> Vmm:
        """Replace ``vmm`` by the driver of the next server; the old one has let go."""
        ...

    def boot_plan(self) -> VmPlan: ...

    def restore_plan(self) -> VmPlan: ...

    def overlay(self, disk: BlockTarget) -> BlockTarget:
        """An empty disk file on top of *disk*."""
        ...

    def kill(self, process: ProcessIdentity) -> None:
        """End a VMM from outside, as the OOM killer would."""
        ...

    def hang(self, spare: Spare) -> None:
        """Let a VMM that waits answer nothing any more."""
        ...

    def alive(self) -> list[int]:
        """Pids of the VMMs of this host."""
        ...


class FakeHost:
    def __init__(self, root: Path, *, ahead: bool) -> None:
        self.ahead = ahead
        self.root = root
        self.state = root / "state"
        self.hypervisor = FakeHypervisor()
        self.vmm = FakeVmm(self.hypervisor)
        self._number = 0

    def restart(self) -> Vmm:
        self.vmm = FakeVmm(self.hypervisor)
        return self.vmm

    def boot_plan(self) -> VmPlan:
        self._number += 1
        memory, disk = self.root / f"memory-{self._number}", self.root / f"disk-{self._number}"
        memory.touch()
        disk.touch()
        return VmPlan(
            sandbox_id=new_sandbox_id(),
            generation=1,
            machine=Machine(1, 64, 64),
            kernel=self.root / "kernel",
            initramfs=self.root / "initramfs",
            memory_path=memory,
            disk=BlockTarget(disk, "raw"),
            netns=self.root / "netns",
            tap="tap0",
            run_dir=self.root / "vm" / f"run-{self._number}",
        )

    restore_plan = boot_plan

    def overlay(self, disk: BlockTarget) -> BlockTarget:
        path = disk.path.with_suffix(".overlay")
        path.touch()
        return BlockTarget(path, "qcow2")

    def kill(self, process: ProcessIdentity) -> None:
        self.hypervisor.find(process).end(-9)

    def hang(self, spare: Spare) -> None:
        self.vmm.fail["furnish"] = Unavailable("it hangs")

    def alive(self) -> list[int]:
        return [process.identity.pid for process in self.hypervisor.alive]


class QemuHost:
    def __init__(self, lab: Lab, template: Template, *, ahead: bool) -> None:
        self.ahead = ahead
        self.root = lab.root
        self.state = template.state
        self.vmm = lab.driver()
        self._lab, self._template = lab, template

    def restart(self) -> Vmm:
        self.vmm = self._lab.driver()
        return self.vmm

    def boot_plan(self) -> VmPlan:
        return self._lab.boot_plan()

    def restore_plan(self) -> VmPlan:
        return self._lab.restore_plan(self._template)

    def overlay(self, disk: BlockTarget) -> BlockTarget:
        return self._lab.overlay(disk)

    def kill(self, process: ProcessIdentity) -> None:
        assert read_identity(process.pid) == process
        os.kill(process.pid, 9)

    def hang(self, spare: Spare) -> None:
        os.kill(spare.process.pid, signal.SIGSTOP)

    def alive(self) -> list[int]:
        return qemu.running_below(self.root)


def spare_plan(plan: VmPlan) -> SparePlan:
    """What could become the VMM of *plan*."""
    run_dir = plan.run_dir.with_name(f"spare-{plan.run_dir.name}")
    return SparePlan(run_dir.name, plan.machine, plan.netns, plan.tap, run_dir, plan.balloon)


async def restore(host: Host, plan: VmPlan, device_state: Path, prepare: Prepare) -> Instance:
    """Restore as this host does, all promises being the same."""
    spare = await host.vmm.start_spare(spare_plan(plan)) if host.ahead else None
    return await host.vmm.restore(plan, device_state, prepare, spare)


class VmmSuite:
    """The promises of `agentenv.vmm.contract`."""

    @pytest.fixture
    async def instance(self, host: Host) -> AsyncIterator[Instance]:
        """A VM that was restored, and is paused."""
        instance = await restore(host, host.restore_plan(), host.state, no_preparation)
        yield instance
        await instance.stop()

    async def test_a_fingerprint_stays_the_same(self, host: Host) -> None:
        first = await host.vmm.fingerprint()

        assert await host.restart().fingerprint() == first
        assert first.driver
        assert first.vmm_version

    async def test_a_booted_vm_is_a_live_process_until_it_is_stopped(self, host: Host) -> None:
        plan = host.boot_plan()

        instance = await host.vmm.boot(plan)

        assert instance.plan == plan
        assert plan.run_dir.is_dir()
        assert host.alive() == [instance.process.pid]
        await instance.stop()
        assert host.alive() == []
        assert (await instance.wait_exit()).code == -9

    async def test_stopping_twice_or_by_two_at_once_is_stopping(self, host: Host) -> None:
        instance = await host.vmm.boot(host.boot_plan())

        await asyncio.gather(instance.stop(), instance.stop())
        await instance.stop()

        assert host.alive() == []

    async def test_pause_and_resume_may_be_repeated(self, instance: Instance) -> None:
        await instance.resume()
        await instance.resume()
        await instance.pause()
        await instance.pause()
        await instance.resume()

    async def test_state_that_was_saved_loads(self, host: Host) -> None:
        instance = await restore(host, host.restore_plan(), host.state, no_preparation)
        saved = host.root / "saved"
        await instance.save_device_state(saved)
        await instance.resume()
        await instance.stop()

        again = await restore(host, host.restore_plan(), saved, no_preparation)

        await again.resume()
        await again.stop()

    async def test_memory_is_prepared_once_with_the_pid_of_the_vm(self, host: Host) -> None:
        prepared: list[tuple[int, list[int]]] = []

        async def prepare(pid: int) -> None:
            prepared.append((pid, host.alive()))

        instance = await restore(host, host.restore_plan(), host.state, prepare)

        pid = instance.process.pid
        assert prepared == [(pid, [pid])]
        await instance.stop()

    async def test_a_restored_vm_is_paused(self, host: Host, instance: Instance) -> None:
        await instance.save_device_state(host.root / "paused-state")

        await instance.resume()
        with pytest.raises(Conflict):
            await instance.save_device_state(host.root / "running-state")
        assert not (host.root / "running-state").exists()

    async def test_a_state_that_cannot_be_written_leaves_the_vm_as_it_was(self, host: Host, instance: Instance) -> None:
        with pytest.raises(Bug):
            await instance.save_device_state(host.root / "no such directory" / "state")

        await instance.save_device_state(host.root / "state-after-failure")
        await instance.resume()

    async def test_a_state_that_does_not_load_leaves_nothing(self, host: Host) -> None:
        broken = host.root / "broken-state"
        broken.write_bytes(b"this is not the state of any device\n" * 100)

        with pytest.raises(Bug):
            await restore(host, host.restore_plan(), broken, no_preparation)

        assert host.alive() == []

    async def test_a_state_that_is_not_there_starts_nothing(self, host: Host) -> None:
        with pytest.raises(NotFound):
            await restore(host, host.restore_plan(), host.root / "missing", no_preparation)

        assert host.alive() == []

    async def test_memory_that_cannot_be_prepared_leaves_nothing(self, host: Host) -> None:
        async def prepare(pid: int) -> None:
            raise Unavailable(f"no memory for {pid}")

        with pytest.raises(Unavailable, match="no memory for"):
            await restore(host, host.restore_plan(), host.state, prepare)

        assert host.alive() == []

    async def test_a_restore_cancelled_while_memory_is_prepared_leaves_nothing(self, host: Host) -> None:
        preparing = asyncio.Event()

        async def prepare(pid: int) -> None:
            assert pid in host.alive()
            preparing.set()
            await asyncio.Event().wait()

        restoring = asyncio.create_task(restore(host, host.restore_plan(), host.state, prepare))
        await preparing.wait()

        restoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await restoring

        assert host.alive() == []

    async def test_a_vm_that_dies_while_it_starts_is_an_error(self, host: Host) -> None:
        async def prepare(pid: int) -> None:
            identity = read_identity(pid) or ProcessIdentity(pid, pid)
            host.kill(identity)

        with pytest.raises(Unavailable):
            await restore(host, host.restore_plan(), host.state, prepare)

        assert host.alive() == []

    async def test_guest_writes_go_where_the_disk_was_switched_to(self, host: Host, instance: Instance) -> None:
        first = host.overlay(instance.plan.disk)
        await instance.switch_disk(first)
        await instance.resume()
        second = host.overlay(first)

        await instance.switch_disk(second)

        await instance.pause()
        await instance.save_device_state(host.root / "switched-state")

    async def test_a_switch_to_no_disk_changes_nothing(self, host: Host, instance: Instance) -> None:
        with pytest.raises(Bug):
            await instance.switch_disk(BlockTarget(host.root / "missing-disk", "qcow2"))

        await instance.switch_disk(host.overlay(instance.plan.disk))
        await instance.resume()

    async def test_a_vm_is_taken_over_by_the_next_server(self, host: Host, instance: Instance) -> None:
        await instance.resume()
        await host.vmm.close()

        adopted = await host.restart().adopt(instance.plan, instance.process)

        assert adopted.process == instance.process
        await adopted.pause()
        await adopted.save_device_state(host.root / "adopted-state")
        await adopted.switch_disk(host.overlay(instance.plan.disk))
        await adopted.resume()
        await adopted.stop()
        assert host.alive() == []
        await adopted.wait_exit()

    async def test_only_that_very_process_is_taken_over(self, host: Host, instance: Instance) -> None:
        stranger = replace(instance.process, start_time=instance.process.start_time + 1)
        await host.vmm.close()

        with pytest.raises(NotFound):
            await host.restart().adopt(instance.plan, stranger)

    async def test_a_vm_that_ended_is_not_taken_over(self, host: Host, instance: Instance) -> None:
        await instance.stop()

        with pytest.raises(NotFound):
            await host.vmm.adopt(instance.plan, instance.process)

    async def test_reaping_ends_what_is_not_kept_and_nothing_else(self, host: Host, instance: Instance) -> None:
        stray = await host.vmm.boot(host.boot_plan())
        elsewhere = replace(host.boot_plan(), run_dir=host.root / "vm" / "elsewhere" / "run")
        other = await host.vmm.boot(elsewhere)
        keep = frozenset({instance.process.pid, other.process.pid})

        reaped = await host.vmm.reap(host.root / "vm", keep)

        assert reaped == [stray.process.pid]
        assert sorted(host.alive()) == sorted(keep)
        await stray.wait_exit()
        assert await host.vmm.reap(host.root / "vm" / "elsewhere", frozenset()) == [other.process.pid]
        assert host.alive() == [instance.process.pid]
        await other.wait_exit()

    async def test_everyone_learns_that_a_vm_was_killed(self, host: Host, instance: Instance) -> None:
        watching = [asyncio.create_task(instance.wait_exit()) for _ in range(3)]

        host.kill(instance.process)

        assert {ended.code for ended in await asyncio.gather(*watching)} == {-9}
        assert (await instance.wait_exit()).code == -9

    async def test_a_vm_that_was_killed_is_unavailable_and_can_be_stopped(self, host: Host, instance: Instance) -> None:
        host.kill(instance.process)
        await instance.wait_exit()

        with pytest.raises(Unavailable):
            await instance.pause()
        with pytest.raises(Unavailable):
            await instance.resume()
        with pytest.raises(Unavailable):
            await instance.save_device_state(host.root / "dead-state")
        with pytest.raises(Unavailable):
            await instance.switch_disk(BlockTarget(host.root / "disk", "qcow2"))
        assert isinstance(await instance.log_tail(), str)
        assert isinstance(await instance.console(), str)
        await instance.stop()

    async def test_a_spare_becomes_the_vm_in_the_vm_s_directory(self, host: Host) -> None:
        plan = host.restore_plan()
        spare = await host.vmm.start_spare(spare_plan(plan))
        assert (spare.is_alive, host.alive()) == (True, [spare.process.pid])

        instance = await host.vmm.restore(plan, host.state, no_preparation, spare)

        assert (instance.process, instance.plan) == (spare.process, plan)
        assert plan.run_dir.is_dir()
        assert not spare.plan.run_dir.exists()
        assert not spare.is_alive
        await spare.wait_exit()
        await spare.stop()  # it is none any more
        await instance.resume()
        await instance.stop()
        assert host.alive() == []

    async def test_a_spare_that_is_stopped_leaves_nothing(self, host: Host) -> None:
        spare = await host.vmm.start_spare(spare_plan(host.restore_plan()))

        await asyncio.gather(spare.stop(), spare.stop())

        await spare.wait_exit()
        assert (host.alive(), spare.is_alive, spare.plan.run_dir.exists()) == ([], False, False)

    @pytest.mark.parametrize("end", ["dies", "dies unnoticed", "hangs", "is of another shape"])
    async def test_a_spare_that_is_no_good_is_replaced(self, host: Host, end: str) -> None:
        plan = host.restore_plan()
        wanted = spare_plan(plan)
        if end == "is of another shape":
            wanted = replace(wanted, machine=replace(wanted.machine, memory_mib=2 * wanted.machine.memory_mib))
        spare = await host.vmm.start_spare(wanted)
        if end == "hangs":
            host.hang(spare)
        elif end.startswith("dies"):
            host.kill(spare.process)
        if end == "dies":
            await spare.wait_exit()

        instance = await host.vmm.restore(plan, host.state, no_preparation, spare)

        assert instance.process != spare.process
        assert host.alive() == [instance.process.pid]
        assert not spare.plan.run_dir.exists()
        await instance.resume()
        await instance.stop()

    async def test_spares_of_an_earlier_server_are_reaped(self, host: Host) -> None:
        spare = await host.vmm.start_spare(spare_plan(host.restore_plan()))
        await host.vmm.close()

        assert await host.restart().reap(host.root / "vm", frozenset()) == [spare.process.pid]

        assert host.alive() == []

    async def test_closing_the_driver_leaves_vms_running(self, host: Host, instance: Instance) -> None:
        await host.vmm.close()
        await host.vmm.close()

        assert host.alive() == [instance.process.pid]


class TestFakeVmm(VmmSuite):
    @pytest.fixture(params=[False, True], ids=["started", "spare"])
    async def host(self, request: pytest.FixtureRequest, tmp_path: Path) -> Host:
        host = FakeHost(tmp_path, ahead=request.param)
        instance = await host.vmm.boot(host.boot_plan())
        await instance.pause()
        await instance.save_device_state(host.state)
        await instance.stop()
        return host


@pytest.fixture(scope="module")
def qemu_template(guest_image: GuestImage) -> Iterator[tuple[Lab, Template]]:
    with open_lab(guest_image) as lab:
        yield lab, make_template(lab)


@pytest.mark.vm
@pytest.mark.needs(*qemu.NEEDS)
class TestQemuVmm(VmmSuite):
    @pytest.fixture(params=[False, True], ids=["started", "spare"])
    async def host(self, request: pytest.FixtureRequest, qemu_template: tuple[Lab, Template]) -> AsyncIterator[Host]:
        host = QemuHost(*qemu_template, ahead=request.param)
        yield host
        await host.vmm.close()
