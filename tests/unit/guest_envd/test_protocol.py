"""What all calls have in common: types, tokens, methods, bodies, connections."""

import json
import socket

import pytest

from tests.unit.guest_envd.agent import Agent, StreamError, frame

pytestmark = pytest.mark.needs("root", "mount", "envd")

UNARY = {"Content-Type": "application/json"}
STREAM = {"Content-Type": "application/connect+json"}


def test_health_needs_nothing(agent: Agent) -> None:
    answer = agent.request("GET", "/health")
    assert (answer.status, answer.body) == (204, b"")


def test_metrics_are_numbers_of_this_machine(agent: Agent) -> None:
    first = agent.request("GET", "/metrics").json()
    assert set(first) >= {
        "ts",
        "cpu_count",
        "cpu_used_pct",
        "mem_total",
        "mem_used",
        "mem_cache",
        "disk_total",
        "disk_used",
    }
    assert first["cpu_count"] >= 1
    assert 0 < first["mem_used"] < first["mem_total"]
    assert 0 < first["disk_used"] < first["disk_total"]
    assert 0 <= agent.request("GET", "/metrics").json()["cpu_used_pct"] <= 100


def test_the_variables_of_the_sandbox_can_be_read(agent: Agent) -> None:
    agent.init(envVars={"A": "b"}, sandboxId="one", templateId="two")
    assert agent.request("GET", "/envs").json() == {
        "A": "b", "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": "one", "E2B_TEMPLATE_ID": "two",
    }  # fmt: skip
    agent.init(envVars={})
    assert "A" not in agent.request("GET", "/envs").json()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/", 404),
        ("POST", "/health", 405),
        ("GET", "/init", 405),
        ("DELETE", "/files", 405),
        ("GET", "/process.Process/List", 405),
        ("POST", "/other.Service/List", 404),
    ],
)
def test_what_is_not_there_is_told_in_json(agent: Agent, method: str, path: str, status: int) -> None:
    answer = agent.request(method, path)
    body = answer.json()
    assert (answer.status, body["code"]) == (status, status)
    assert body["message"]
    assert ("allow" in answer.headers) == (status == 405)


def test_an_unknown_method_is_unimplemented(agent: Agent) -> None:
    assert agent.failure("process.Process/Nothing", {}) == (501, "unimplemented")
    assert agent.failure("filesystem.Filesystem/Nothing", {}) == (501, "unimplemented")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/process.Process/List", "application/proto"),
        ("/process.Process/List", "application/connect+json"),
        ("/process.Process/List", ""),
        ("/process.Process/Start", "application/json"),
        ("/process.Process/Start", "application/connect+proto"),
        ("/filesystem.Filesystem/Stat", "text/plain"),
        ("/filesystem.Filesystem/WatchDir", "application/grpc"),
    ],
)
def test_only_json_is_spoken(agent: Agent, path: str, kind: str) -> None:
    answer = agent.request("POST", path, b"{}", {"Content-Type": kind})
    assert (answer.status, answer.json()["code"]) == (415, 415)


def test_the_headers_clients_send_are_accepted(agent: Agent) -> None:
    unary = {
        "Content-Type": "application/json; charset=utf-8",
        "Content-Encoding": "identity",
        "Accept-Encoding": "identity",
    }
    assert agent.request("POST", "/process.Process/List", b"{}", unary).status == 200
    assert agent.request("POST", "/process.Process/List", b"", UNARY).status == 200
    stream = {"Connect-Content-Encoding": "identity", "Accept-Encoding": "zstd,gzip,br"}
    with agent.start("true", headers=stream) as started:
        assert started.response.getheader("content-encoding") is None
        started.outcome(started.started())


def test_compressed_requests_are_unimplemented(agent: Agent) -> None:
    assert agent.failure("process.Process/List", {}, {"Content-Encoding": "gzip"}) == (501, "unimplemented")
    with (
        agent.start("true", headers={"Connect-Content-Encoding": "gzip"}) as stream,
        pytest.raises(StreamError) as failed,
    ):
        next(stream)
    assert failed.value.code == "unimplemented"


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"null", b'{"path":5}', b"\xff\xfe"])
def test_a_malformed_message_is_an_invalid_argument(agent: Agent, body: bytes) -> None:
    answer = agent.request("POST", "/filesystem.Filesystem/Stat", body, UNARY)
    assert (answer.status, answer.json()["code"]) == (400, "invalid_argument")


@pytest.mark.parametrize("count", [0, 2])
def test_a_call_that_streams_its_answer_takes_one_message(agent: Agent, count: int) -> None:
    message = {"process": {"cmd": "true"}}
    with agent.stream("process.Process/Start", [message] * count) as stream, pytest.raises(StreamError) as failed:
        next(stream)
    assert failed.value.code == "invalid_argument"


def test_a_connection_serves_one_call_after_the_other(agent: Agent) -> None:
    connection = agent.connection()
    for number in range(20):
        connection.request(
            "POST", "/process.Process/Start", frame({"process": {"cmd": "echo", "args": [str(number)]}}), STREAM
        )
        assert connection.getresponse().read().endswith(b"\x02\x00\x00\x00\x02{}")
        connection.request("POST", "/process.Process/List", b"{}", UNARY)
        assert json.loads(connection.getresponse().read()) == {"processes": []}
        connection.request("POST", "/filesystem.Filesystem/Stat", b"x" * 5000, {"Content-Type": "text/plain"})
        assert connection.getresponse().read()
    connection.close()


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X: " + b"a" * 1_000_000 + b"\r\n\r\n",
    ],
)
def test_nonsense_ends_its_connection_and_nothing_else(agent: Agent, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", agent.port), timeout=30) as raw:
        raw.sendall(head)
        answer = raw.recv(100)
        assert answer == b"" or answer.split()[1].startswith(b"4"), answer
    assert agent.request("GET", "/health").status == 204


def test_a_call_waits_for_permission_to_send_its_body(agent: Agent) -> None:
    with socket.create_connection(("127.0.0.1", agent.port), timeout=30) as raw:
        raw.sendall(
            b"POST /process.Process/List HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n"
        )
        assert raw.recv(100).startswith(b"HTTP/1.1 100 ")
        raw.sendall(b"{}")
        assert b'{"processes":[]}' in raw.recv(1000)


class TestToken:
    """With an access token set, it is needed for all but health."""

    @pytest.fixture
    def agent(self, agent: Agent) -> Agent:
        agent.init(accessToken="tok")
        return agent

    @pytest.fixture(autouse=True)
    def _remove(self, agent: Agent) -> object:
        yield
        agent.headers = {}
        agent.init(accessToken=None)

    @pytest.mark.parametrize("token", [None, "", "to", "tok2", "TOK"])
    def test_without_it_there_is_no_answer_but_401(self, agent: Agent, token: str | None) -> None:
        headers = {} if token is None else {"X-Access-Token": token}
        for method, path in (
            ("GET", "/metrics"),
            ("GET", "/envs"),
            ("POST", "/process.Process/List"),
            ("POST", "/process.Process/Start"),
            ("POST", "/filesystem.Filesystem/Stat"),
        ):
            answer = agent.request(method, path, b"{}", {**UNARY, **headers})
            assert (answer.status, answer.json()["code"]) == (401, 401), path
        assert agent.request("GET", "/health", headers=headers).status == 204

    def test_with_it_all_is_as_before(self, agent: Agent) -> None:
        agent.headers = {"X-Access-Token": "tok"}
        assert agent.run("echo", "hi").stdout == b"hi\n"
        assert agent.request("GET", "/envs").status == 200

    def test_an_init_that_does_not_name_it_keeps_it(self, agent: Agent) -> None:
        agent.init(envVars={})
        assert agent.request("GET", "/envs").status == 401
        agent.init(accessToken="other")
        assert agent.request("GET", "/envs", headers={"X-Access-Token": "tok"}).status == 401
        assert agent.request("GET", "/envs", headers={"X-Access-Token": "other"}).status == 200
