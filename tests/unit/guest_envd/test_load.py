"""Many streams, slow readers, and what they cost."""

import http.client
import resource
from contextlib import ExitStack

import pytest

from tests.unit.guest_envd.agent import Agent, StreamError, wait_gone, wait_until

pytestmark = [pytest.mark.needs("root", "mount", "envd"), pytest.mark.slow]


def selector(pid: int) -> dict[str, dict[str, int]]:
    return {"process": {"pid": pid}}


def test_an_idle_agent_is_small(agent: Agent) -> None:
    agent.run("true")
    print(f"idle agent: {agent.rss_kib()} KiB resident")
    assert agent.rss_kib() < 8 << 10


def test_a_thousand_streams_are_open_and_all_end(agent: Agent) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    before = agent.rss_kib()
    with ExitStack() as stack:
        first = stack.enter_context(agent.start("cat"))
        pid = first.started()
        others = [stack.enter_context(agent.stream("process.Process/Connect", selector(pid))) for _ in range(1000)]
        for stream in others:
            assert stream.started() == pid
        print(f"a thousand streams: {agent.rss_kib() - before} KiB more")
        agent.call("process.Process/SendInput", {**selector(pid), "input": {"stdin": "aGk="}})
        agent.call("process.Process/CloseStdin", selector(pid))
        for stream in [first, *others]:
            outcome = stream.outcome(pid)
            assert (outcome.stdout, outcome.end["exitCode"]) == (b"hi", 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert agent.request("GET", "/health").status == 204


def test_a_reader_that_stopped_neither_stops_the_process_nor_fills_the_memory(agent: Agent) -> None:
    before = agent.rss_kib()
    script = "head -c 100000000 /dev/zero; echo finished > flag; read x"
    with agent.start("/bin/sh", "-c", script) as asleep:
        pid = asleep.started()
        flag = {"path": "flag"}
        wait_until(lambda: agent.unary("filesystem.Filesystem/Stat", flag).status == 200, limit_s=30)
        assert agent.rss_kib() - before < 8000
        with pytest.raises(StreamError) as failed:
            asleep.outcome(pid)
        assert failed.value.code == "resource_exhausted"
        with agent.stream("process.Process/Connect", selector(pid)) as again:
            again.started()
            agent.call("process.Process/CloseStdin", selector(pid))
            assert again.outcome(pid).end["exited"] is True


def test_a_process_without_readers_runs_on(agent: Agent) -> None:
    with agent.start("/bin/sh", "-c", "head -c 300000000 /dev/zero; exec sleep 60") as stream:
        pid = stream.started()
    before = agent.rss_kib()
    wait_until(lambda: agent.run("cat", f"/proc/{pid}/comm").stdout == b"sleep\n", limit_s=30)
    assert agent.rss_kib() - before < 4000
    agent.call("process.Process/SendSignal", {**selector(pid), "signal": "SIGNAL_SIGKILL"})
    wait_gone(pid)


def test_a_slow_reader_that_goes_on_gets_every_byte(agent: Agent) -> None:
    with agent.start("head", "-c", "30000000", "/dev/zero", stdin=False) as stream:
        pid = stream.started()
        total = 0
        ended = False
        for message in stream:
            event = message["event"]
            if "data" in event:
                total += len(event["data"]["stdout"]) // 4 * 3 - event["data"]["stdout"].count("=")
            ended = ended or "end" in event
    assert (total, ended) == (30_000_000, True)
    assert pid not in agent.pids()


def test_a_kill_is_told_even_when_the_reader_lags(agent: Agent) -> None:
    with agent.start("/bin/sh", "-c", "while :; do head -c 1000000 /dev/zero; done", stdin=False) as stream:
        pid = stream.started()
        agent.call("process.Process/SendSignal", {**selector(pid), "signal": "SIGNAL_SIGKILL"})
        assert stream.outcome(pid).end["status"] == "signal: killed"


def test_connections_from_inside_the_sandbox_are_limited_and_given_back(agent: Agent) -> None:
    held: list[http.client.HTTPConnection] = []
    refused = 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for _ in range(1200):
        connection = agent.connection()
        connection.connect()
        held.append(connection)
    for connection in held:
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
        except (ConnectionError, http.client.HTTPException):
            refused += 1
    for connection in held:
        connection.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert refused >= 176

    def answers() -> bool:
        try:
            return agent.request("GET", "/health").status == 204
        except (ConnectionError, http.client.HTTPException):
            return False

    wait_until(answers)
