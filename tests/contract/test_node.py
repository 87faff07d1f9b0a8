"""One suite over every node: the service on fakes of its parts, and the fake that edges are tested on."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import pytest

from agentenv.aio.clock import Clock
from agentenv.model.errors import AlreadyExists, Conflict, Invalid, NotFound
from agentenv.model.lifecycle import State
from agentenv.model.sandbox import CreateSandbox, Sandbox
from agentenv.model.snapshot import Source
from agentenv.node.contract import Node
from agentenv.testing.clock import JumpingClock
from agentenv.testing.host import FakeHost, World, log_briefly
from agentenv.testing.node import FakeNode

NOBODY = "6e0e5a52-0000-4000-8000-000000000000"


class Subject:
    """A started node with the template ``base``, and the clock that it goes by."""

    def __init__(self, node: Node, clock: Clock) -> None:
        self.node = node
        self.clock = clock

    async def create(self, **request: object) -> Sandbox:
        asked = {"template": "base", "timeout_s": 300, **request}
        return await self.node.create(CreateSandbox(**asked))  # type: ignore[arg-type]  # names are checked by it


@pytest.fixture(params=["service", "fake"])
async def subject(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    log_briefly()
    if request.param == "fake":
        fake = FakeNode(clock=JumpingClock())
        yield Subject(fake, fake.clock)
        await fake.close()
    else:
        host = await FakeHost(World(tmp_path)).start()
        yield Subject(host.node, host.world.clock)
        await host.stop()


async def test_a_new_sandbox_runs_from_its_first_generation(subject: Subject) -> None:
    sandbox = await subject.create(metadata={"a": "b"})

    assert (sandbox.state, sandbox.generation) == (State.RUNNING, 1)
    assert sandbox.ends_at == subject.clock.now() + timedelta(seconds=300)
    assert subject.node.get(sandbox.id) == sandbox
    assert subject.node.sandboxes() == [sandbox]


async def test_a_pause_and_a_resume_change_the_generation_only(subject: Subject) -> None:
    sandbox = await subject.create()

    paused = await subject.node.pause(sandbox.id)
    resumed = await subject.node.resume(sandbox.id, 60)

    assert (paused.state, paused.ends_at) == (State.PAUSED, None)
    assert paused.capture is not None
    assert (resumed.state, resumed.generation, resumed.capture) == (State.RUNNING, 2, None)
    assert resumed.ends_at == subject.clock.now() + timedelta(seconds=60)


@pytest.mark.parametrize("count", [2, 5])
async def test_pauses_at_once_are_one(subject: Subject, count: int) -> None:
    sandbox = await subject.create()

    outcomes = await asyncio.gather(*(subject.node.pause(sandbox.id) for _ in range(count)))

    assert {outcome.state for outcome in outcomes} == {State.PAUSED}
    with pytest.raises(Conflict):
        await subject.node.pause(sandbox.id)


async def test_forks_at_once_each_have_their_own_children(subject: Subject) -> None:
    source = await subject.create()

    both = await asyncio.gather(subject.node.fork(source.id, 1, 60), subject.node.fork(source.id, 2, 60))

    children = [child.sandbox for forked in both for child in forked]
    assert [len(forked) for forked in both] == [1, 2]
    assert len({child.id for child in children if child is not None} | {source.id}) == 4
    assert subject.node.get(source.id).state is State.RUNNING


async def test_snapshots_at_once_are_each_kept(subject: Subject) -> None:
    sandbox = await subject.create()

    first, second = await asyncio.gather(*(subject.node.snapshot(sandbox.id, None) for _ in range(2)))

    assert first.id != second.id
    assert {one.id for one in subject.node.snapshots(Source.SANDBOX)} == {first.id, second.id}


async def test_a_name_moves_to_the_newer_snapshot_but_never_from_a_template(subject: Subject) -> None:
    sandbox = await subject.create()
    first = await subject.node.snapshot(sandbox.id, "mine")
    second = await subject.node.snapshot(sandbox.id, "mine")

    assert subject.node.find_snapshot("team/mine:default").id == second.id
    assert subject.node.find_snapshot(first.id).names == ()
    with pytest.raises(AlreadyExists):
        await subject.node.snapshot(sandbox.id, "base")
    assert subject.node.find_snapshot("base").source is Source.BUILD
    assert subject.node.get(sandbox.id).state is State.RUNNING


@pytest.mark.parametrize("timeout_s", [0, -1, 30 * 24 * 3600 + 1])
async def test_a_time_out_of_bounds_is_invalid_and_changes_nothing(subject: Subject, timeout_s: int) -> None:
    sandbox = await subject.create()
    with pytest.raises(Invalid):
        await subject.create(timeout_s=timeout_s)
    with pytest.raises(Invalid):
        await subject.node.fork(sandbox.id, 1, timeout_s)
    paused = await subject.node.pause(sandbox.id)
    with pytest.raises(Invalid):
        await subject.node.resume(sandbox.id, timeout_s)

    assert subject.node.sandboxes() == [paused]


async def test_what_does_not_fit_the_state_is_a_conflict(subject: Subject) -> None:
    sandbox = await subject.create()
    with pytest.raises(Conflict):
        await subject.node.resume(sandbox.id, 60)
    await subject.node.pause(sandbox.id)
    refused: tuple[Callable[[], Awaitable[object]], ...] = (
        lambda: subject.node.fork(sandbox.id, 1, 60), lambda: subject.node.snapshot(sandbox.id, None),
        lambda: subject.node.set_timeout(sandbox.id, 60), lambda: subject.node.metrics(sandbox.id),
        lambda: subject.node.wake(sandbox.id),
    )  # fmt: skip
    for verb in refused:
        with pytest.raises(Conflict):
            await verb()
    with pytest.raises(Conflict):
        subject.node.route(sandbox.id)


async def test_connect_resumes_and_never_shortens(subject: Subject) -> None:
    sandbox = await subject.create(timeout_s=1800)

    connected, was_resumed = await subject.node.connect(sandbox.id, 60)
    assert (connected.ends_at, was_resumed) == (sandbox.ends_at, False)
    await subject.node.pause(sandbox.id)
    connected, was_resumed = await subject.node.connect(sandbox.id, 60)

    assert (connected.state, was_resumed) == (State.RUNNING, True)


async def test_traffic_wakes_what_resumes_by_itself(subject: Subject) -> None:
    sandbox = await subject.create(auto_resume=True)
    await subject.node.pause(sandbox.id)

    woken = await subject.node.wake(sandbox.id)

    assert subject.node.route(sandbox.id).key == (sandbox.id, woken.generation)


@pytest.mark.parametrize("sandbox_id", [NOBODY, "x", "", "../x"])
async def test_what_is_not_there_is_not_found_by_any_verb(subject: Subject, sandbox_id: str) -> None:
    node = subject.node
    verbs: tuple[Callable[[], Awaitable[object]], ...] = (
        lambda: node.pause(sandbox_id), lambda: node.resume(sandbox_id, 5), lambda: node.connect(sandbox_id, 5),
        lambda: node.wake(sandbox_id), lambda: node.fork(sandbox_id, 1, 5), lambda: node.snapshot(sandbox_id, None),
        lambda: node.delete(sandbox_id), lambda: node.set_timeout(sandbox_id, 5), lambda: node.metrics(sandbox_id),
        lambda: node.logs(sandbox_id, limit=1), lambda: node.extend(sandbox_id, 5),
    )  # fmt: skip
    for verb in verbs:
        with pytest.raises(NotFound):
            await verb()
    with pytest.raises(NotFound):
        node.find_snapshot("nothing")


async def test_what_is_deleted_is_gone_and_its_snapshots_stay(subject: Subject) -> None:
    sandbox = await subject.create()
    kept = await subject.node.snapshot(sandbox.id, "kept")

    await subject.node.delete(sandbox.id)

    with pytest.raises(NotFound):
        subject.node.get(sandbox.id)
    assert (await subject.create(template="kept")).template_id == kept.id
    await subject.node.delete_snapshot("kept")
    with pytest.raises(NotFound):
        await subject.create(template="kept")
