"""What the edges see of a node: who joins, who waits, what wakes, what is shown, and how it stops."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from ipaddress import IPv4Network

import pytest

from agentenv.model.errors import Conflict, DeadlineExceeded, NoSpace, NotFound, Unavailable
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import Event, State
from agentenv.model.policy import EgressPolicy, IngressPolicy
from agentenv.testing.audit import faults
from agentenv.testing.host import FakeHost, Trip, World

POLICY = EgressPolicy(allow_internet=False, allow_out=(IPv4Network("192.0.2.0/24"),))


# Connect and wake


async def test_connect_to_a_running_sandbox_only_extends_it(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=60)

    connected, resumed = await fake.node.connect(sandbox.id, 600)

    assert not resumed
    assert connected == replace(sandbox, ends_at=fake.world.clock.now() + timedelta(seconds=600))


async def test_connect_to_a_paused_sandbox_resumes_it(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=60)
    await fake.node.pause(sandbox.id)

    connected, resumed = await fake.node.connect(sandbox.id, 600)

    assert resumed
    assert connected.state is State.RUNNING
    assert connected.ends_at == fake.world.clock.now() + timedelta(seconds=600)


async def test_a_hundred_connects_resume_once_and_the_longest_life_wins(fake: FakeHost) -> None:
    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)

    with fake.taps.recorded() as calls:
        outcomes = await asyncio.gather(*(fake.node.connect(sandbox.id, 100 + n) for n in range(100)))

    assert calls.count("vmm.restore") == 1
    assert all(connected.state is State.RUNNING for connected, _ in outcomes)
    assert fake.node.get(sandbox.id).ends_at == fake.world.clock.now() + timedelta(seconds=199)


async def test_a_hundred_wakes_at_once_are_one_resume_and_three_records(fake: FakeHost) -> None:
    sandbox = await fake.create(auto_resume=True)
    await fake.node.pause(sandbox.id)

    with fake.taps.recorded() as calls:
        outcomes = await asyncio.gather(*(fake.node.wake(sandbox.id) for _ in range(100)))

    assert calls.count("vmm.restore") == 1
    assert calls.count("store.update_sandbox") == 3
    assert {outcome.generation for outcome in outcomes} == {2}


async def test_a_wake_during_a_pause_waits_for_it_and_resumes(fake: FakeHost) -> None:
    sandbox = await fake.create(auto_resume=True)

    _, woken = await asyncio.gather(fake.node.pause(sandbox.id), fake.node.wake(sandbox.id))

    assert woken.state is State.RUNNING


async def test_traffic_does_not_wake_a_sandbox_that_was_not_asked_to(fake: FakeHost) -> None:
    sandbox = await fake.create(auto_resume=False)
    await fake.node.pause(sandbox.id)

    with pytest.raises(Conflict):
        await fake.node.wake(sandbox.id)

    assert fake.state(sandbox.id) is State.PAUSED


async def test_a_wake_that_finds_it_running_or_resuming_is_no_conflict(fake: FakeHost) -> None:
    """Somebody resumed it between the look at its route and the wake."""
    sandbox = await fake.create(auto_resume=False)
    assert (await fake.node.wake(sandbox.id)).state is State.RUNNING
    await fake.node.pause(sandbox.id)

    _, woken = await asyncio.gather(fake.node.resume(sandbox.id, 60), fake.node.wake(sandbox.id))

    assert woken.state is State.RUNNING


async def test_a_wake_that_fails_fails_for_all_and_the_next_may_succeed(fake: FakeHost) -> None:
    sandbox = await fake.create(auto_resume=True)
    await fake.node.pause(sandbox.id)
    fake.vmm.fail["restore"] = Unavailable("no")

    outcomes = await asyncio.gather(*(fake.node.wake(sandbox.id) for _ in range(20)), return_exceptions=True)

    assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
    fake.vmm.fail.clear()
    assert (await fake.node.wake(sandbox.id)).state is State.RUNNING


async def test_a_connect_to_one_that_is_killed_meanwhile_is_not_found(fake: FakeHost) -> None:
    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)
    with fake.taps.always("guest.init", Trip()) as slow:
        connecting = asyncio.create_task(fake.node.connect(sandbox.id, 60))
        await slow.reached.wait()
        await fake.node.delete(sandbox.id)

    with pytest.raises(Conflict):
        await connecting
    with pytest.raises(NotFound):
        await fake.node.connect(sandbox.id, 60)


# Egress


async def test_a_policy_is_in_force_and_recorded(fake: FakeHost) -> None:
    sandbox = await fake.create()

    changed = await fake.node.set_egress(sandbox.id, POLICY)

    assert changed.egress == POLICY
    assert fake.world.slots.policies[fake.host.live[sandbox.id].slot.index] == POLICY


async def test_a_policy_that_cannot_be_applied_or_recorded_changes_nothing(fake: FakeHost) -> None:
    sandbox = await fake.create()
    fake.world.slots.failures["apply"] = Unavailable("no firewall")
    with pytest.raises(Unavailable):
        await fake.node.set_egress(sandbox.id, POLICY)
    with fake.taps.always("store.update_sandbox", Trip(error=NoSpace("full"))), pytest.raises(NoSpace):
        await fake.node.set_egress(sandbox.id, POLICY)

    assert fake.node.get(sandbox.id).egress == EgressPolicy()
    assert fake.world.slots.policies[fake.host.live[sandbox.id].slot.index] == EgressPolicy()


async def test_a_caller_that_hangs_up_does_not_half_apply_a_policy(fake: FakeHost) -> None:
    sandbox = await fake.create()
    with fake.taps.always("slots.apply", Trip(after=True)) as slow:
        setting = asyncio.create_task(fake.node.set_egress(sandbox.id, POLICY))
        await slow.reached.wait()
        setting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await setting
        slow.go.set()
        await fake.idle()

    assert fake.node.get(sandbox.id).egress == POLICY


async def test_a_policy_outlives_a_pause(fake: FakeHost) -> None:
    sandbox = await fake.create()
    await fake.node.set_egress(sandbox.id, POLICY)
    await fake.node.pause(sandbox.id)

    await fake.node.resume(sandbox.id, 60)

    assert fake.world.slots.policies[fake.host.live[sandbox.id].slot.index] == POLICY


# What is shown


async def test_a_route_is_that_of_the_present_generation(fake: FakeHost) -> None:
    sandbox = await fake.create(ingress=IngressPolicy(allow_public_traffic=False))
    first = fake.node.route(sandbox.id)
    await fake.node.pause(sandbox.id)
    await fake.node.resume(sandbox.id, 60)

    second = fake.node.route(sandbox.id)

    assert first.key != second.key
    assert second.address == fake.host.live[sandbox.id].slot.address
    assert (second.envd_token, second.traffic_token) == (f"envd-{sandbox.id}", f"traffic-{sandbox.id}")


async def test_there_is_no_route_before_the_guest_is_ready(fake: FakeHost) -> None:
    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)
    for step in ("guest.init", "store.update_sandbox"):
        with fake.taps.recorded():
            number = {"guest.init": 9, "store.update_sandbox": 10}[step]
            slow = fake.taps.trip(number, Trip())
            resuming = asyncio.create_task(fake.node.resume(sandbox.id, 60))
            await slow.reached.wait()
            assert fake.taps.calls[-1] == step

            with pytest.raises(Conflict):
                fake.node.route(sandbox.id)
            slow.go.set()
            await resuming
        await fake.node.pause(sandbox.id)


async def test_a_signature_finds_the_sandbox_whose_token_made_it(fake: FakeHost) -> None:
    sandboxes = [await fake.create(secure=n != 1) for n in range(3)]

    def made_by(n: int) -> str:
        return f"envd-{sandboxes[n].id}"

    found = fake.node.find_by_signature(lambda token: token == made_by(2))
    assert found is not None
    assert found.id == sandboxes[2].id
    assert fake.node.find_by_signature(lambda token: token == made_by(1)) is None  # it has no token
    await fake.node.pause(sandboxes[2].id)
    assert fake.node.find_by_signature(lambda token: token == made_by(2)) is None


async def test_sandboxes_are_listed_newest_first(fake: FakeHost) -> None:
    made = []
    for _ in range(3):
        made.append((await fake.create()).id)
        await fake.world.clock.advance(1)

    assert [s.id for s in fake.node.sandboxes()] == made[::-1]


async def test_metrics_come_from_the_guest(fake: FakeHost) -> None:
    sandbox = await fake.create()

    assert (await fake.node.metrics(sandbox.id)).cpu_count == 1
    fake.world.guests.fail["metrics"] = Unavailable("mute")
    with pytest.raises(Unavailable):
        await fake.node.metrics(sandbox.id)


async def test_the_node_counts_what_is_on_it(fake: FakeHost) -> None:
    one, two, three = [await fake.create() for _ in range(3)]
    await fake.node.pause(two.id)
    fake.vmm.fail["restore"] = Unavailable("no")
    with pytest.raises(Unavailable):
        await fake.create()
    fake.vmm.fail.clear()
    (vm,) = [vm for vm in fake.world.hypervisor.alive if vm.plan.sandbox_id == three.id]
    vm.end(-9)
    await fake.became(three.id, State.ERROR)

    info = fake.node.info()

    assert (info.running, info.paused, info.errored, info.starting) == (1, 1, 1, 0)
    assert (info.create_successes, info.create_fails) == (3, 1)
    assert (info.allocated_cpu, info.paused_allocated_cpu) == (one.machine.vcpu_count, two.machine.vcpu_count)
    assert info.status == "ready"
    assert info.driver == "fake"


# Stopping


async def test_a_stop_waits_for_what_is_going_on(world: World) -> None:
    fake = await FakeHost(world).start()
    sandbox = await fake.create()
    with fake.taps.always("storage.capture_memory", Trip()) as slow:
        pausing = asyncio.create_task(fake.node.pause(sandbox.id))
        await slow.reached.wait()
        stopping = asyncio.create_task(fake.node.stop())
        await world.clock.advance(0)
        assert not stopping.done()
        slow.go.set()
        await stopping

    assert (await pausing).state is State.PAUSED
    assert world.guests.open_agents == 0


async def test_a_stopping_node_takes_no_work_and_says_so(world: World) -> None:
    fake = await FakeHost(world).start()
    sandbox = await fake.create()
    await fake.node.stop()
    node = fake.node

    for verb in (fake.create(), node.pause(sandbox.id), node.fork(sandbox.id, 1, 60), node.snapshot(sandbox.id, None),
                 node.delete(sandbox.id), node.set_timeout(sandbox.id, 60), node.set_egress(sandbox.id, POLICY),
                 node.delete_snapshot("base")):  # fmt: skip
        with pytest.raises(Unavailable):
            await verb
    assert node.info().status == "draining"
    assert len(world.hypervisor.alive) == 1


async def test_callers_of_work_that_a_stop_cuts_short_get_an_error_of_a_kind(world: World) -> None:
    fake = await FakeHost(world).start()
    sandbox = await fake.create()
    with fake.taps.always("storage.flatten_memory", Trip()) as slow:
        keeping = asyncio.create_task(fake.node.snapshot(sandbox.id, None))
        await slow.reached.wait()
        await fake.host.operations.close(grace_s=0.01)  # what a stop does, and gives more time to

        with pytest.raises(Unavailable):
            await keeping
    await fake.stop()


async def test_a_stopped_node_leaves_no_task(world: World) -> None:
    before = asyncio.all_tasks()
    fake = await FakeHost(world).start()
    for _ in range(3):
        await fake.create()
    await fake.node.pause(fake.node.sandboxes()[0].id)

    await fake.stop()
    await asyncio.sleep(0)

    assert asyncio.all_tasks() == before


async def test_an_operation_that_no_stop_can_end_is_finished_by_the_next_server(world: World) -> None:
    fake = await FakeHost(world).start()
    sandbox = await fake.create()
    with fake.taps.always("storage.capture_memory", Trip()) as stuck:
        pausing = asyncio.create_task(fake.node.pause(sandbox.id))
        await stuck.reached.wait()
        await fake.host.operations.close(grace_s=0.01)  # a stop with no patience
        with pytest.raises(Unavailable):
            await pausing
    following = await fake.crash()

    await following.start()

    assert following.state(sandbox.id) is State.RUNNING
    assert await faults(following) == []
    await following.stop()


async def test_what_is_left_half_way_by_a_deadline_is_not(fake: FakeHost) -> None:
    fake.host.settings = replace(fake.host.settings, operation_timeout_s=0.01)
    with fake.taps.always("guest.init", Trip()), pytest.raises(DeadlineExceeded):
        await fake.create()

    assert fake.host.registry.all() == []


async def test_a_listener_that_fails_changes_nothing(fake: FakeHost) -> None:
    def broken(_before: object, _after: object) -> None:
        raise RuntimeError("what?")

    fake.host.registry.listen(broken)

    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)

    assert fake.state(sandbox.id) is State.PAUSED


async def test_unknown_moves_leave_no_locks(fake: FakeHost) -> None:
    for number in range(100):
        with pytest.raises(NotFound):
            await fake.host.registry.apply(SandboxId(f"no-{number}"), Event.KILL)

    assert len(fake.host.registry._locks) == 0
