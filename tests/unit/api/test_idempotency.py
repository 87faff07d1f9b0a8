"""Two creates under one key make one sandbox."""

import asyncio

import httpx
import pytest

from agentenv.api.errors import HttpError
from agentenv.api.idempotency import KEEP_S, Replays
from agentenv.model.errors import Exhausted, Unavailable
from agentenv.testing.clock import JumpingClock
from agentenv.testing.node import FakeNode
from tests.unit.api.client import refused

BODY = {"templateID": "base"}
KEYED = {"Idempotency-Key": "once-1"}


def kept(_: object) -> bool:
    return True


async def test_the_second_create_answers_with_the_sandbox_of_the_first(api: httpx.AsyncClient, node: FakeNode) -> None:
    first = await api.post("/v2/sandboxes", json=BODY, headers=KEYED)
    second = await api.post("/v2/sandboxes", json=BODY, headers=KEYED)

    assert first.status_code == second.status_code == 201
    assert first.json() == second.json()
    assert len(node.asked) == 1


async def test_a_second_create_waits_for_the_first(api: httpx.AsyncClient, node: FakeNode) -> None:
    hold = node.hold("create")
    both = [asyncio.create_task(api.post("/sandboxes", json=BODY, headers=KEYED)) for _ in range(2)]
    await hold.reached.wait()
    hold.released.set()

    first, second = await asyncio.gather(*both)

    assert first.json() == second.json()
    assert len(node.asked) == 1


async def test_a_sandbox_that_was_deleted_is_not_replayed(api: httpx.AsyncClient, node: FakeNode) -> None:
    first = (await api.post("/v2/sandboxes", json=BODY, headers=KEYED)).json()["sandboxID"]
    await api.delete(f"/sandboxes/{first}")

    second = (await api.post("/v2/sandboxes", json=BODY, headers=KEYED)).json()["sandboxID"]
    third = (await api.post("/v2/sandboxes", json=BODY, headers=KEYED)).json()["sandboxID"]

    assert second == third != first
    assert [one.id for one in node.sandboxes()] == [second]


async def test_a_key_whose_sandbox_was_deleted_may_serve_another_request(
    api: httpx.AsyncClient, node: FakeNode
) -> None:
    first = (await api.post("/v2/sandboxes", json=BODY, headers=KEYED)).json()["sandboxID"]
    await api.delete(f"/sandboxes/{first}")

    other = await api.post("/v2/sandboxes", json=BODY | {"timeout": 5}, headers=KEYED)

    assert other.status_code == 201
    assert len(node.asked) == 2


async def test_a_key_belongs_to_one_request(api: httpx.AsyncClient, node: FakeNode) -> None:
    await api.post("/v2/sandboxes", json=BODY, headers=KEYED)

    other_body = await api.post("/v2/sandboxes", json=BODY | {"timeout": 5}, headers=KEYED)
    other_path = await api.post("/sandboxes", json=BODY, headers=KEYED)

    refused(other_body, 422, "idempotency_request_mismatch")
    refused(other_path, 422, "idempotency_request_mismatch")
    assert len(node.asked) == 1


async def test_a_create_that_failed_can_be_tried_again_with_its_key(api: httpx.AsyncClient, node: FakeNode) -> None:
    node.failures["create"] = Unavailable("not now")
    refused(await api.post("/sandboxes", json=BODY, headers=KEYED), 503, "unavailable")
    del node.failures["create"]

    assert (await api.post("/sandboxes", json=BODY, headers=KEYED)).status_code == 201


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "a,b", "\u00e9"])
async def test_a_key_that_cannot_be_one_is_refused(api: httpx.AsyncClient, node: FakeNode, key: str) -> None:
    refused(await api.post("/sandboxes", json=BODY, headers={b"Idempotency-Key": key.encode()}), 400, "invalid")

    assert node.asked == []


async def test_two_keys_are_refused(api: httpx.AsyncClient, node: FakeNode) -> None:
    headers = [("Idempotency-Key", "a"), ("Idempotency-Key", "a")]

    refused(await api.post("/sandboxes", json=BODY, headers=headers), 400, "invalid")
    assert node.asked == []


async def test_a_key_is_forgotten_in_the_end(clock: JumpingClock) -> None:
    replays: Replays[int] = Replays(clock)
    outcomes = iter(range(10))

    async def work() -> int:
        return next(outcomes)

    assert await replays.run("key", b"", work, is_current=kept) == (0, False)
    await clock.advance(KEEP_S - 1)
    assert await replays.run("key", b"", work, is_current=kept) == (0, True)
    await clock.advance(1)
    assert await replays.run("key", b"", work, is_current=kept) == (1, False)


async def test_the_oldest_outcome_makes_room_and_one_in_progress_does_not(clock: JumpingClock) -> None:
    replays: Replays[str] = Replays(clock, capacity=2)
    going = asyncio.Event()

    async def stalled() -> str:
        await going.wait()
        return "stalled"

    async def quick() -> str:
        return "quick"

    waiting = [asyncio.create_task(replays.run("a", b"", stalled, is_current=kept))]
    await asyncio.sleep(0)
    assert await replays.run("b", b"", quick, is_current=kept) == ("quick", False)
    assert await replays.run("c", b"", quick, is_current=kept) == ("quick", False)
    assert await replays.run("b", b"", quick, is_current=kept) == ("quick", False), "b made room for c"
    waiting.append(asyncio.create_task(replays.run("d", b"", stalled, is_current=kept)))
    await asyncio.sleep(0)
    with pytest.raises(Exhausted):
        await replays.run("e", b"", quick, is_current=kept)
    going.set()
    assert [one for one, _ in await asyncio.gather(*waiting)] == ["stalled", "stalled"]


async def test_all_who_wait_for_a_create_learn_that_it_failed(clock: JumpingClock) -> None:
    replays: Replays[int] = Replays(clock)
    going = asyncio.Event()

    async def fail() -> int:
        await going.wait()
        raise Unavailable("no")

    both = [asyncio.create_task(replays.run("key", b"", fail, is_current=kept)) for _ in range(2)]
    await asyncio.sleep(0)
    going.set()

    outcomes = await asyncio.gather(*both, return_exceptions=True)

    assert [type(one) for one in outcomes] == [Unavailable, Unavailable]


async def test_a_mismatch_does_not_wait(clock: JumpingClock) -> None:
    replays: Replays[int] = Replays(clock)
    going = asyncio.Event()

    async def work() -> int:
        await going.wait()
        return 1

    first = asyncio.create_task(replays.run("key", b"1", work, is_current=kept))
    await asyncio.sleep(0)
    with pytest.raises(HttpError):
        await replays.run("key", b"2", work, is_current=kept)
    going.set()
    assert await first == (1, False)
