"""The fake node keeps the contract that the API is tested on."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from agentenv.model.errors import Conflict, NotFound, Unavailable
from agentenv.model.lifecycle import State
from agentenv.model.sandbox import CreateSandbox
from agentenv.node.contract import Node
from agentenv.testing.clock import JumpingClock
from agentenv.testing.node import AUTO_RESUME_MIN_S, FakeNode
from tests.unit.api.client import NOBODY


def test_it_is_a_node(node: FakeNode) -> None:
    as_contract: Node = node

    assert as_contract.info().id == "fake-node"


async def test_a_create_that_fails_leaves_nothing_and_is_counted(node: FakeNode) -> None:
    node.failures["create"] = Unavailable("no")

    with pytest.raises(Unavailable):
        await node.create(CreateSandbox(template="base", timeout_s=5))
    with pytest.raises(NotFound):
        await node.create(CreateSandbox(template="nothing", timeout_s=5))

    assert node.sandboxes() == []
    assert (node.info().create_successes, node.info().create_fails) == (0, 2)


async def test_a_second_pause_joins_the_first(node: FakeNode) -> None:
    sandbox = node.add_sandbox()
    hold = node.hold("pause")
    both = [asyncio.create_task(node.pause(sandbox.id)) for _ in range(2)]
    await hold.reached.wait()
    hold.released.set()

    assert [one.state for one in await asyncio.gather(*both)] == [State.PAUSED, State.PAUSED]
    with pytest.raises(Conflict):
        await node.pause(sandbox.id)


@pytest.mark.parametrize("verb", ["pause", "fork", "snapshot"])
async def test_a_verb_that_fails_puts_the_sandbox_back(node: FakeNode, verb: str) -> None:
    sandbox = node.add_sandbox()
    node.failures[verb] = Unavailable("no")
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "pause": lambda: node.pause(sandbox.id),
        "fork": lambda: node.fork(sandbox.id, 2, 5),
        "snapshot": lambda: node.snapshot(sandbox.id, None),
    }

    with pytest.raises(Unavailable):
        await calls[verb]()

    assert node.get(sandbox.id) == sandbox
    assert len(node.sandboxes()) == 1


async def test_delete_cuts_short_what_is_in_progress(node: FakeNode) -> None:
    hold = node.hold("create")
    creating = asyncio.create_task(node.create(CreateSandbox(template="base", timeout_s=5)))
    await hold.reached.wait()
    (sandbox_id,) = node._sandboxes

    await node.delete(sandbox_id)

    with pytest.raises(Conflict):
        await creating
    assert node.sandboxes() == []
    with pytest.raises(NotFound):
        await node.delete(sandbox_id)


async def test_a_sandbox_being_killed_is_not_found(node: FakeNode) -> None:
    sandbox = node.add_sandbox()
    hold = node.hold("delete")
    deleting = asyncio.create_task(node.delete(sandbox.id))
    await hold.reached.wait()

    with pytest.raises(NotFound):
        node.get(sandbox.id)
    assert node.sandboxes() == []
    hold.released.set()
    await deleting


async def test_traffic_wakes_only_what_resumes_by_itself(node: FakeNode, clock: JumpingClock) -> None:
    sleeper, other = node.add_sandbox(auto_resume=True), node.add_sandbox()
    for sandbox in (sleeper, other):
        await node.pause(sandbox.id)
        with pytest.raises(Conflict):
            node.route(sandbox.id)

    woken = await node.wake(sleeper.id)

    assert woken.generation == sleeper.generation + 1
    assert woken.ends_at == clock.now() + timedelta(seconds=AUTO_RESUME_MIN_S)
    assert node.route(sleeper.id).key == (sleeper.id, woken.generation)
    with pytest.raises(Conflict):
        await node.wake(other.id)


async def test_a_name_moves_to_the_newer_snapshot(node: FakeNode) -> None:
    sandbox = node.add_sandbox()
    first = await node.snapshot(sandbox.id, "mine")
    second = await node.snapshot(sandbox.id, "mine")

    assert node.find_snapshot("team/mine:default") == second
    assert node.find_snapshot(first.id).names == ()


def test_a_signature_finds_the_running_sandbox_whose_token_made_it(node: FakeNode) -> None:
    sandbox = node.add_sandbox()
    node.add_sandbox(secure=False)

    assert node.find_by_signature(lambda token: token == f"envd-{sandbox.id}") == sandbox
    assert node.find_by_signature(lambda _: False) is None


@pytest.mark.parametrize("sandbox_id", [NOBODY, "x", ""])
async def test_what_does_not_exist_is_not_found_by_any_verb(node: FakeNode, sandbox_id: str) -> None:
    verbs: tuple[Callable[[], Awaitable[object]], ...] = (
        lambda: node.pause(sandbox_id), lambda: node.resume(sandbox_id, 5), lambda: node.connect(sandbox_id, 5),
        lambda: node.wake(sandbox_id), lambda: node.fork(sandbox_id, 1, 5), lambda: node.snapshot(sandbox_id, None),
        lambda: node.delete(sandbox_id), lambda: node.set_timeout(sandbox_id, 5), lambda: node.metrics(sandbox_id),
        lambda: node.logs(sandbox_id, limit=1),
    )  # fmt: skip
    for verb in verbs:
        with pytest.raises(NotFound):
            await verb()
