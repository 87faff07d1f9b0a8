"""A VM that ends by itself, in every state of its sandbox."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from agentenv.model.errors import Conflict, Unavailable
from agentenv.model.lifecycle import State
from agentenv.model.sandbox import OnTimeout
from agentenv.node.alive import describe
from agentenv.node.contract import Node
from agentenv.testing.host import FakeHost, Trip
from agentenv.vmm.contract import VmmExit


def lost_vms(fake: FakeHost) -> float:
    return fake.metrics.get_sample_value("agentenv_vm_lost_total") or 0.0


async def test_a_running_sandbox_becomes_an_error_with_the_reason_and_keeps_its_disk(fake: FakeHost) -> None:
    sandbox = await fake.create()
    (process,) = fake.world.hypervisor.alive

    process.end(-9, "last words")
    await fake.became(sandbox.id, State.ERROR)

    now = fake.node.get(sandbox.id)
    assert now.reason == "its virtual machine was ended by signal 9: last words"
    assert sandbox.id in fake.world.storage.owners()
    assert fake.world.slots.held() == {}
    assert lost_vms(fake) == 1
    assert fake.node.info().errored == 1
    with pytest.raises(Conflict, match="signal 9"):
        fake.node.route(sandbox.id)
    with pytest.raises(Conflict, match="signal 9"):
        await fake.node.pause(sandbox.id)
    with pytest.raises(Conflict, match="signal 9"):
        await fake.node.resume(sandbox.id, 60)


VERBS: dict[str, tuple[str, Callable[[Node, str], Awaitable[object]]]] = {
    "pausing": ("storage.capture_memory", lambda node, sandbox: node.pause(sandbox)),
    "snapshotting": ("storage.capture_memory", lambda node, sandbox: node.snapshot(sandbox, None)),
    "forking": ("storage.capture_memory", lambda node, sandbox: node.fork(sandbox, 1, 60)),
}


@pytest.mark.parametrize("state", VERBS)
async def test_a_vm_that_ends_while_it_is_written_down_fails_that_and_is_lost(fake: FakeHost, state: str) -> None:
    step, verb = VERBS[state]
    sandbox = await fake.create()
    (process,) = fake.world.hypervisor.alive
    with fake.taps.always(step, Trip()) as slow:
        acting = asyncio.ensure_future(verb(fake.node, sandbox.id))
        await slow.reached.wait()
        assert fake.state(sandbox.id) == state
        process.end(-9)
        fake.world.storage.gone.add(process.identity.pid)
        slow.go.set()

        with pytest.raises(Unavailable):
            await acting

    await fake.became(sandbox.id, State.ERROR)
    assert lost_vms(fake) == 1


AGENT_CALLS = {"freeze": "guest.freeze", "thaw": "guest.thaw"}


@pytest.mark.parametrize("call", AGENT_CALLS.values())
async def test_nobody_waits_for_the_agent_of_a_vm_that_has_ended(fake: FakeHost, call: str) -> None:
    """The hanging call is never let go: only the end of the VM can end it."""
    sandbox = await fake.create()
    (process,) = fake.world.hypervisor.alive
    with fake.taps.always(call, Trip()) as silent:
        acting = asyncio.ensure_future(fake.node.fork(sandbox.id, 1, 60))
        await silent.reached.wait()
        process.end(-9, "last words")

        with pytest.raises(Unavailable, match="signal 9: last words"):
            await acting

    await fake.became(sandbox.id, State.ERROR)
    assert fake.node.get(sandbox.id).reason == "its virtual machine was ended by signal 9: last words"
    assert lost_vms(fake) == 1


async def test_a_vm_that_ends_during_a_pause_never_looks_running_again(fake: FakeHost) -> None:
    sandbox = await fake.create()
    (process,) = fake.world.hypervisor.alive
    seen: list[State] = []
    fake.host.registry.listen(lambda _, after: seen.append(after.state) if after is not None else None)
    with fake.taps.always("guest.freeze", Trip()) as silent:
        pausing = asyncio.create_task(fake.node.pause(sandbox.id))
        await silent.reached.wait()
        process.end(-9)
        with pytest.raises(Unavailable):
            await pausing

    assert seen == [State.PAUSING, State.ERROR]


async def test_a_vm_that_ends_after_the_pause_is_recorded_is_no_loss(fake: FakeHost) -> None:
    sandbox = await fake.create()
    (process,) = fake.world.hypervisor.alive
    with fake.taps.always("instance.stop", Trip()) as slow:
        pausing = asyncio.create_task(fake.node.pause(sandbox.id))
        await slow.reached.wait()
        process.end(-9)
        slow.go.set()
        await pausing

    assert fake.state(sandbox.id) is State.PAUSED
    assert lost_vms(fake) == 0
    assert (await fake.node.resume(sandbox.id, 60)).state is State.RUNNING


async def test_a_vm_that_ends_while_it_resumes_fails_that_at_once_and_costs_nothing(fake: FakeHost) -> None:
    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)
    with fake.taps.always("guest.init", Trip()) as silent:
        resuming = asyncio.create_task(fake.node.resume(sandbox.id, 60))
        await silent.reached.wait()
        (process,) = fake.world.hypervisor.alive
        process.end(1, "panic")

        with pytest.raises(Unavailable, match="panic"):
            await resuming

    assert fake.state(sandbox.id) is State.PAUSED
    assert lost_vms(fake) == 0
    assert (await fake.node.resume(sandbox.id, 60)).state is State.RUNNING


async def test_a_vm_that_ends_in_the_moment_its_sandbox_is_running_is_noticed(fake: FakeHost) -> None:
    with fake.taps.always("store.update_sandbox", Trip()) as slow:
        creating = asyncio.create_task(fake.create())
        await slow.reached.wait()
        (process,) = fake.world.hypervisor.alive
        process.end(-9)
        slow.go.set()
        sandbox = await creating

    await fake.became(sandbox.id, State.ERROR)


async def test_a_vm_that_ends_while_it_is_deleted_is_no_loss(fake: FakeHost) -> None:
    sandbox = await fake.create()
    (process,) = fake.world.hypervisor.alive
    with fake.taps.always("instance.stop", Trip()) as slow:
        deleting = asyncio.create_task(fake.node.delete(sandbox.id))
        await slow.reached.wait()
        process.end(-9)
        slow.go.set()
        await deleting

    assert lost_vms(fake) == 0


async def test_a_lost_sandbox_that_cannot_be_recorded_is_an_error_all_the_same(fake: FakeHost) -> None:
    sandbox = await fake.create()
    (process,) = fake.world.hypervisor.alive
    with fake.taps.always("store.update_sandbox", Trip(error=Unavailable("no store"))):
        process.end(-9)
        await fake.became(sandbox.id, State.ERROR)

    await fake.node.delete(sandbox.id)


async def test_what_a_dead_vm_held_is_given_back_later_if_it_cannot_be_now(fake: FakeHost) -> None:
    sandbox = await fake.create()
    (process,) = fake.world.hypervisor.alive
    with fake.taps.always("storage.detach", Trip(error=Unavailable("busy"))):
        process.end(-9)
        await fake.became(sandbox.id, State.ERROR)
    assert fake.host.unended == {sandbox.id}

    await fake.world.clock.advance(31)
    await fake.idle()

    assert fake.host.unended == set()


@pytest.mark.parametrize(("on_timeout", "stays"), [(OnTimeout.KILL, False), (OnTimeout.PAUSE, True)])
async def test_a_lost_sandbox_goes_when_its_time_comes_unless_its_data_was_to_be_kept(
    fake: FakeHost, on_timeout: OnTimeout, stays: bool
) -> None:
    sandbox = await fake.create(timeout_s=60, on_timeout=on_timeout)
    (process,) = fake.world.hypervisor.alive
    process.end(-9)
    await fake.became(sandbox.id, State.ERROR)

    await fake.world.clock.advance(61)
    await fake.idle()

    assert fake.state(sandbox.id) is (State.ERROR if stays else State.GONE)


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (VmmExit(None, ""), "its virtual machine ended"),
        (VmmExit(0, ""), "its virtual machine was shut down or its kernel panicked"),
        (VmmExit(-11, ""), "its virtual machine was ended by signal 11"),
        (VmmExit(1, " no disk \n"), "its virtual machine failed with status 1: no disk"),
    ],
)
def test_the_reason_says_how_it_ended(ended: VmmExit, words: str) -> None:
    assert describe(ended) == words


def test_the_reason_is_bounded() -> None:
    assert len(describe(VmmExit(1, "x" * 10_000))) < 600
