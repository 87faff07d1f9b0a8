"""The calls of the node: init, freeze and thaw, and who may make them."""

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.guest_envd.agent import SECRET, Agent, Json, running, wait_until
from tests.unit.guest_envd.conftest import USER_ID

pytestmark = pytest.mark.needs("root", "envd")

CONTROL = [
    ("POST", "/init"),
    ("POST", "/freeze"),
    ("POST", "/thaw"),
    ("POST", "/sync"),
    ("POST", "/shutdown"),
    ("GET", "/agent"),
]


@pytest.fixture
def fresh(envd_binary: Path) -> Iterator[Agent]:
    with running([envd_binary, "serve", "--port", "0", "--no-cgroup"]) as agent:
        yield agent


def test_the_first_init_is_trusted_and_after_it_the_secret_is_needed(fresh: Agent) -> None:
    assert fresh.request("POST", "/freeze").status == 401
    assert fresh.request("POST", "/init", json.dumps({"controlSecret": SECRET, "accessToken": "tok"})).status == 204
    for method, path in CONTROL:
        for headers in ({}, {"X-Agentenv-Control": "wrong"}, {"X-Agentenv-Control": ""}, {"X-Access-Token": "tok"}):
            answer = fresh.request(method, path, b"{}", headers)
            assert (answer.status, answer.json()["code"]) == (401, 401), (path, headers)
    assert fresh.control("/init", {}).status == 204


def test_without_a_secret_no_second_control_call_is_possible(fresh: Agent) -> None:
    assert fresh.request("POST", "/init", b"").status == 204
    for method, path in CONTROL:
        assert fresh.request(method, path, b"{}", {"X-Agentenv-Control": ""}).status == 401


def test_a_rotated_secret_replaces_the_one_before(fresh: Agent) -> None:
    fresh.init()
    assert fresh.control("/init", {"controlSecret": "next"}).status == 204
    assert fresh.control("/sync").status == 401
    assert fresh.control("/sync", secret="next").status == 204


@pytest.mark.parametrize(
    "fields",
    [
        {"timestamp": "yesterday"},
        {"entropy": "c2hvcnQ="},
        {"entropy": "***"},
        {"machineId": "xyz"},
        {"machineId": "g" * 32},
        {"controlSecret": ""},
        {"defaultWorkdir": "relative"},
        {"defaultUser": "../x"},
        {"defaultUser": "a:b"},
        {"envVars": {"A=B": "c"}},
        {"envVars": {"A": "b\0c"}},
        {"envVars": {"A": 5}},
        {"caBundle": "no certificate"},
        {"thaw": "yes"},
    ],
)
def test_an_init_that_makes_no_sense_changes_nothing(fresh: Agent, fields: Json) -> None:
    answer = fresh.control("/init", {"accessToken": "tok", **fields})
    assert (answer.status, answer.json()["code"]) == (400, 400)
    assert fresh.request("GET", "/envs").status == 200, "the token was not taken"
    assert fresh.request("POST", "/init", b"").status == 204, "it was not the first init"


def test_a_step_that_fails_is_named(fresh: Agent) -> None:
    answer = fresh.control("/init", {"defaultUser": "not-there"})
    assert answer.status == 500
    assert "defaultUser" in answer.json()["message"]


def test_an_init_over_the_limit_is_refused(fresh: Agent) -> None:
    assert fresh.control("/init", {"envVars": {"A": "x" * (5 << 20)}}).status == 413


def test_the_agent_tells_about_itself(fresh: Agent) -> None:
    fresh.init()
    told = fresh.request("GET", "/agent", headers={"X-Agentenv-Control": SECRET}).json()
    assert told["pid"] == fresh.process.pid
    assert (told["frozen"], told["processes"], told["version"]) == (False, 0, "0.1.0")
    assert told["uptimeMs"] >= 0


def test_a_daemon_without_control_groups_cannot_freeze_and_on_a_host_not_shut_down(fresh: Agent) -> None:
    fresh.init()
    for path in ("/freeze", "/thaw", "/shutdown"):
        assert fresh.control(path).status == 501


def test_wrong_command_lines_are_told(envd_binary: Path) -> None:
    for arguments in ([], ["serve"], ["serve", "--port", "x"], ["daemon"], ["what"]):
        done = subprocess.run([envd_binary, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "usage: envd serve" in done.stderr


def order(agent: Agent, path: str, turn: object, limit_ms: int | None = None) -> int:
    """Freeze or thaw with a number; the status."""
    headers = {"X-Agentenv-Control": SECRET, "X-Agentenv-Turn": str(turn)}
    body = None if limit_ms is None else json.dumps({"timeoutMs": limit_ms}).encode()
    return agent.request("POST", path, body=body, headers=headers).status


@contextmanager
def files_of_its_own(directory: Path) -> Iterator[Path]:
    """A file system on which every write waits, uninterruptibly, between `suspend_files` and `resume_files`."""
    image, files = directory / "image", directory / "files"
    files.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, files], check=True)
    try:
        yield files
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", files], check=False, capture_output=True)  # of a test that failed
        subprocess.run(["umount", files], check=True)


def suspend_files(files: Path) -> None:
    subprocess.run(["fsfreeze", "--freeze", files], check=True)


def resume_files(files: Path) -> None:
    subprocess.run(["fsfreeze", "--unfreeze", files], check=True)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.needs("cgroup2")
class TestFreezing:
    """With control groups: what is frozen stands still, and the daemon goes on."""

    @pytest.fixture
    def agent(self, envd_binary: Path) -> Iterator[Agent]:
        with running([envd_binary, "serve", "--port", "0"]) as agent:
            agent.init()
            yield agent
        assert list(Path("/sys/fs/cgroup").rglob(f"aenv-{agent.process.pid}")) == []

    def test_a_frozen_process_stands_still_until_it_is_thawed(self, agent: Agent) -> None:
        with agent.start("/bin/sh", "-c", "while :; do echo tick; done") as stream:
            pid = stream.started()
            stream.until_output(b"tick")
            assert agent.control("/freeze").status == 204
            assert told(agent)["frozen"] is True
            assert "frozen 1" in events_of(pid)
            used = cpu_ticks(pid)
            assert agent.call("process.Process/List", {})["processes"][0]["pid"] == pid
            assert agent.call("filesystem.Filesystem/Stat", {"path": "/"})["entry"]["name"] == "/"
            assert cpu_ticks(pid) == used
            assert agent.control("/thaw").status == 204
            assert told(agent)["frozen"] is False
            wait_until(lambda: cpu_ticks(pid) > used)
            agent.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})

    def test_what_an_ended_process_left_behind_is_frozen_too(self, agent: Agent) -> None:
        with agent.start("/bin/sh", "-c", "(while :; do :; done) >/dev/null 2>&1 & echo $!", stdin=False) as stream:
            outcome = stream.outcome(stream.started())
        left = int(outcome.stdout)
        assert agent.control("/freeze").status == 204
        assert "frozen 1" in events_of(left)
        used = cpu_ticks(left)
        assert agent.control("/thaw").status == 204
        wait_until(lambda: cpu_ticks(left) > used)
        os.kill(left, 9)

    def test_freezing_and_thawing_twice_is_fine(self, agent: Agent) -> None:
        for path in ("/freeze", "/freeze", "/thaw", "/thaw"):
            assert agent.control(path).status == 204

    def test_a_freeze_that_arrives_after_the_thaw_is_void(self, agent: Agent) -> None:
        assert order(agent, "/thaw", 6) == 204
        assert order(agent, "/freeze", 5) == 409
        assert told(agent)["frozen"] is False
        assert order(agent, "/freeze", 7) == 204
        assert order(agent, "/freeze", 7) == 204  # asked again: its answer was lost
        assert order(agent, "/thaw", 6) == 409
        assert told(agent)["frozen"] is True
        agent.init()  # the orders of another generation
        assert order(agent, "/freeze", 1) == 204
        assert order(agent, "/thaw", 2) == 204

    @pytest.mark.parametrize("turn", ["", "x", "-1", "1.0", str(1 << 64)])
    def test_an_order_without_a_proper_number_is_refused(self, agent: Agent, turn: str) -> None:
        assert order(agent, "/freeze", turn) == 400
        assert told(agent)["frozen"] is False

    @pytest.mark.slow
    @pytest.mark.needs("mount", "loop", "mke2fs")
    def test_a_freeze_that_waits_ends_with_a_later_order_and_undoes_nothing(self, agent: Agent, tmp_path: Path) -> None:
        with (
            files_of_its_own(tmp_path) as files,
            ThreadPoolExecutor() as waiting,
            # It has done the same before: the only thing left that it can wait for in the kernel is that write.
            agent.start("/bin/sh", "-c", f": > {files}/x; echo on; read go; : > {files}/x") as stream,
        ):
            pid = stream.started()
            stream.until_output(b"on")
            suspend_files(files)
            agent.call("process.Process/SendInput", {"process": {"pid": pid}, "input": {"stdin": "Cg=="}})
            wait_until(lambda: state_of(pid) == "D")  # it cannot be frozen
            first = waiting.submit(order, agent, "/freeze", 1, 20_000)
            wait_until(lambda: told(agent)["frozen"])
            assert order(agent, "/thaw", 2) == 204
            assert first.result() == 409
            second = waiting.submit(order, agent, "/freeze", 3, 20_000)
            wait_until(lambda: told(agent)["frozen"])
            resume_files(files)
            assert second.result() == 204
            assert told(agent)["frozen"] is True
            agent.control("/thaw")
            assert stream.outcome(pid).end["exitCode"] == 0

    def test_a_frozen_process_can_be_killed(self, agent: Agent) -> None:
        with agent.start("sleep", "60") as stream:
            pid = stream.started()
            agent.control("/freeze")
            agent.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
            assert stream.outcome(pid).end["status"] == "signal: killed"
        agent.control("/thaw")

    def test_a_start_waits_for_the_thaw(self, agent: Agent) -> None:
        agent.control("/freeze")
        connection = agent.connection()
        body = b'\0\0\0\0\x1d{"process":{"cmd":"/bin/true"}}'
        body = body[:4] + bytes([len(body) - 5]) + body[5:]
        connection.request("POST", "/process.Process/Start", body, {"Content-Type": "application/connect+json"})
        assert agent.call("process.Process/List", {}) == {"processes": []}
        agent.control("/thaw")
        assert connection.getresponse().read().endswith(b"\x02\x00\x00\x00\x02{}")
        connection.close()

    def test_an_init_thaws_unless_told_otherwise_or_it_fails(self, agent: Agent) -> None:
        agent.control("/freeze")
        agent.init(thaw=False)
        assert told(agent)["frozen"] is True
        assert agent.control("/init", {"defaultUser": "not-there"}).status == 500
        assert agent.control("/init", {"machineId": "x"}).status == 400
        assert told(agent)["frozen"] is True
        agent.init()
        assert told(agent)["frozen"] is False

    def test_a_tree_is_killed_with_all_it_ever_started(self, agent: Agent) -> None:
        script = "setsid sleep 71 & (setsid sh -c 'setsid sleep 72 & exec sleep 73') & sleep 0.2; echo on; wait"
        with agent.start("/bin/sh", "-c", script, stdin=False) as stream:
            pid = stream.started()
            stream.until_output(b"on")
            group = group_of(pid)
            assert len((group / "cgroup.procs").read_text().split()) >= 4
            kill = {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL", "tree": True}
            agent.call("process.Process/SendSignal", kill)
            stream.outcome(pid)
            wait_until(lambda: not group.exists() or "populated 0" in (group / "cgroup.events").read_text())

    def test_a_kill_reaches_the_jobs_of_an_interactive_shell(self, agent: Agent) -> None:
        terminal = {"size": {"cols": 80, "rows": 24}}
        with agent.start("/bin/bash", "--norc", "-i", "-m", pty=terminal) as stream:
            pid = stream.started()
            text = {
                "pty": "KHRyYXAgJycgSFVQOyBleGVjIHNsZWVwIDgxKSAmIGVjaG8gcGlkPSQhPQo="
            }  # (trap '' HUP; exec sleep 81) & echo pid=$!=
            agent.call("process.Process/SendInput", {"process": {"pid": pid}, "input": text})
            group = group_of(pid)
            wait_until(lambda: len((group / "cgroup.procs").read_text().split()) == 2)
            agent.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
            stream.outcome(pid)
            wait_until(lambda: not group.exists() or "populated 0" in (group / "cgroup.events").read_text())

    def test_groups_of_ended_processes_are_used_again(self, agent: Agent) -> None:
        group = None
        for _ in range(30):
            assert agent.run("/bin/true").end["exitCode"] == 0
        with agent.start("sleep", "60") as stream:
            group = group_of(stream.started()).parent
            leaves = [entry for entry in os.scandir(group) if entry.is_dir()]
            assert len(leaves) == 1


def told(agent: Agent) -> Json:
    answer: Json = agent.request("GET", "/agent", headers={"X-Agentenv-Control": SECRET}).json()
    return answer


def group_of(pid: int) -> Path:
    (line,) = [line for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0::")]
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    root = next(fields[1] for fields in mounts if fields[2] == "cgroup2")
    return Path(root) / line.removeprefix("0::/")


def events_of(pid: int) -> str:
    return (group_of(pid).parent.parent / "cgroup.events").read_text()


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


CERTIFICATE = "-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----"


SSH_KEYGEN = """#!/bin/sh
while [ "$1" != -f ]; do shift; done
umask 077
cat /proc/sys/kernel/random/uuid >"$2"
echo public >"$2.pub"
"""
SSHD = """#!/bin/sh
trap 'echo told to read them again' HUP
echo $$ >/run/sshd.pid
echo ready
while :; do sleep 0.01; done
"""


@contextmanager
def host_programs(root: Path) -> Iterator[Agent]:
    """An agent in *root* with the programs of this host, an `ssh-keygen` that takes no time, and an `sshd`."""
    for name, text in (("local/ssh-keygen", SSH_KEYGEN), ("opt/sshd", SSHD)):
        program = root / name
        program.parent.mkdir()
        program.write_text(text)
        program.chmod(0o755)
    for name in ("run", "usr"):
        (root / name).mkdir()
    for name in ("bin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(f"usr/{name}")
    binds = "".join(f"mount --rbind /{name} {root}/{name}; " for name in ("dev", "proc", "usr"))
    local = f"mount --bind {root}/local {root}/usr/local/sbin; "
    serve = f"exec chroot {root} /envd serve --port 0 --no-cgroup --identity"
    command = ["unshare", "--mount", "--uts", "--propagation", "private", "/bin/sh", "-ec", f"{binds}{local}{serve}"]
    with running(command) as agent:
        yield agent


@pytest.mark.needs("mount")
class TestIdentity:
    """In a root of its own the agent may change who the machine is."""

    @pytest.fixture
    def root(self, envd_binary: Path, tmp_path: Path) -> Path:
        root = tmp_path / "root"
        for name in ("dev", "proc"):
            (root / name).mkdir(parents=True)
        (root / "envd").write_bytes(envd_binary.read_bytes())
        (root / "envd").chmod(0o755)
        return root

    @pytest.fixture
    def agent(self, root: Path) -> Iterator[Agent]:
        script = f"mount --bind /dev {root}/dev; exec chroot {root} /envd serve --port 0 --no-cgroup --identity"
        command = ["unshare", "--mount", "--uts", "--propagation", "private", "/bin/sh", "-ec", script]
        with running(command) as agent:
            yield agent

    def test_an_empty_image_gets_a_name_an_id_and_a_user(self, agent: Agent, root: Path) -> None:
        agent.init(hostname="My Sandbox_1", machineId="0123456789ABCDEF" * 2, defaultUser="user", sandboxId="x")
        etc = root / "etc"
        assert (etc / "hostname").read_text() == "my-sandbox-1\n"
        assert [line.split()[:2] for line in (etc / "hosts").read_text().splitlines()] == [
            ["127.0.0.1", "localhost"],
            ["127.0.1.1", "my-sandbox-1"],
        ]
        assert (etc / "machine-id").read_text() == "0123456789abcdef" * 2 + "\n"
        assert (etc / "passwd").read_text() == "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
        assert (etc / "group").read_text() == "user:x:1000:\n"
        assert not (etc / "shadow").exists()
        assert (root / "home/user").stat().st_uid == USER_ID
        assert agent.request("POST", "/files?path=f", b"x", {"Content-Type": "application/octet-stream"}).status == 200
        assert (root / "home/user/f").stat().st_uid == USER_ID

    def test_nothing_is_written_when_all_is_as_it_should_be(self, agent: Agent, root: Path) -> None:
        fields = {"hostname": "a", "machineId": "0" * 32, "defaultUser": "user", "caBundle": CERTIFICATE.format("AAAA")}
        agent.init(**fields)
        before = {path: path.stat().st_ino for path in root.rglob("etc/**/*") if path.is_file()}
        agent.init(**fields)
        assert {path: path.stat().st_ino for path in root.rglob("etc/**/*") if path.is_file()} == before
        agent.init(hostname="b")
        assert (root / "etc/hosts").read_text().count("127.0.1.1") == 1

    def test_accounts_and_lines_of_the_image_are_kept(self, agent: Agent, root: Path) -> None:
        etc = root / "etc"
        etc.mkdir()
        (etc / "passwd").write_text("root:x:0:0::/root:/bin/bash\nother:x:1000:1000::/:/bin/sh")
        (etc / "shadow").write_text("root:*:1:0:99999:7:::\n")
        (etc / "shadow").chmod(0o640)
        (etc / "hosts").write_text("10.0.0.1 db\n127.0.0.1 localhost x\n")
        agent.init(hostname="x", defaultUser="user")
        assert (etc / "passwd").read_text().splitlines()[1:] == [
            "other:x:1000:1000::/:/bin/sh",
            "user:x:1001:1001::/home/user:/bin/sh",
        ]
        assert (etc / "shadow").read_text().splitlines()[1].startswith("user:*:")
        assert (etc / "shadow").stat().st_mode & 0o777 == 0o640
        assert (etc / "hosts").read_text() == "10.0.0.1 db\n127.0.0.1 localhost x\n"

    def test_each_sandbox_gets_ssh_host_keys_of_its_own(self, root: Path, tmp_path: Path) -> None:
        ssh = root / "etc/ssh"
        ssh.mkdir(parents=True)
        key, public = ssh / "ssh_host_ed25519_key", ssh / "ssh_host_ed25519_key.pub"
        key.write_text("of the image")
        with host_programs(root) as agent:
            agent.init(sandboxId="a")
            wait_until(lambda: key.read_text() != "of the image")
            of_a = key.read_text()
            wait_until(lambda: not (ssh / ".aenv-new").exists())
            assert key.stat().st_mode & 0o777 == 0o600
            assert public.read_text()
            assert sorted(path.name for path in ssh.iterdir()) == [key.name, public.name]  # no kind that was not there

            with agent.start("/opt/sshd", stdin=False) as server:
                pid = server.started()
                server.until_output(b"ready")
                agent.init(sandboxId="a")  # resumed: it is the same one
                agent.init(sandboxId="b")  # a copy
                server.until_output(b"told to read them again")
                assert key.read_text() not in (of_a, "of the image")
                agent.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})

    def test_a_key_that_cannot_be_made_stays_and_a_link_is_left_alone(self, agent: Agent, root: Path) -> None:
        ssh = root / "etc/ssh"
        ssh.mkdir(parents=True)
        (ssh / "ssh_host_rsa_key").write_text("of the image")
        (ssh / "ssh_host_ecdsa_key").symlink_to("/elsewhere")
        agent.init(sandboxId="a")  # an image without ssh-keygen
        wait_until(lambda: not agent.call("process.Process/List", {})["processes"])
        assert (ssh / "ssh_host_rsa_key").read_text() == "of the image"
        assert (ssh / "ssh_host_ecdsa_key").is_symlink()

    def test_certificates_are_added_to_those_of_the_image_once(self, agent: Agent, root: Path) -> None:
        bundle = root / "etc/ssl/certs/ca-certificates.crt"
        bundle.parent.mkdir(parents=True)
        old = CERTIFICATE.format("AAAA") + "\n"
        bundle.write_text(old)
        for _ in range(2):
            agent.init(caBundle=CERTIFICATE.format("BBBB"))
        assert bundle.read_text() == old + CERTIFICATE.format("BBBB") + "\n"
        bundle.write_text(old)
        agent.init(caBundle=CERTIFICATE.format("BBBB"))
        assert "BBBB" in bundle.read_text(), "it is put back when the image lost it"
        local = root / "usr/local/share/ca-certificates/agentenv.crt"
        assert local.read_text() == CERTIFICATE.format("BBBB")
        envs = agent.request("GET", "/envs").json()
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "PIP_CERT", "CURL_CA_BUNDLE"):
            assert envs[name] == "/etc/ssl/certs/ca-certificates.crt"
        agent.init(envVars={"SSL_CERT_FILE": "/mine"})
        assert agent.request("GET", "/envs").json()["SSL_CERT_FILE"] == "/mine"

    def test_a_bundle_that_is_named_is_sent_only_when_it_is_not_there(self, agent: Agent, root: Path) -> None:
        bundle = root / "etc/ssl/certs/ca-certificates.crt"
        wanted = agent.control("/init", {"controlSecret": SECRET, "caDigest": "one", "accessToken": "tok"})
        assert (wanted.status, wanted.json()["code"]) == (409, 409)
        assert not bundle.exists()
        assert agent.request("GET", "/envs").status == 200, "nothing was changed"
        agent.init(caDigest="one", caBundle=CERTIFICATE.format("AAAA"))
        assert "AAAA" in bundle.read_text()
        agent.init(caDigest="one")
        assert agent.control("/init", {"caDigest": "two"}).status == 409

    def test_files_that_a_guest_has_spoilt_cost_it_their_content_and_not_the_sandbox(
        self, agent: Agent, root: Path
    ) -> None:
        (root / "etc/machine-id").mkdir(parents=True)
        os.mkfifo(root / "etc/hosts")
        answer = agent.control("/init", {"controlSecret": SECRET, "hostname": "x", "machineId": "0" * 32})
        assert answer.status == 204
        assert (root / "etc/hostname").read_text() == "x\n"
        assert agent.request("GET", "/health").status == 204
