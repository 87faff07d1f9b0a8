"""kill -9 of the server at a random moment of every verb: nothing lost, nothing left.

Each round is seeded. Half of them die at a failpoint (a chosen step of the verb),
half after a random time. A new server must then show every sandbox running, paused
or gone, as the verb allows, with its memory and disk, and the host must be clean.
"""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import pytest

from tests.running import running_server
from tests.server import Leaks, Server, leaks, left_after

pytestmark = [
    pytest.mark.fault,
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.needs("root", "qemu", "netns", "nft", "tun", "guest", "base"),
]

ROUNDS: Final = 50
VERBS: Final = ("create", "pause", "resume", "fork", "delete")
STEPS: Final = {
    "create": ("create.restored", "create.journalled", "create.ready", "create.done"),
    "pause": ("pause.stopped", "pause.state_saved", "pause.memory_saved", "pause.recorded"),
    "resume": ("resume.restored", "resume.journalled", "resume.ready"),
    "fork": (
        "fork.stopped", "fork.state_saved", "fork.memory_saved", "fork.disk_sealed", "fork.source_runs",
        "fork_child.restored", "fork_child.journalled", "fork_child.ready", "fork_child.done",
    ),
    "delete": ("delete.begun", "delete.vm_gone", "delete.storage_gone"),
}  # fmt: skip
MOST_S: Final = {"create": 0.35, "pause": 0.2, "resume": 0.3, "fork": 0.7, "delete": 0.15}


@pytest.fixture(scope="module")
def crashing() -> Iterator[Server]:
    with running_server(prefix="aek", net=121) as server:
        yield server


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_killed_server_loses_and_leaks_nothing(crashing: Server, seed: int) -> None:
    chance = random.Random(seed)
    verb = VERBS[seed % len(VERBS)]
    step = chance.choice(STEPS[verb]) if seed % 2 else None
    server = crashing
    server.stop()
    # The sandbox that the round works on is created first: only the second create may die.
    server.start(AENV_FAILPOINTS=f"{step}=kill" + ("@2" if verb == "create" else "") if step else "")
    clean = leaks(server)
    sandbox = server.create()
    _write_marker(server, sandbox)
    if verb == "resume":
        assert server.call("POST", f"/sandboxes/{sandbox}/pause", {})[0] == 204

    _call_and_die(server, verb, sandbox, None if step else chance.uniform(0, MOST_S[verb]))
    server.start()

    _check(server, verb, sandbox)
    server.delete_all()
    server.wait_until(lambda: server.call("GET", "/v2/sandboxes")[1] == [], "all sandboxes to be gone")
    _check_clean(server, clean)


@pytest.mark.parametrize("step", ["spare.renamed", "spare.furnished"])
def test_a_server_killed_while_a_waiting_vmm_becomes_a_sandbox_s_leaves_neither(crashing: Server, step: str) -> None:
    server = crashing
    server.stop()
    server.start(AENV_FAILPOINTS=f"{step}=kill")
    clean = leaks(server)
    server.wait_until(lambda: server.metric("agentenv_spare_vmms") > 0, "a VMM to wait")

    _call_and_die(server, "create", "", None)
    server.start()

    assert server.call("GET", "/v2/sandboxes")[1] == []
    _check_clean(server, clean)


def _call_and_die(server: Server, verb: str, sandbox: str, delay_s: float | None) -> None:
    request = {
        "create": ("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 600}),
        "pause": ("POST", f"/sandboxes/{sandbox}/pause", {}),
        "resume": ("POST", f"/v2/sandboxes/{sandbox}/connect", {"timeout": 600}),
        "fork": ("POST", f"/sandboxes/{sandbox}/fork", {"count": 2, "timeout": 600}),
        "delete": ("DELETE", f"/sandboxes/{sandbox}", None),
    }[verb]

    def call() -> None:
        with suppress(OSError):  # the connection dies with the server
            server.call(*request)

    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call)
        if delay_s is None:
            server.wait_dead()
        else:
            threading.Event().wait(delay_s)  # the random moment itself, not a wait for anything
            server.kill()
        calling.result(60)


def _check(server: Server, verb: str, sandbox: str) -> None:
    _, listed = server.call("GET", "/v2/sandboxes")
    states = {item["sandboxID"]: item["state"] for item in listed}
    for each in states:
        _, detail = server.call("GET", f"/sandboxes/{each}")
        assert not detail.get("error"), (verb, detail, server.tail())
    if verb != "delete":
        assert sandbox in states, (verb, "the sandbox is lost", server.tail())
    for each, state in states.items():
        if state == "paused":
            status, body = server.call("POST", f"/v2/sandboxes/{each}/connect", {"timeout": 600})
            assert status == 201, body
        expected = "marker" if each == sandbox or verb == "fork" else ""
        assert _read_marker(server, each) == expected, (verb, each, state)


def _write_marker(server: Server, sandbox: str) -> None:
    script = "printf mar >/dev/shm/marker; printf ker >/root/marker"
    done = server.aenv("exec", "-u", "root", sandbox, "--", "/bin/sh", "-c", script)
    assert done.returncode == 0, done.stderr


def _read_marker(server: Server, sandbox: str) -> str:
    done = server.aenv(
        "exec", "-u", "root", sandbox, "--", "/bin/sh", "-c", "cat /dev/shm/marker /root/marker 2>/dev/null || true"
    )
    assert done.returncode == 0, (done.stderr, server.tail())
    return done.stdout.decode()


def _check_clean(server: Server, before: Leaks) -> None:
    with suppress(AssertionError):  # said below, with what is left
        server.wait_until(lambda: not left_after(server, before), "what the round made to be gone", timeout_s=30)
    left = left_after(server, before)
    assert not left, (left, server.tail())
