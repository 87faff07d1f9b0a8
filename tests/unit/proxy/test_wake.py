"""Who is let in, who wakes whom, and what it says where the way ends."""

import asyncio
from urllib.parse import urlencode

import pytest

from agentenv.model.errors import (
    AgentEnvError,
    Conflict,
    DeadlineExceeded,
    Exhausted,
    NoSpace,
    NotFound,
    Unavailable,
)
from agentenv.model.lifecycle import State
from agentenv.node.contract import Route
from agentenv.proxy import ProxySettings
from tests.unit.proxy.test_signature import sign
from tests.unit.proxy.world import PAUSED, PRIVATE, World, on_uvloop, until

MISSING = "0f9a1b2c-3d4e-5f60-8171-92a3b4c5d6e7"


def agentenv(sandbox_id: str, port: int) -> bytes:
    return b"X-Agentenv-Sandbox-Id: %b\r\nX-Agentenv-Target-Port: %d\r\n" % (sandbox_id.encode(), port)


@on_uvloop
async def test_an_unknown_sandbox_is_not_found_in_the_words_of_each_family() -> None:
    async with World() as world, world.client() as client:
        answer = await client.ask("/health", headers=b"E2b-Sandbox-Id: %b\r\n" % MISSING.encode())
        assert answer.status == 502
        assert answer.json == {
            "sandboxId": MISSING,
            "message": "The sandbox was not found",
            "code": 502,
            "error_code": "sandbox_not_found",
        }
        answer = await client.ask("/health", headers=b"Host: 80-%b.x.y\r\n" % MISSING.encode())
        assert (answer.status, answer.json["message"]) == (502, "The sandbox was not found")
        answer = await client.ask("/health", headers=agentenv(MISSING, 80))
        assert (answer.status, answer.json["code"], answer.json["error_code"]) == (404, 404, "sandbox_not_found")


@pytest.mark.parametrize("sandbox_id", ["../../etc", "x", "%0a", "0F9A", '"', "ä"])
@on_uvloop
async def test_an_id_that_cannot_be_is_not_found(sandbox_id: str) -> None:
    async with World() as world, world.client() as client:
        answer = await client.ask("/", headers=b"E2b-Sandbox-Id: %b\r\n" % sandbox_id.encode("latin-1"))
        assert answer.status == 502
        assert answer.json["sandboxId"] == sandbox_id.lower()


@on_uvloop
async def test_an_ambiguous_request_is_refused_in_json() -> None:
    async with World() as world, world.client() as client:
        answer = await client.ask("/", headers=b"E2b-Sandbox-Id: a\r\nE2b-Sandbox-Id: a\r\n")
        assert answer.status == answer.json["code"] == 400
        assert answer.json["message"]
        assert world.seen == [(None, "GET", 400)]


@pytest.mark.parametrize(
    ("state", "words", "error_code"),
    [
        (State.PAUSED, "paused", "sandbox_paused"),
        (State.PAUSING, "paused", "sandbox_paused"),
        (State.ERROR, "in error", "sandbox_not_running"),
        (State.CREATING, "creating", "sandbox_not_running"),
    ],
)
@on_uvloop
async def test_a_sandbox_that_does_not_run_is_gone_for_one_family_and_at_rest_for_the_other(
    state: State, words: str, error_code: str
) -> None:
    async with World() as world:
        guest = await world.guest(state=state)
        answer = await world.ask(guest)
        assert (answer.status, answer.json["message"]) == (502, "The sandbox was not found")
        assert answer.json["error_code"] == error_code
        async with world.client() as client:
            answer = await client.ask(headers=agentenv(guest.sandbox.id, guest.port))
        assert (answer.status, answer.json["error_code"]) == (410, error_code)
        assert words in answer.json["message"]
        assert guest.connections == 0


@on_uvloop
async def test_a_closed_port_is_told_from_a_dead_sandbox() -> None:
    async with World() as world:
        guest = await world.guest()
        async with world.client() as client:
            answer = await client.ask(
                headers=b"E2b-Sandbox-Id: %b\r\nE2b-Sandbox-Port: 1\r\n" % guest.sandbox.id.encode()
            )
        assert answer.status == 502
        assert answer.json == {
            "sandboxId": guest.sandbox.id,
            "message": "The sandbox is running but port is not open",
            "port": 1,
            "code": 502,
            "error_code": "port_closed",
        }


@on_uvloop
async def test_a_private_sandbox_wants_its_token_everywhere_but_at_the_agent() -> None:
    async with World() as world:
        guest = await world.guest(ingress=PRIVATE)
        agent = await world.guest(ingress=PRIVATE, port=49983)
        token = b"E2B-Traffic-Access-Token: traffic-%b\r\n" % guest.sandbox.id.encode()
        for wrong in (
            b"",
            token[:-3] + b"x\r\n",
            token * 2,
            b"X-Access-Token: traffic-%b\r\n" % guest.sandbox.id.encode(),
        ):
            answer = await world.ask(guest, headers=wrong)
            assert (answer.status, answer.json["error_code"]) == (403, "traffic_token_required")
        answer = await world.ask(guest, f"/?traffic_access_token=traffic-{guest.sandbox.id}")
        assert answer.status == 403
        assert guest.connections == 0
        assert (await world.ask(guest, headers=token)).status == 200
        assert guest.header("e2b-traffic-access-token") == []
        assert (await world.ask(agent, "/health")).status == 200


@pytest.mark.parametrize(
    "path", ["/init", "//init", "/INIT", "/%69nit", "/./init", "/health/../init", "/init?x", "/sync/"]
)
@pytest.mark.parametrize("form", ["e2b", "prefix", "host"])
@on_uvloop
async def test_the_agents_control_calls_do_not_exist_on_this_side(path: str, form: str) -> None:
    async with World() as world:
        agent = await world.guest(port=49983)
        sandbox_id = agent.sandbox.id.encode()
        headers = {
            "e2b": b"E2b-Sandbox-Id: %b\r\n" % sandbox_id,
            "prefix": agentenv(agent.sandbox.id, 49983),
            "host": b"Host: 49983-%b.x.y\r\n" % sandbox_id,
        }[form]
        async with world.client() as client:
            answer = await client.ask(
                "/proxy" * (form == "prefix") + path,
                method="POST",
                headers=headers + b"X-Agentenv-Control: s\r\n",
                body=b"{}",
            )
        assert (answer.status, answer.json["code"]) == (404, 404)
        assert agent.connections == 0


@on_uvloop
async def test_the_agent_gets_its_token_and_never_the_nodes() -> None:
    async with World() as world:
        agent = await world.guest(port=49983)
        answer = await world.ask(
            agent,
            "/process.Process/List",
            method="POST",
            headers=b"X-Access-Token: t\r\nX-Agentenv-Control: s\r\n",
            body=b"{}",
        )
        assert answer.status == 200
        assert agent.header("x-access-token") == ["t"]
        assert agent.header("x-agentenv-control") == []


@on_uvloop
async def test_a_request_wakes_a_sandbox_that_may_be_woken_and_arrives_with_its_body() -> None:
    async with World() as world:
        guest = await world.guest(auto_resume=True, **PAUSED)
        answer = await world.ask(guest, method="POST", body=b"x" * 300_000)
        assert answer.body == b"x" * 300_000
        assert world.node.get(guest.sandbox.id).state is State.RUNNING


@on_uvloop
async def test_nothing_is_read_of_a_body_before_the_sandbox_is_awake() -> None:
    async with World(ProxySettings(continue_timeout_s=0.01)) as world:
        hold = world.node.hold("resume")
        guest = await world.guest(auto_resume=True, **PAUSED)
        async with world.client() as client:
            client.send(
                b"POST / HTTP/1.1\r\nHost: x\r\n%bContent-Length: 5\r\nExpect: 100-continue\r\n\r\n" % guest.headers
            )
            await hold.reached.wait()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.reader.read(1)
            hold.released.set()
            assert (await client.head()).status == 100
            client.send(b"hello")
            assert (await client.answer()).body == b"hello"


@on_uvloop
async def test_many_requests_wake_it_once() -> None:
    async with World() as world:
        hold = world.node.hold("resume")
        guest = await world.guest(auto_resume=True, **PAUSED)
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(world.ask(guest)) for _ in range(20)]
            await until(lambda: len(world.tasks) == 20, "not all have come in")
            hold.released.set()
        assert {task.result().status for task in asking} == {200}
        assert world.node.get(guest.sandbox.id).generation == 2


@on_uvloop
async def test_a_client_that_leaves_does_not_stop_the_waking() -> None:
    async with World() as world:
        hold = world.node.hold("resume")
        guest = await world.guest(auto_resume=True, **PAUSED)
        async with world.client() as client:
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n" % guest.headers)
            await hold.reached.wait()
        await until(lambda: not world.connections, "the server has not noticed")
        hold.released.set()
        await until(lambda: not world.tasks, "somebody still waits for the client")
        assert world.node.get(guest.sandbox.id).state is State.RUNNING
        assert guest.heads == []


@pytest.mark.parametrize(
    ("error", "status", "error_code"),
    [
        (Conflict("off"), 502, "sandbox_paused"),
        (NotFound("gone"), 502, "sandbox_not_found"),
        (DeadlineExceeded("slow"), 504, "wake_deadline"),
        (Unavailable("vmm died"), 502, "wake_unavailable"),
        (Exhausted("no slots"), 429, "wake_exhausted"),
        (NoSpace("full"), 507, "wake_no_space"),
    ],
)
@on_uvloop
async def test_a_sandbox_that_does_not_wake_says_why(error: AgentEnvError, status: int, error_code: str) -> None:
    async with World() as world:
        world.node.failures["resume"] = error
        guest = await world.guest(auto_resume=True, **PAUSED)
        answer = await world.ask(guest)
        assert (answer.status, answer.json["code"], answer.json["error_code"]) == (status, status, error_code)


@on_uvloop
async def test_waking_has_a_deadline() -> None:
    async with World(ProxySettings(wake_timeout_s=0.02)) as world:
        world.node.hold("resume")
        guest = await world.guest(auto_resume=True, **PAUSED)
        answer = await world.ask(guest)
        assert (answer.status, answer.json["error_code"]) == (504, "wake_deadline")


@on_uvloop
async def test_whoever_may_not_pass_wakes_nobody() -> None:
    async with World() as world:
        private = await world.guest(auto_resume=True, ingress=PRIVATE, **PAUSED)
        assert (await world.ask(private)).status == 403
        agent = await world.guest(auto_resume=True, port=49983, **PAUSED)
        for headers in (b"", b"X-Access-Token: wrong\r\n", b"X-API-Key: x\r\n"):
            answer = await world.ask(agent, "/process.Process/List", method="POST", body=b"{}", headers=headers)
            assert (answer.status, answer.json["code"]) == (401, 401)
        assert (await world.ask(agent, "/init", method="POST", body=b"{}")).status == 404
        for guest in (private, agent):
            assert world.node.get(guest.sandbox.id).state is State.PAUSED


@pytest.mark.parametrize("headers", [b"X-Access-Token: envd-%b\r\n", b""])
@on_uvloop
async def test_the_agents_token_wakes_it_and_so_does_asking_for_its_health(headers: bytes) -> None:
    async with World() as world:
        agent = await world.guest(auto_resume=True, port=49983, **PAUSED)
        answer = await world.ask(agent, "/health", headers=headers and headers % agent.sandbox.id.encode())
        assert answer.status == 200
        assert world.node.get(agent.sandbox.id).state is State.RUNNING


@on_uvloop
async def test_a_signed_link_finds_its_sandbox() -> None:
    async with World() as world:
        await world.guest(port=49983)
        agent = await world.guest(port=49983)
        signature = sign("/a b", "read", "user", f"envd-{agent.sandbox.id}", None)
        query = urlencode({"path": "/a b", "username": "user", "signature": signature})
        async with world.client() as client:
            assert (await client.ask(f"/files?{query}")).status == 200
            assert agent.target == f"/files?{query}"
            answer = await client.ask(f"/files?{query}x")
            assert (answer.status, answer.json["message"]) == (502, "The sandbox was not found")
            answer = await client.ask(f"/files?{query}", method="POST", body=b"")
            assert answer.status == 502


@on_uvloop
async def test_a_new_generation_gets_new_connections() -> None:
    async with World() as world:
        guest = await world.guest(auto_resume=True)
        await world.ask(guest)
        assert (guest.connections, guest.open) == (1, 1)
        await world.node.pause(guest.sandbox.id)
        await world.ask(guest)  # wakes it
        assert guest.connections == 2
        await until(lambda: guest.open == 1, "the connection to the old VM is still open")


@on_uvloop
async def test_a_sandbox_that_stops_is_cut_off_at_once_when_the_node_says_so() -> None:
    async with World() as world:
        guest = await world.guest()
        await world.ask(guest)
        await world.node.pause(guest.sandbox.id)
        world.proxy.forget(guest.sandbox.id)
        await guest.closed.wait()
        assert world.proxy.statistics().guests == 0
        world.proxy.forget(guest.sandbox.id)
        world.proxy.forget("unknown")


@on_uvloop
async def test_a_sandbox_that_is_replaced_while_being_connected_to_is_connected_to_again() -> None:
    async with World() as world:
        guest = await world.guest()
        look, looks = world.node.route, 0

        def look_and_replace(sandbox_id: str) -> Route:
            nonlocal looks
            looks += 1
            way = look(sandbox_id)
            if looks == 1:
                asyncio.get_running_loop().call_soon(lambda: world.node.change(sandbox_id, generation=2))
            return way

        world.node.route = look_and_replace  # type: ignore[method-assign]
        assert (await world.ask(guest, method="POST", body=b"once")).body == b"once"
        assert looks == 2
        assert len(guest.heads) == 1


@pytest.mark.parametrize("state", [State.SNAPSHOTTING, State.FORKING, State.PAUSING])
@on_uvloop
async def test_a_sandbox_that_is_only_being_captured_keeps_its_connections(state: State) -> None:
    async with World(ProxySettings(sweep_interval_s=0.005)) as world:
        guest = await world.guest()
        await world.ask(guest)
        world.node.change(guest.sandbox.id, state=state)
        for _ in range(5):
            await asyncio.sleep(0.005)
        assert guest.open == 1
        world.node.change(guest.sandbox.id, state=State.PAUSED)
        await guest.closed.wait()
