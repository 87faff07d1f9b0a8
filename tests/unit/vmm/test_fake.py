"""The fake's own tools: what a test can make go wrong with it."""

import asyncio
from pathlib import Path

import pytest

from agentenv.model.errors import NoSpace, Unavailable
from agentenv.model.ids import new_sandbox_id
from agentenv.model.machine import BlockTarget, Machine
from agentenv.testing.vmm import FakeHypervisor, FakeVmm
from agentenv.vmm.contract import VmPlan


@pytest.fixture
def plan(tmp_path: Path) -> VmPlan:
    disk = BlockTarget(tmp_path / "disk", "raw")
    return VmPlan(
        sandbox_id=new_sandbox_id(),
        generation=1,
        machine=Machine(1, 64, 64),
        kernel=tmp_path / "kernel",
        initramfs=tmp_path / "initramfs",
        memory_path=tmp_path / "memory",
        disk=disk,
        netns=tmp_path / "netns",
        tap="tap0",
        run_dir=tmp_path / "run",
    )


async def test_a_call_fails_as_told_and_changes_nothing(plan: VmPlan) -> None:
    vmm = FakeVmm(fail={"pause": NoSpace("full")})
    instance = await vmm.boot(plan)

    with pytest.raises(NoSpace):
        await instance.pause()
    was_running = instance.vm.running
    del vmm.fail["pause"]
    await instance.pause()

    assert (was_running, instance.vm.running) == (True, False)
    assert vmm.calls == [("boot", plan.sandbox_id), ("pause", plan.sandbox_id), ("pause", plan.sandbox_id)]


async def test_a_call_stalls_until_it_may_go(plan: VmPlan) -> None:
    vmm = FakeVmm(stall={"stop"})
    instance = await vmm.boot(plan)

    stopping = asyncio.create_task(instance.stop())
    await vmm.reached.wait()
    assert vmm.hypervisor.alive == [instance.vm]
    vmm.go.set()
    await stopping

    assert vmm.hypervisor.alive == []


@pytest.mark.parametrize("step", ["restore", "prepared"])
async def test_a_restore_that_stalls_has_a_process_and_cancelled_has_none(
    plan: VmPlan, tmp_path: Path, step: str
) -> None:
    vmm = FakeVmm()
    instance = await vmm.boot(plan)
    await instance.pause()
    await instance.save_device_state(tmp_path / "state")
    await instance.stop()
    vmm.stall.add(step)

    async def prepare(pid: int) -> None:
        assert pid in vmm.hypervisor.processes

    restoring = asyncio.create_task(vmm.restore(plan, tmp_path / "state", prepare))
    await vmm.reached.wait()
    assert len(vmm.hypervisor.alive) == 1
    restoring.cancel()
    await asyncio.wait([restoring])

    assert restoring.cancelled()
    assert vmm.hypervisor.alive == []


async def test_a_process_can_be_ended_from_outside_with_words(plan: VmPlan) -> None:
    host = FakeHypervisor()
    instance = await FakeVmm(host).boot(plan)

    host.processes[instance.process.pid].end(0, "Kernel panic")

    assert (await instance.wait_exit()).log_tail == "Kernel panic"
    with pytest.raises(Unavailable):
        await instance.resume()
