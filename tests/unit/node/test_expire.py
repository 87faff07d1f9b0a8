"""Time to live: at its end a sandbox is killed or paused, as asked, and never while it was given longer."""

import asyncio
from datetime import timedelta

import pytest

from agentenv.model.errors import AgentEnvError, Bug, Conflict, DeadlineExceeded, Invalid, NoSpace, Unavailable
from agentenv.model.lifecycle import State
from agentenv.model.sandbox import OnTimeout
from agentenv.node.expire import PAUSE_AGAIN_AFTER_S, RETRY_S
from agentenv.testing.host import FakeHost, Trip, World


async def pass_(fake: FakeHost, seconds: float) -> None:
    """Let time pass, and what became due be done."""
    await fake.world.clock.advance(seconds)
    await fake.idle()
    await fake.world.clock.advance(0)


async def test_a_sandbox_is_killed_at_its_end_and_not_before(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=60)

    await pass_(fake, 59.9)
    assert fake.state(sandbox.id) is State.RUNNING
    await pass_(fake, 0.2)

    assert fake.state(sandbox.id) is State.GONE


async def test_a_sandbox_is_paused_at_its_end_if_that_was_asked(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=60, on_timeout=OnTimeout.PAUSE)

    await pass_(fake, 61)
    await fake.became(sandbox.id, State.PAUSED)
    await pass_(fake, 4000)

    assert fake.state(sandbox.id) is State.PAUSED


async def test_a_paused_sandbox_has_no_end(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=60)
    await fake.node.pause(sandbox.id)

    await pass_(fake, 4000)

    assert fake.state(sandbox.id) is State.PAUSED


async def test_many_ends_at_once_are_all_kept(fake: FakeHost) -> None:
    sandboxes = [await fake.create(timeout_s=60) for _ in range(20)]

    await pass_(fake, 61)

    assert [fake.state(s.id) for s in sandboxes] == [State.GONE] * 20


async def test_a_shorter_timeout_takes_effect_at_once(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=3600)
    await pass_(fake, 1)

    changed = await fake.node.set_timeout(sandbox.id, 5)

    assert changed.ends_at == fake.world.clock.now() + timedelta(seconds=5)
    await pass_(fake, 6)
    assert fake.state(sandbox.id) is State.GONE


async def test_a_longer_timeout_holds(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=60)

    await fake.node.set_timeout(sandbox.id, 600)
    await pass_(fake, 599)

    assert fake.state(sandbox.id) is State.RUNNING


async def test_extend_never_shortens(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=600)

    assert (await fake.node.extend(sandbox.id, 60)).ends_at == sandbox.ends_at
    extended = await fake.node.extend(sandbox.id, 1200)

    assert extended.ends_at == fake.world.clock.now() + timedelta(seconds=1200)


async def test_connect_never_shortens(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=1800)

    connected, resumed = await fake.node.connect(sandbox.id, 300)

    assert connected.ends_at == sandbox.ends_at
    assert not resumed


@pytest.mark.parametrize("timeout_s", [0, -1, 30 * 24 * 3600 + 1])
async def test_a_timeout_out_of_bounds_is_invalid_and_changes_nothing(fake: FakeHost, timeout_s: int) -> None:
    sandbox = await fake.create(timeout_s=60)

    with pytest.raises(Invalid):
        await fake.node.set_timeout(sandbox.id, timeout_s)
    with pytest.raises(Invalid):
        await fake.node.connect(sandbox.id, timeout_s)
    if timeout_s:
        with pytest.raises(Invalid):
            await fake.node.extend(sandbox.id, timeout_s)

    assert fake.node.get(sandbox.id) == sandbox


@pytest.mark.parametrize("timeout_s", [1, 30 * 24 * 3600])
async def test_the_bounds_themselves_are_fine(fake: FakeHost, timeout_s: int) -> None:
    sandbox = await fake.create(timeout_s=timeout_s)

    assert (await fake.node.set_timeout(sandbox.id, timeout_s)).state is State.RUNNING
    assert (await fake.node.extend(sandbox.id, 0)).state is State.RUNNING
    assert (await fake.node.extend(sandbox.id, timeout_s)).state is State.RUNNING


async def test_an_end_that_was_moved_while_the_sandbox_was_busy_counts(fake: FakeHost) -> None:
    """A fork holds it over its end; the timeout asked for meanwhile comes first in line, before the kill."""
    sandbox = await fake.create(timeout_s=60)
    with fake.taps.always("storage.capture_memory", Trip()) as slow:
        forking = asyncio.create_task(fake.node.fork(sandbox.id, 1, 600))
        await slow.reached.wait()
        await fake.world.clock.advance(61)
        extending = asyncio.create_task(fake.node.set_timeout(sandbox.id, 600))
        await fake.world.clock.advance(0)
        slow.go.set()
        await forking
        await extending

    await pass_(fake, 1)

    assert fake.state(sandbox.id) is State.RUNNING


async def test_an_end_that_is_being_moved_when_it_comes_has_been_moved(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=60)
    with fake.taps.always("store.update_sandbox", Trip()) as slow:
        extending = asyncio.create_task(fake.node.set_timeout(sandbox.id, 600))
        await slow.reached.wait()
        await fake.world.clock.advance(61)
        slow.go.set()
        await extending

    await pass_(fake, 1)

    assert fake.state(sandbox.id) is State.RUNNING


async def test_a_timeout_set_while_it_is_paused_by_its_end_is_a_conflict(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=60, on_timeout=OnTimeout.PAUSE)
    with fake.taps.always("storage.capture_memory", Trip()) as slow:
        await fake.world.clock.advance(61)
        await slow.reached.wait()
        extending = asyncio.create_task(fake.node.set_timeout(sandbox.id, 600))
        connecting = asyncio.create_task(fake.node.connect(sandbox.id, 600))
        await fake.world.clock.advance(0)
        slow.go.set()

        with pytest.raises(Conflict):
            await extending
        connected, resumed = await connecting

    assert resumed
    assert connected.state is State.RUNNING


async def test_an_end_that_comes_as_the_sandbox_is_paused_does_not_kill_it(fake: FakeHost) -> None:
    """The pause began between the look at the end and its turn: it has no end any more."""
    sandbox = await fake.create(timeout_s=60)
    with fake.taps.always("storage.capture_memory", Trip()) as slow:
        pausing = asyncio.create_task(fake.node.pause(sandbox.id))
        await slow.reached.wait()
        ending = asyncio.create_task(fake.node._expiry._expire(sandbox.id))
        await fake.world.clock.advance(61)
        slow.go.set()
        await pausing
        await ending

    assert fake.state(sandbox.id) is State.PAUSED


async def test_a_pause_that_fails_at_the_end_is_tried_again_and_loses_nothing(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=60, on_timeout=OnTimeout.PAUSE)
    fake.world.storage.fail["capture_memory"] = NoSpace("full")
    await pass_(fake, 61)
    assert fake.state(sandbox.id) is State.RUNNING
    tries = fake.taps.calls.count("storage.capture_memory")
    assert tries == 1
    await pass_(fake, RETRY_S - 2)
    assert fake.taps.calls.count("storage.capture_memory") == tries

    fake.world.storage.fail.clear()
    await pass_(fake, 3)

    await fake.became(sandbox.id, State.PAUSED)


async def pass_all_tries(fake: FakeHost) -> None:
    for delay_s in PAUSE_AGAIN_AFTER_S:
        await pass_(fake, delay_s + 1)


@pytest.mark.parametrize("error", [Unavailable("mute"), DeadlineExceeded("slow"), Bug("it does not freeze")])
async def test_a_guest_that_never_stands_still_at_its_end_is_given_up_with_its_disk_kept(
    fake: FakeHost, error: AgentEnvError
) -> None:
    sandbox = await fake.create(timeout_s=60, on_timeout=OnTimeout.PAUSE)
    fake.world.guests.fail["freeze"] = error
    await pass_(fake, 61)
    assert fake.state(sandbox.id) is State.RUNNING

    await pass_all_tries(fake)
    await fake.became(sandbox.id, State.ERROR)

    now = fake.node.get(sandbox.id)
    assert error.message in str(now.reason)
    assert "its disk is kept" in str(now.reason)
    assert fake.world.hypervisor.alive == []
    assert sandbox.id in fake.world.storage.owners()
    tries = [name for _, name in fake.world.guests.calls if name == "freeze"]
    assert len(tries) == 1 + len(PAUSE_AGAIN_AFTER_S)
    await pass_(fake, 10_000)
    assert fake.state(sandbox.id) is State.ERROR  # nobody asked to have it deleted


async def test_a_guest_that_stands_still_at_the_last_try_is_paused(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=60, on_timeout=OnTimeout.PAUSE)
    fake.world.guests.fail["freeze"] = Unavailable("busy")
    await pass_(fake, 61)
    for delay_s in PAUSE_AGAIN_AFTER_S[:-1]:
        await pass_(fake, delay_s + 1)
    fake.world.guests.fail.clear()

    await pass_(fake, PAUSE_AGAIN_AFTER_S[-1] + 1)

    await fake.became(sandbox.id, State.PAUSED)


async def test_a_new_end_gives_a_silent_guest_all_its_tries_again(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=60, on_timeout=OnTimeout.PAUSE)
    fake.world.guests.fail["freeze"] = Unavailable("mute")
    await pass_(fake, 61)
    for delay_s in PAUSE_AGAIN_AFTER_S[:-1]:
        await pass_(fake, delay_s + 1)

    await fake.node.set_timeout(sandbox.id, 60)
    await pass_(fake, 61)
    for delay_s in PAUSE_AGAIN_AFTER_S[:-1]:
        await pass_(fake, delay_s + 1)

    assert fake.state(sandbox.id) is State.RUNNING


async def test_what_the_host_lacks_never_gives_a_guest_up(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=60, on_timeout=OnTimeout.PAUSE)
    fake.world.storage.fail["capture_memory"] = Unavailable("the disk does not answer")

    await pass_(fake, 61)
    for _ in range(20):
        await pass_(fake, RETRY_S + 1)

    assert fake.state(sandbox.id) is State.RUNNING


async def test_a_guest_whose_end_moves_while_it_is_being_given_up_runs_on(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=60, on_timeout=OnTimeout.PAUSE)
    assert sandbox.ends_at is not None
    await fake.node.set_timeout(sandbox.id, 600)

    await fake.node._give_up(sandbox.id, sandbox.ends_at, "mute")

    assert fake.state(sandbox.id) is State.RUNNING


async def test_an_error_that_nobody_foresaw_is_not_met_again_at_once(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=60, on_timeout=OnTimeout.PAUSE)
    with fake.taps.always("storage.capture_memory", Trip(error=RuntimeError("what?"))):
        await pass_(fake, 61)
        await pass_(fake, 1)

        assert fake.taps.calls.count("storage.capture_memory") == 1
        assert fake.state(sandbox.id) is State.RUNNING


async def test_a_new_end_after_a_failed_pause_is_not_put_off(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=60, on_timeout=OnTimeout.PAUSE)
    fake.world.storage.fail["capture_memory"] = NoSpace("full")
    await pass_(fake, 61)
    fake.world.storage.fail.clear()

    await fake.node.set_timeout(sandbox.id, 5)
    await pass_(fake, 6)

    await fake.became(sandbox.id, State.PAUSED)


async def test_a_wall_clock_that_is_set_ahead_ends_what_is_over(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=3000)

    await fake.world.clock.step_wall(3001)
    await fake.idle()

    await fake.became(sandbox.id, State.GONE)


async def test_a_wall_clock_that_is_set_back_ends_nothing_early(fake: FakeHost) -> None:
    sandbox = await fake.create(timeout_s=60)

    await fake.world.clock.step_wall(-1000)
    await pass_(fake, 61)

    assert fake.state(sandbox.id) is State.RUNNING


async def test_an_end_that_passed_while_the_server_was_down_is_kept_at_the_start(world: World) -> None:
    fake = await FakeHost(world).start()
    sandbox = await fake.create(timeout_s=60)
    following = await fake.crash()
    await world.clock.advance(3600)

    await following.start()
    await world.clock.advance(0)

    await following.became(sandbox.id, State.GONE)
    await following.stop()


async def test_waiting_for_ends_leaves_no_tasks_behind(fake: FakeHost) -> None:
    for _ in range(50):
        sandbox = await fake.create()
        await fake.node.delete(sandbox.id)
    await fake.world.clock.advance(0)

    assert fake.host.tasks.statistics().running < 10
    assert len(fake.host.registry._locks) == 0
