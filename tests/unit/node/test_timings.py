"""Every figure that is published is moved by something."""

import pytest

from agentenv.testing.host import FakeHost

STAGES = {
    "create": {"disk", "acquire", "restore", "journal", "agent"},
    "pause": {"freeze", "stop", "device_state", "memory", "disk", "record", "retire"},
    "resume": {"acquire", "restore", "journal", "agent"},
    "fork": {"freeze", "stop", "device_state", "memory", "disk"},
    "fork_child": {"disk", "acquire", "restore", "journal", "agent"},
    "snapshot": {"freeze", "stop", "device_state", "memory", "disk", "flatten"},
    "delete": {"vm", "storage"},
}


async def test_every_metric_of_the_node_is_moved_by_something(fake: FakeHost) -> None:
    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)
    await fake.node.resume(sandbox.id, 300)
    await fake.node.fork(sandbox.id, 1, 300)
    await fake.node.snapshot(sandbox.id, None)
    for vm in fake.world.hypervisor.alive:
        if vm.plan.sandbox_id == sandbox.id:
            vm.end(-9)
    while not fake.metrics.get_sample_value("agentenv_vm_lost_total"):
        await fake.world.clock.advance(0)
    await fake.idle()
    await fake.node.delete(sandbox.id)

    stages: dict[str, set[str]] = {}
    families = {family.name: family for family in fake.metrics.collect()}
    for sample in families["agentenv_sandbox_stage_duration_seconds"].samples:
        if sample.name.endswith("_count") and sample.value > 0:
            assert sample.labels["status"] == "ok"
            stages.setdefault(sample.labels["operation"], set()).add(sample.labels["stage"])
    assert stages == STAGES
    for operation in ("pause", "fork", "snapshot"):
        assert fake.metrics.get_sample_value("agentenv_guest_stopped_seconds_count", {"operation": operation}) == 1
    assert set(families) == {
        "agentenv_sandbox_stage_duration_seconds", "agentenv_guest_stopped_seconds", "agentenv_vm_lost",
    }  # fmt: skip


async def test_a_stage_that_fails_is_counted_as_such(fake: FakeHost) -> None:
    sandbox = await fake.create()
    fake.world.guests.fail["freeze"] = RuntimeError("what?")  # type: ignore[assignment]  # not even one of our kinds

    with pytest.raises(RuntimeError):
        await fake.node.pause(sandbox.id)

    labels = {"operation": "pause", "stage": "freeze", "status": "error"}
    assert fake.metrics.get_sample_value("agentenv_sandbox_stage_duration_seconds_count", labels) == 1
    fake.world.guests.fail.clear()
