"""The official Python client on the control plane of a fake node: what it raises and returns for each answer."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from e2b import (
    AuthenticationException,
    BuildException,
    RateLimitException,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
    ServiceBusyException,
    Template,
)

from agentenv.model.errors import Exhausted, NotFound, Unavailable
from agentenv.testing.node import FakeNode
from tests.unit.api.client import KEY, NOBODY

pytestmark = pytest.mark.slow

T = TypeVar("T")


@pytest.fixture
def options(port: int) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}"
    return {"api_key": KEY, "api_url": url, "sandbox_url": url, "retries": 0}


async def call(function: Callable[..., T], *args: Any, **options: Any) -> T:
    return await asyncio.to_thread(function, *args, **options)


async def test_a_sandbox_lives_its_whole_life(node: FakeNode, options: dict[str, Any]) -> None:
    metadata = {"odd": "a b&c=d%2F\u00e9+"}
    sandbox = await call(Sandbox.create, timeout=60, metadata=metadata, envs={"A": "b"}, **options)

    info = await call(sandbox.get_info)
    assert (info.state, info.metadata, info.name) == (SandboxState.RUNNING, metadata, "base")
    assert node.asked[0].env == {"A": "b"}
    found = await call(Sandbox.list(query=SandboxQuery(metadata=metadata), **options).next_items)
    assert [one.sandbox_id for one in found] == [sandbox.sandbox_id]
    await call(sandbox.set_timeout, 1000)
    assert await call(sandbox.pause) is True
    assert await call(sandbox.pause) is False
    assert (await call(sandbox.get_info)).state is SandboxState.PAUSED
    assert (await call(sandbox.connect, timeout=5)).sandbox_id == sandbox.sandbox_id
    children = await call(sandbox.fork, count=2)
    assert len({child.sandbox_id for child in children if isinstance(child, Sandbox)}) == 2
    assert len(await call(sandbox.get_metrics)) == 1
    assert await call(sandbox.kill) is True
    assert await call(sandbox.kill) is False


async def test_network_and_lifecycle_are_read_back(options: dict[str, Any]) -> None:
    network = {"allow_out": ["1.1.1.1"], "deny_out": ["0.0.0.0/0"], "allow_public_traffic": False}
    lifecycle = {"on_timeout": "pause", "auto_resume": True}
    sandbox = await call(Sandbox.create, network=network, lifecycle=lifecycle, **options)

    info = await call(sandbox.get_info)
    assert sandbox.traffic_access_token
    assert info.network == network | {"allow_out": ["1.1.1.1/32"]}
    assert info.lifecycle == lifecycle
    await call(sandbox.update_network, {"allow_internet_access": False})
    after = await call(sandbox.get_info)
    assert after.allow_internet_access is False
    assert after.network == {"allow_out": [], "deny_out": [], "allow_public_traffic": False}


async def test_snapshots_are_made_listed_and_deleted_by_name(options: dict[str, Any]) -> None:
    sandbox = await call(Sandbox.create, **options)
    snapshot = await call(sandbox.create_snapshot, name="mysnap")

    (listed,) = await call(Sandbox.list_snapshots(**options).next_items)
    assert listed.snapshot_id == snapshot.snapshot_id
    assert listed.names == ["mysnap"]
    assert (await call(Sandbox.create, "mysnap", **options)).sandbox_id
    assert await call(Template.exists, "mysnap", **options) is True
    assert await call(Sandbox.delete_snapshot, "mysnap:default", **options) is True
    assert await call(Sandbox.delete_snapshot, "mysnap:default", **options) is False
    assert await call(Template.exists, "mysnap", **options) is False


async def test_pages_are_followed_to_the_end(node: FakeNode, options: dict[str, Any]) -> None:
    made = {node.add_sandbox().id for _ in range(5)}
    pages = Sandbox.list(limit=2, **options)
    seen: list[str] = []
    while pages.has_next:
        seen += [one.sandbox_id for one in await call(pages.next_items)]

    assert len(seen) == 5
    assert set(seen) == made


async def test_each_refusal_is_the_exception_that_callers_catch(node: FakeNode, options: dict[str, Any]) -> None:
    with pytest.raises(AuthenticationException):
        await call(Sandbox.create, **options | {"api_key": "e2b_" + "f" * 40})
    with pytest.raises(SandboxException, match="404: no template"):
        await call(Sandbox.create, "nothing", **options)
    with pytest.raises(SandboxException, match="400: templateID"):
        await call(Sandbox.create, "../x", **options)
    with pytest.raises(SandboxException, match="400: timeout"):
        await call(Sandbox.create, timeout=0, **options)
    with pytest.raises(SandboxNotFoundException):
        await call(Sandbox.connect, NOBODY, **options)
    with pytest.raises(BuildException, match="501"):
        await call(Template.build, Template().from_image("debian"), "mine", **options)
    node.failures["create"] = Exhausted("no slot left")
    with pytest.raises(RateLimitException, match="no slot left"):
        await call(Sandbox.create, **options)
    node.failures["create"] = Unavailable("the guest does not answer")
    with pytest.raises(ServiceBusyException, match="does not answer"):
        await call(Sandbox.create, **options)


async def test_a_create_that_may_have_happened_is_not_sent_again(node: FakeNode, options: dict[str, Any]) -> None:
    node.failures["create"] = Unavailable("the guest does not answer")

    with pytest.raises(ServiceBusyException):
        await call(Sandbox.create, **options | {"retries": 3})

    assert len(node.asked) == 1


async def test_children_that_failed_come_beside_those_that_did_not(node: FakeNode, options: dict[str, Any]) -> None:
    node.fork_failures = {0: NotFound("the capture is gone"), 2: Exhausted("no slot")}
    sandbox = await call(Sandbox.create, **options)

    first, second, third = await call(sandbox.fork, count=3)

    assert isinstance(second, Sandbox)
    assert "the capture is gone" in str(first)
    assert isinstance(third, RateLimitException)
