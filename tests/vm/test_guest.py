"""What happens inside a guest: under an init of its own, without memory, without its agent, and where it is a clone."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from e2b import Sandbox

from tests.running import running_server
from tests.server import Server
from tests.vm.test_sandboxes import run, vmm_of

pytestmark = [
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.needs("root", "qemu", "netns", "nft", "tun", "guest", "base"),
]

AGENT: Final = "pgrep -f '^envd daemon'"
BUNDLE: Final = "/etc/ssl/certs/ca-certificates.crt"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(prefix="aeg", net=123) as running:
        yield running


@pytest.fixture
def sandbox(server: Server) -> Iterator[str]:
    made = server.create()
    yield made
    server.call("DELETE", f"/sandboxes/{made}")


def command(server: Server, sandbox: str, *words: str) -> str:
    """Standard output of a command run as root, which must succeed."""
    done = server.aenv("exec", "-u", "root", sandbox, "--", *words, timeout_s=120)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout.decode()


@pytest.fixture(scope="module")
def owninit(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("image")
    (root / "sbin").mkdir()
    source = Path(__file__).with_name("own_init.c")
    subprocess.run(["gcc", "-static", "-O1", "-o", str(root / "sbin/init"), str(source)], check=True)
    size = ("--memory", "128", "--disk", "256")
    built = server.aenv("template", "build", "owninit", "--rootfs", str(root), *size, "--init", "/sbin/init")
    assert built.returncode == 0, built.stderr
    yield "owninit"
    server.call("DELETE", "/templates/owninit")


@pytest.mark.needs("static-cc")
class TestOwnInit:
    """An image with nothing in it but a program that is its init, and its only command as well."""

    @pytest.fixture
    def made(self, server: Server, owninit: str) -> Iterator[str]:
        made = server.create(owninit)
        yield made
        server.call("DELETE", f"/sandboxes/{made}")

    def test_it_is_process_1_and_takes_in_orphans(self, server: Server, made: str) -> None:
        assert command(server, made, "/sbin/init", "follow", "/proc/1/exe") == "/sbin/init"
        assert command(server, made, "/sbin/init", "cat", "/init-ran") == "1\n"
        orphan, parent = command(server, made, "/sbin/init", "orphan").split()
        assert parent == "1"
        command(server, made, "/sbin/init", "gone", orphan)

    def test_a_killed_agent_comes_back_beside_it(self, server: Server, made: str) -> None:
        before = command(server, made, "/sbin/init", "agent")
        kill = ["exec", "-u", "root", made, "--", "/sbin/init", "kill", before.strip()]

        assert server.aenv(*kill, timeout_s=60).returncode != 0

        assert _agent_after(server, made, "/sbin/init", "agent") != before
        assert command(server, made, "/sbin/init", "follow", "/proc/1/exe") == "/sbin/init"

    def test_it_is_paused_and_goes_on(self, server: Server, made: str) -> None:
        agent = command(server, made, "/sbin/init", "agent")

        assert server.call("POST", f"/sandboxes/{made}/pause", {})[0] == 204
        assert server.call("POST", f"/v2/sandboxes/{made}/connect", {"timeout": 300})[0] == 201

        assert command(server, made, "/sbin/init", "agent") == agent
        assert command(server, made, "/sbin/init", "follow", "/proc/1/exe") == "/sbin/init"
        orphan, _ = command(server, made, "/sbin/init", "orphan").split()
        command(server, made, "/sbin/init", "gone", orphan)


class TestAgent:
    """Whatever the workload does, the agent answers."""

    def test_a_memory_hog_is_killed_and_the_agent_is_not(self, server: Server, sandbox: str) -> None:
        agent = run(server, sandbox, AGENT)
        # Every page is written: what is only asked for would be refused, or never be there at all.
        touch = "blocks = []\nwhile True: blocks.append(bytearray(b'x') * (8 << 20))"

        hog = server.aenv("exec", sandbox, "--", "python3", "-c", touch, timeout_s=300)

        assert hog.returncode == 137, hog.stderr
        assert b"MemoryError" not in hog.stderr
        killed = run(server, sandbox, "grep '^oom_kill ' /sys/fs/cgroup/memory.events").split()
        assert int(killed[1]) >= 1
        assert run(server, sandbox, "echo alive") == "alive\n"
        assert run(server, sandbox, AGENT) == agent

    def test_it_answers_beside_busy_loops_and_a_fork_bomb(self, server: Server, sandbox: str) -> None:
        agent = run(server, sandbox, AGENT)
        spin = "for i in 1 2 3 4; do (exec -a spinning bash -c 'while :; do :; done') & done"
        bomb = "bomb() { [ $1 -eq 0 ] || { bomb $(($1 - 1)) & bomb $(($1 - 1)) & }; read -t 600 <>/tmp/never; }"
        script = f"mkfifo -m 666 /tmp/never; {spin}; {bomb}; bomb 6 & exec sleep 600"
        run(server, sandbox, f"nohup bash -c {shlex.quote(script)} >/dev/null 2>&1 &", user="user")

        def raging() -> bool:
            count = "pgrep -c -f '^spinning'; pgrep -c -u user"
            done = server.aenv("exec", "-u", "root", sandbox, "--", "/bin/bash", "-c", count, timeout_s=120)
            numbers = [int(word) for word in done.stdout.split()]
            return len(numbers) == 2 and numbers[0] >= 4 and numbers[1] >= 100

        server.wait_until(raging, "the load to be there")
        for _ in range(5):
            assert server.aenv("exec", sandbox, "--", "true", timeout_s=60).returncode == 0
        assert raging()
        assert run(server, sandbox, AGENT) == agent

    def test_an_orphan_does_not_stay_a_zombie(self, server: Server, sandbox: str) -> None:
        script = (
            "import os\n"
            "parent = os.getpid()\n"
            "if os.fork() == 0:\n"
            "    while os.getppid() == parent: pass\n"
            "    print(os.getpid(), os.getppid(), flush=True)\n"
        )
        orphan, parent = command(server, sandbox, "python3", "-c", script).split()

        assert parent == "1"
        run(server, sandbox, f"timeout 60 bash -c 'while [ -e /proc/{orphan} ]; do sleep 0.1; done'")

    def test_a_killed_agent_is_another_one_with_the_same_token(self, server: Server, sandbox: str) -> None:
        before = run(server, sandbox, AGENT)
        with server.sdk():
            client = Sandbox.connect(sandbox)  # holds the token that it got now
            killed = server.aenv("exec", "-u", "root", sandbox, "--", "/bin/kill", "-9", before.strip(), timeout_s=60)
            assert killed.returncode != 0

            after = _agent_after(server, sandbox, "/bin/bash", "-c", AGENT)

            assert after != before
            assert client.commands.run("echo again").stdout == "again\n"
        without = "curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:49983/envs"
        assert run(server, sandbox, without) == "401"


class TestClones:
    def test_clones_of_one_snapshot_share_no_randomness_and_no_identity(self, server: Server, sandbox: str) -> None:
        _, snapshot = server.call("POST", f"/sandboxes/{sandbox}/snapshots", {})
        clones = [server.create(snapshot["snapshotID"]) for _ in range(3)]
        ask = (
            "head -c 16 /dev/urandom | od -An -tx1 | tr -d ' '; python3 -c 'import uuid; print(uuid.uuid4())'; "
            "cat /etc/machine-id; hostname"
        )
        try:
            told = [run(server, made, ask).split() for made in (sandbox, *clones)]

            assert all(len(answer) == 4 for answer in told), told
            for of_one_kind in zip(*told, strict=True):
                assert len(set(of_one_kind)) == len(told), of_one_kind
        finally:
            for made in clones:
                server.call("DELETE", f"/sandboxes/{made}")
            server.call("DELETE", f"/templates/{snapshot['snapshotID']}")


class TestNetwork:
    def test_no_packet_of_ipv6_gets_out_whatever_root_sets_up(self, server: Server, sandbox: str) -> None:
        """The other end is given addresses and a listener, so that only the rules are in the way."""
        near, far = "fd00:ae::2", "2001:db8::1"
        inside = "ip -6 addr add fd00:ae::1/64 dev eth0 nodad && ip -6 route add default via fd00:ae::2 dev eth0"
        probe = "timeout 10 bash -c 'exec 3<>/dev/tcp/{0}/7777' 2>/dev/null && echo {0}"
        ask = "; ".join(probe.format(address) for address in (near, far)) + "; true"
        slot = ("nsenter", "--target", str(vmm_of(server, sandbox)), "--net")
        run(server, sandbox, inside)
        for line in (
            "sysctl -qw net.ipv6.conf.tap0.disable_ipv6=0 net.ipv6.conf.lo.disable_ipv6=0",
            f"ip -6 addr add {near}/64 dev tap0 nodad",
            f"ip -6 addr add {far}/128 dev lo nodad",
        ):
            subprocess.run([*slot, *line.split()], check=True)
        with _listener(slot):
            assert run(server, sandbox, ask) == ""
            for chain in ("arriving", "to_slot"):
                rule = f"insert rule inet slot {chain} meta nfproto ipv6 accept"
                subprocess.run([*slot, "nft", *rule.split()], check=True)
            assert run(server, sandbox, ask).split() == [near, far]  # so it was the rules


@pytest.mark.needs("openssl")
class TestCertificates:
    def test_guests_trust_what_the_operator_trusts_beside_their_own(
        self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trusted, other = (_authority(tmp_path, name) for name in ("trusted", "other"))
        server.stop()
        with monkeypatch.context() as patched:
            patched.setenv("SSL_CERT_FILE", str(trusted))  # what a server of a test has as its bundle
            server.start()
        try:
            made = server.create()
            certificates = run(server, made, f"cat {BUNDLE}")
            assert _body(trusted) in "".join(certificates.split())
            assert _body(other) not in "".join(certificates.split())
            assert certificates.count("BEGIN CERTIFICATE") > 100  # the image's own are still there
            for name, port in (("trusted", 4430), ("other", 4431)):
                for part in ("key", "crt"):
                    _send(server, made, tmp_path / f"{name}-server.{part}", f"/tmp/{name}.{part}")
                serve = f"openssl s_server -accept {port} -www -key /tmp/{name}.key -cert /tmp/{name}.crt"
                listening = f"until ss -Hltn 'sport = :{port}' | grep -q .; do sleep 0.1; done"
                run(server, made, f"nohup {serve} >/dev/null 2>&1 & timeout 60 bash -c {shlex.quote(listening)}")
            curl = "curl -sS -o /dev/null https://localhost:{} 2>&1; echo $?"
            python = "python3 -c 'import urllib.request as u; u.urlopen(\"https://localhost:{}\")' 2>&1 | tail -1"

            assert run(server, made, curl.format(4430)) == "0\n"
            assert run(server, made, python.format(4430)) == ""
            assert run(server, made, curl.format(4431)).endswith("60\n")
            assert "CERTIFICATE_VERIFY_FAILED" in run(server, made, python.format(4431))
        finally:
            server.delete_all()
            server.stop()
            server.start()


def _agent_after(server: Server, sandbox: str, *find: str) -> str:
    """What *find* prints as soon as the agent answers again."""
    said: list[str] = []

    def answers() -> bool:
        done = server.aenv("exec", "-u", "root", sandbox, "--", *find, timeout_s=60)
        said.append(done.stdout.decode())
        return done.returncode == 0

    server.wait_until(answers, "the agent to be back")
    return said[-1]


@contextmanager
def _listener(slot: tuple[str, ...]) -> Iterator[None]:
    """A server on port 7777 of every IPv6 address of a slot's namespace."""
    script = (
        "import socket\n"
        "s = socket.create_server(('::', 7777), family=socket.AF_INET6)\n"
        "print('listening', flush=True)\n"
        "while True: s.accept()[0].close()\n"
    )
    with subprocess.Popen([*slot, sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"listening\n"
            yield
        finally:
            process.kill()


def _authority(folder: Path, name: str) -> Path:
    """The certificate of a new authority *name*, which has signed ``NAME-server`` for localhost."""
    root, leaf = folder / name, folder / f"{name}-server"
    make = ["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-days", "30"]
    ca = ["-x509", "-subj", f"/CN=Test {name}", "-keyout", f"{root}.key", "-out", f"{root}.crt"]
    subprocess.run([*make, *ca], check=True, capture_output=True)
    request = ["-subj", "/CN=localhost", "-keyout", f"{leaf}.key", "-out", f"{leaf}.csr"]
    subprocess.run([*make, *request], check=True, capture_output=True)
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName=DNS:localhost\n")
    sign = ["openssl", "x509", "-req", "-in", f"{leaf}.csr", "-CA", f"{root}.crt", "-CAkey", f"{root}.key"]
    more = ["-set_serial", "1", "-days", "30", "-extfile", str(extensions), "-out", f"{leaf}.crt"]
    subprocess.run([*sign, *more], check=True, capture_output=True)
    return root.with_suffix(".crt")


def _body(certificate: Path) -> str:
    return "".join(certificate.read_text().splitlines()[1:-1])


def _send(server: Server, sandbox: str, source: Path, target: str) -> None:
    write = ["exec", "-i", "-u", "root", sandbox, "--", "/bin/bash", "-c", f"cat >{target}"]
    done = server.aenv(*write, stdin=source.read_bytes())
    assert done.returncode == 0, done.stderr
