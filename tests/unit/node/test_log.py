"""Every move of a sandbox is one line, and nothing else is."""

from structlog.testing import capture_logs

from agentenv.node import log as module
from agentenv.testing.host import FakeHost


async def test_a_life_is_told_move_by_move(fake: FakeHost) -> None:
    fake.host.registry.listen(module.log_change)
    with capture_logs() as lines:
        sandbox = await fake.create()
        await fake.node.set_timeout(sandbox.id, 77)
        await fake.node.pause(sandbox.id)
        await fake.node.resume(sandbox.id, 300)
        await fake.node.delete(sandbox.id)

    told = [line for line in lines if line["event"] == "sandbox moved"]
    moves = [(line["from_state"], line["to_state"]) for line in told]
    assert moves == [
        (None, "creating"), ("creating", "running"),
        ("running", "pausing"), ("pausing", "paused"),
        ("paused", "resuming"), ("resuming", "running"),
        ("running", "killing"), ("killing", "gone"),
    ]  # fmt: skip
    assert {line["sandbox"] for line in told} == {sandbox.id}
    assert {line["log_level"] for line in told} == {"info"}
    assert told[0]["generation"] < told[-1]["generation"]


async def test_a_vm_that_is_lost_is_told_with_the_reason(fake: FakeHost) -> None:
    fake.host.registry.listen(module.log_change)
    sandbox = await fake.create()
    with capture_logs() as lines:
        (vm,) = fake.world.hypervisor.alive
        vm.end(-9)
        while not fake.metrics.get_sample_value("agentenv_vm_lost_total"):
            await fake.world.clock.advance(0)
        await fake.idle()

    (told,) = [line for line in lines if line["event"] == "sandbox moved"]
    assert (told["from_state"], told["to_state"], told["log_level"]) == ("running", "error", "error")
    assert told["reason"] == fake.node.get(sandbox.id).reason
    assert told["reason"]


async def test_what_a_server_reads_at_start_did_not_move(fake: FakeHost) -> None:
    sandbox = fake.node.get((await fake.create()).id)

    with capture_logs() as lines:
        module.log_change(None, sandbox)

    assert [line["log_level"] for line in lines] == ["debug"]
