"""Sandboxes on a real server: what guests may do, and what happens when one of them, or a client, goes wrong."""

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websockets.sync.client
from e2b import Sandbox

from tests.running import running_on, running_server, small_disk
from tests.server import Server, leaks, left_after

pytestmark = [
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.needs("root", "qemu", "netns", "nft", "tun", "guest", "base"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(prefix="aev", net=125) as running:
        yield running


@pytest.fixture
def sandbox(server: Server) -> Iterator[str]:
    made = server.create()
    yield made
    server.call("DELETE", f"/sandboxes/{made}")


def run(server: Server, sandbox: str, script: str, *, user: str = "root", timeout_s: float = 300) -> str:
    """Standard output of a shell script in the sandbox, which must succeed."""
    done = server.aenv("exec", "-u", user, sandbox, "--", "/bin/bash", "-lc", script, timeout_s=timeout_s)
    assert done.returncode == 0, (script, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout.decode()


def detail(server: Server, sandbox: str) -> dict[str, Any]:
    status, body = server.call("GET", f"/sandboxes/{sandbox}")
    assert status == 200, body
    return dict(body)


def vmm_of(server: Server, sandbox: str) -> int:
    """Found by its directory: the arguments of one that was started ahead of need name nobody."""
    (pid_file,) = (server.runtime / "vm").glob(f"{sandbox}.*/pid")
    return int(pid_file.read_text())


class TestPackages:
    """As they install on this host, packages install in a sandbox."""

    def test_pip(self, server: Server, sandbox: str) -> None:
        script = "pip install -q --disable-pip-version-check six && python3 -c 'import six; print(six.__name__)'"
        out = run(server, sandbox, script, user="user")

        assert out.endswith("six\n")

    def test_npm(self, server: Server, sandbox: str) -> None:
        script = "mkdir /tmp/n && cd /tmp/n && npm install --silent is-number && node -p \"require('is-number')(7)\""
        out = run(server, sandbox, script, user="user")

        assert out.endswith("true\n")

    def test_apt(self, server: Server, sandbox: str) -> None:
        script = "apt-get update -qq && apt-get install -y -qq hello >/dev/null && hello"
        out = run(server, sandbox, script, timeout_s=600)

        assert out.endswith("Hello, world!\n")


class TestIsolation:
    def test_a_guest_reaches_neither_the_server_nor_a_sibling_nor_what_is_private(
        self, server: Server, sandbox: str
    ) -> None:
        sibling = server.create()
        try:
            targets = [(address, 49983) for address in _slot_addresses(server)]
            assert len(targets) >= 2
            targets += [(_uplink_address(), server.port), ("169.254.0.22", server.port), ("169.254.169.254", 80)]
            targets += [("10.0.0.1", 80), ("192.168.0.1", 80), ("172.16.0.1", 80), ("100.64.0.1", 80)]
            # What may be reached shows that the probe can tell, and the host that there is something to reach.
            targets += [("169.254.0.22", 53)]
            assert sum(_answers(address, 49983) for address in _slot_addresses(server)) >= 2
            reach = "timeout 5 bash -c 'exec 3<>/dev/tcp/{}/{}' 2>/dev/null && echo open {} &"
            script = "\n".join(reach.format(host, port, host) for host, port in targets) + "\nwait; echo done"

            assert run(server, sandbox, script) == "open 169.254.0.22\ndone\n"
            assert run(server, sandbox, "ip -6 route show default; ip -6 addr show scope global") == ""
        finally:
            server.call("DELETE", f"/sandboxes/{sibling}")

    def test_without_internet_there_are_no_names_either(self, server: Server) -> None:
        made = server.create(allow_internet_access=False)
        try:
            assert run(server, made, "getent hosts example.org || echo none") == "none\n"
        finally:
            server.call("DELETE", f"/sandboxes/{made}")

    def test_the_agent_takes_no_orders_from_inside_or_through_the_proxy(self, server: Server, sandbox: str) -> None:
        inside = "curl -s -o /dev/null -w '%{http_code}' -X POST http://127.0.0.1:49983/init -d '{}'"

        assert run(server, sandbox, inside) == "401"
        status, _ = _through_proxy(server, sandbox, 49983, "/init", method="POST")
        assert status in (401, 403, 404)


class TestPorts:
    def test_http_by_every_way_and_websocket(self, server: Server, sandbox: str) -> None:
        project = Path(__file__).parents[2] / "examples/demo_project/web.py"
        server.aenv("exec", "-i", sandbox, "--", "/bin/bash", "-c", "cat >/tmp/web.py", stdin=project.read_bytes())
        listening = "until ss -Hltn 'sport = :8000' | grep -q .; do sleep 0.1; done"
        run(server, sandbox, f"nohup python3 /tmp/web.py >/dev/null 2>&1 & {listening}")

        by_headers = _through_proxy(server, sandbox, 8000, "/a?b=c%20d")
        by_prefix = _through_proxy(server, sandbox, 8000, "/proxy/a?b=c%20d")
        by_host = _get(f"{server.url}/a?b=c%20d", {"Host": f"8000-{sandbox}.sbx.localhost"})
        with websockets.sync.client.connect(
            server.url.replace("http", "ws") + "/", additional_headers=_routing(sandbox, 8001)
        ) as websocket:
            websocket.send("shout")
            said = websocket.recv()

        for status, body in (by_headers, by_prefix, by_host):
            assert (status, body) == (200, "hello from the sandbox, you asked for /a?b=c%20d\n")
        assert said == "SHOUT"

    def test_errors_say_what_is_wrong(self, server: Server, sandbox: str) -> None:
        closed = _through_proxy(server, sandbox, 9, "/")
        unknown = _through_proxy(server, "00000000-0000-4000-8000-000000000000", 80, "/")
        server.call("POST", f"/sandboxes/{sandbox}/pause", {})
        paused = _through_proxy(server, sandbox, 80, "/")

        codes = [json.loads(body)["error_code"] for _, body in (closed, unknown, paused)]
        assert codes == ["port_closed", "sandbox_not_found", "sandbox_paused"]
        assert {status for status, _ in (closed, unknown, paused)} == {502}


class TestFaults:
    def test_a_killed_vmm_makes_an_error_that_can_be_deleted(self, server: Server) -> None:
        before = leaks(server)
        made = server.create()
        os.kill(vmm_of(server, made), signal.SIGKILL)

        server.wait_until(lambda: bool(detail(server, made).get("error")), "the loss to be noticed")

        assert "signal 9" in detail(server, made)["error"]["reason"]
        assert server.call("POST", f"/sandboxes/{made}/pause", {})[0] == 409
        assert server.call("DELETE", f"/sandboxes/{made}")[0] == 204
        server.wait_until(lambda: not left_after(server, before), "nothing to be left")

    def test_a_panicked_guest_can_be_deleted(self, server: Server) -> None:
        made = server.create()
        server.aenv("exec", "-u", "root", made, "--", "/bin/sh", "-c", "echo c >/proc/sysrq-trigger", timeout_s=60)

        server.wait_until(lambda: bool(detail(server, made).get("error")), "the panic to be noticed")

        assert server.call("DELETE", f"/sandboxes/{made}")[0] == 204
        assert server.call("GET", f"/sandboxes/{made}")[0] == 404

    def test_a_guest_that_stands_still_can_be_deleted(self, server: Server) -> None:
        made = server.create()
        os.kill(vmm_of(server, made), signal.SIGSTOP)

        assert server.call("DELETE", f"/sandboxes/{made}", timeout_s=60)[0] == 204
        assert server.call("GET", f"/sandboxes/{made}")[0] == 404

    @pytest.mark.needs("loop", "mount")
    def test_a_full_disk_undoes_the_pause(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", "4G") as disk, running_on(disk, prefix="aef", net=118) as server:
            made = server.create()
            run(server, made, "head -c 100M /dev/urandom >/dev/shm/x && touch /dev/shm/marker")
            filler = disk / "filler"
            _fill(filler, disk)

            status, body = server.call("POST", f"/sandboxes/{made}/pause", {})

            assert (status, body["error_code"]) == (507, "no_space"), body
            assert detail(server, made)["state"] == "running"
            filler.unlink()
            assert run(server, made, "ls /dev/shm/marker") == "/dev/shm/marker\n"
            assert server.call("POST", f"/sandboxes/{made}/pause", {})[0] == 204
            assert server.call("POST", f"/v2/sandboxes/{made}/connect", {"timeout": 300})[0] == 201
            assert run(server, made, "ls /dev/shm/marker") == "/dev/shm/marker\n"
            server.call("DELETE", f"/sandboxes/{made}")

    @pytest.mark.parametrize("moment_s", [0.0, 0.01, 0.04, 0.1])
    @pytest.mark.parametrize("verb", ["create", "pause", "fork", "snapshot"])
    def test_a_client_that_hangs_up_leaves_nothing_half_done(self, server: Server, verb: str, moment_s: float) -> None:
        """Whenever it hangs up, the whole verb happens or none of it."""
        before = leaks(server)
        source = server.create()
        path, body = {
            "create": ("/v2/sandboxes", {"templateID": "base", "timeout": 600}),
            "pause": (f"/sandboxes/{source}/pause", {}),
            "fork": (f"/sandboxes/{source}/fork", {"count": 2, "timeout": 600}),
            "snapshot": (f"/sandboxes/{source}/snapshots", {"name": "left"}),
        }[verb]
        done = {"create": {"running": 2}, "pause": {"paused": 1}, "fork": {"running": 3}, "snapshot": {"running": 1}}

        _post_and_hang_up(server, path, body, moment_s)

        server.wait_until(lambda: _states(server) in ({"running": 1}, done[verb]), f"the {verb} to end by itself")
        # One verb after another: this one waits for what the client left behind.
        assert server.call("POST", f"/v2/sandboxes/{source}/connect", {"timeout": 600})[0] in (200, 201)
        assert run(server, source, "echo alive") == "alive\n"
        server.delete_all()
        server.call("DELETE", "/templates/left")
        server.wait_until(lambda: not left_after(server, before), "nothing to be left")

    def test_two_of_everything_at_once(self, server: Server) -> None:
        made = server.create()
        answers: list[int] = []

        def ask(path: str, body: object) -> None:
            answers.append(server.call("POST", f"/sandboxes/{made}{path}", body)[0])

        for path, body, allowed in (("/pause", {}, {204}), ("/connect", {"timeout": 300}, {200, 201})):
            threads = [threading.Thread(target=ask, args=(path, body)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert set(answers) <= allowed, answers
            answers.clear()
        assert run(server, made, "echo fine") == "fine\n"
        server.call("DELETE", f"/sandboxes/{made}")


class TestImages:
    def test_an_image_with_nothing_in_it_starts_and_takes_files(self, server: Server, tmp_path: Path) -> None:
        root = tmp_path / "root"
        (root / "etc").mkdir(parents=True)
        built = server.aenv("template", "build", "empty", "--rootfs", str(root), "--memory", "128", "--disk", "256")
        assert built.returncode == 0, built.stderr
        made = server.create("empty")
        try:
            assert server.aenv("exec", made, "--", "/bin/bash", "-c", "true").returncode == 127
            with server.sdk():
                assert Sandbox.connect(made).files.write("/home/user/x", "data").path == "/home/user/x"
        finally:
            server.call("DELETE", f"/sandboxes/{made}")
            server.call("DELETE", "/templates/empty")


class TestRestart:
    def test_a_stopped_server_leaves_running_and_paused_sandboxes_to_the_next(self, server: Server) -> None:
        running, paused = server.create(), server.create()
        for made in (running, paused):
            run(server, made, f"echo {made} >/dev/shm/id")
        server.call("POST", f"/sandboxes/{paused}/pause", {})
        pid = vmm_of(server, running)

        server.stop()
        server.start()

        assert vmm_of(server, running) == pid
        assert run(server, running, "cat /dev/shm/id") == f"{running}\n"
        assert server.call("POST", f"/v2/sandboxes/{paused}/connect", {"timeout": 300})[0] == 201
        assert run(server, paused, "cat /dev/shm/id") == f"{paused}\n"
        server.delete_all()

    def test_a_second_server_on_the_same_home_says_so(self, server: Server) -> None:
        config = server.home / "server.toml"

        done = server.aenv("server", "--config", str(config), timeout_s=60)

        assert done.returncode == 1
        assert b"error:" in done.stderr


def _states(server: Server) -> dict[str, int]:
    _, listed = server.call("GET", "/v2/sandboxes")
    states: dict[str, int] = {}
    for item in listed:
        key = item.get("lifecycleState") or item["state"]
        states[key] = states.get(key, 0) + 1
    return states


def _post_and_hang_up(server: Server, path: str, body: object, after_s: float) -> None:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {server.api_key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + content)
        threading.Event().wait(after_s)  # the moment itself, not a wait for anything


def _routing(sandbox: str, port: int) -> dict[str, str]:
    return {"E2b-Sandbox-Id": sandbox, "E2b-Sandbox-Port": str(port)}


def _through_proxy(server: Server, sandbox: str, port: int, path: str, method: str = "GET") -> tuple[int, str]:
    return _get(server.url + path, _routing(sandbox, port), method)


def _get(url: str, headers: dict[str, str], method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(url, headers=headers, method=method, data=b"{}" if method == "POST" else None)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _slot_addresses(server: Server) -> list[str]:
    """Where this host reaches the guests of *server*, all of them."""
    lines = subprocess.run(["ip", "-o", "route"], capture_output=True, text=True, check=True).stdout.splitlines()
    mine = [line.split()[0] for line in lines if f"dev {server.prefix}" in line]
    return [address for address in mine if address.startswith(f"10.{server.net}.")]


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


def _uplink_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("203.0.113.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


def _fill(filler: Path, disk: Path) -> None:
    """Leave a few MiB on *disk*: enough for a record, too little for 100 MiB of memory."""
    free = shutil.disk_usage(disk).free
    subprocess.run(["fallocate", "-l", str(free - (8 << 20)), str(filler)], check=True)
