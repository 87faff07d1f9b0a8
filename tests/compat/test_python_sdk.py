"""The official E2B Python SDK, unmodified, against a real server with real microVMs."""

import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from e2b import (
    CommandExitException,
    FileType,
    Sandbox,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)
from e2b.exceptions import AuthenticationException, InvalidArgumentException, NotFoundException, SandboxException

from tests.server import Server

pytestmark = [pytest.mark.compat, pytest.mark.needs("root", "qemu", "netns", "nft", "tun", "guest", "base")]


@pytest.fixture(scope="module")
def sandbox(server: Server) -> Iterator[Sandbox]:
    """One sandbox for all tests that leave it as they found it."""
    with server.sdk():
        made = Sandbox.create("base", timeout=600, metadata={"suite": "compat"}, envs={"GREETING": "hello"})
        yield made
        made.kill()


@pytest.fixture
def own(server: Server) -> Iterator[Sandbox]:
    """A sandbox for one test."""
    made = Sandbox.create("base", timeout=600)
    yield made
    made.kill()


class TestSandbox:
    def test_create_answers_only_when_commands_work(self, server: Server) -> None:
        with Sandbox.create("base", timeout=120) as made:
            assert made.commands.run("echo ready").stdout == "ready\n"

    def test_info_says_what_was_asked_for(self, sandbox: Sandbox) -> None:
        info = sandbox.get_info()

        assert info.sandbox_id == sandbox.sandbox_id
        assert info.name == "base"
        assert info.metadata == {"suite": "compat"}
        assert info.state is SandboxState.RUNNING
        assert (info.cpu_count, info.memory_mb) == (1, 512)
        assert info.end_at > info.started_at

    def test_list_finds_it_by_metadata(self, sandbox: Sandbox) -> None:
        found = Sandbox.list(query=SandboxQuery(metadata={"suite": "compat"})).next_items()
        missed = Sandbox.list(query=SandboxQuery(metadata={"suite": "other a b&c"})).next_items()

        assert [item.sandbox_id for item in found] == [sandbox.sandbox_id]
        assert missed == []

    def test_connect_reaches_the_same_sandbox(self, sandbox: Sandbox) -> None:
        sandbox.files.write("/tmp/connect-marker", "here")

        other = Sandbox.connect(sandbox.sandbox_id, timeout=30)

        assert other.files.read("/tmp/connect-marker") == "here"

    def test_connect_never_shortens_life(self, sandbox: Sandbox) -> None:
        before = sandbox.get_info().end_at

        Sandbox.connect(sandbox.sandbox_id, timeout=1)

        assert sandbox.get_info().end_at >= before

    def test_set_timeout_may_shorten_life(self, own: Sandbox) -> None:
        before = own.get_info().end_at

        own.set_timeout(60)

        assert own.get_info().end_at < before

    def test_a_killed_sandbox_is_gone(self, server: Server) -> None:
        made = Sandbox.create("base", timeout=120)

        assert made.is_running()
        assert made.kill() is True
        assert not made.is_running()
        assert made.kill() is False
        with pytest.raises(SandboxNotFoundException):
            made.get_info()
        with pytest.raises(TimeoutException, match="not found"):
            made.commands.run("true")

    def test_an_expired_sandbox_is_gone(self, server: Server) -> None:
        made = Sandbox.create("base", timeout=1)

        server.wait_until(lambda: not made.is_running(), "the sandbox to expire")

        with pytest.raises(SandboxNotFoundException):
            made.get_info()

    def test_get_host_leads_to_the_port(self, server: Server, sandbox: Sandbox) -> None:
        sandbox.commands.run("python3 -m http.server 8080 --directory /etc", background=True, timeout=0)
        sandbox.commands.run("until ss -Hltn 'sport = :8080' | grep -q .; do sleep 0.1; done", timeout=60)
        host = sandbox.get_host(8080)
        request = urllib.request.Request(f"{server.url}/hostname", headers={"Host": host})

        assert host == f"8080-{sandbox.sandbox_id}.sbx.localhost"
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.read().decode() == sandbox.files.read("/etc/hostname")

    def test_metrics(self, sandbox: Sandbox) -> None:
        (metrics,) = sandbox.get_metrics()[-1:]

        assert metrics.cpu_count == 1
        assert 0 < metrics.mem_used < metrics.mem_total <= 512 << 20
        assert 0 < metrics.disk_used < metrics.disk_total

    def test_an_unknown_template_is_an_error_and_creates_nothing(self, server: Server) -> None:
        before = len(Sandbox.list().next_items())

        with pytest.raises(SandboxException, match="404"):
            Sandbox.create("no-such-template", timeout=30)

        assert len(Sandbox.list().next_items()) == before

    def test_a_wrong_key_is_refused(self, server: Server) -> None:
        with pytest.raises(AuthenticationException):
            Sandbox.create("base", api_key="e2b_" + "0" * 40)


class TestCommands:
    def test_output_and_exit_code(self, sandbox: Sandbox) -> None:
        result = sandbox.commands.run("echo out; echo err >&2")

        assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)

    def test_a_failing_command_raises_with_its_code(self, sandbox: Sandbox) -> None:
        with pytest.raises(CommandExitException) as failed:
            sandbox.commands.run("echo before; exit 42")

        assert failed.value.exit_code == 42
        assert failed.value.stdout == "before\n"

    def test_environment_directory_and_user(self, sandbox: Sandbox) -> None:
        result = sandbox.commands.run("echo $GREETING $EXTRA; pwd; id -un", envs={"EXTRA": "more"}, cwd="/tmp")
        as_root = sandbox.commands.run("id -un; echo $HOME", user="root")

        assert result.stdout == "hello more\n/tmp\nuser\n"
        assert as_root.stdout == "root\n/root\n"

    def test_e2b_variables_are_set(self, sandbox: Sandbox) -> None:
        result = sandbox.commands.run("echo $E2B_SANDBOX $E2B_SANDBOX_ID")

        assert result.stdout == f"true {sandbox.sandbox_id}\n"

    def test_a_missing_directory_is_invalid(self, sandbox: Sandbox) -> None:
        with pytest.raises(InvalidArgumentException):
            sandbox.commands.run("true", cwd="/no/such/place")

    def test_an_unknown_user_is_refused(self, sandbox: Sandbox) -> None:
        with pytest.raises(AuthenticationException):
            sandbox.commands.run("true", user="nobody-at-all")

    def test_output_arrives_while_the_command_runs(self, sandbox: Sandbox) -> None:
        seen: list[str] = []
        handle = sandbox.commands.run("echo one; cat >/dev/null; echo two", background=True, stdin=True)
        arrived = threading.Event()

        def on_stdout(text: str) -> None:
            seen.append(text)
            arrived.set()

        waiting = threading.Thread(target=lambda: handle.wait(on_stdout=on_stdout))
        waiting.start()
        assert arrived.wait(60)
        assert seen == ["one\n"]
        handle.close_stdin()
        waiting.join(60)
        assert "".join(seen) == "one\ntwo\n"

    def test_background_stdin_list_and_kill(self, sandbox: Sandbox) -> None:
        handle = sandbox.commands.run("cat", background=True, stdin=True)
        sandbox.commands.send_stdin(handle.pid, "typed\n")

        assert handle.pid in [process.pid for process in sandbox.commands.list()]
        assert handle.kill() is True
        with pytest.raises(CommandExitException):
            handle.wait()
        assert handle.pid not in [process.pid for process in sandbox.commands.list()]
        assert sandbox.commands.kill(handle.pid) is False

    def test_stdin_is_passed_on_and_closed(self, sandbox: Sandbox) -> None:
        handle = sandbox.commands.run("wc -c", background=True, stdin=True)
        sandbox.commands.send_stdin(handle.pid, "12345")
        sandbox.commands.close_stdin(handle.pid)

        assert handle.wait().stdout.strip() == "5"

    def test_connect_to_a_running_command(self, sandbox: Sandbox) -> None:
        handle = sandbox.commands.run("read line; echo got $line", background=True, stdin=True)

        other = sandbox.commands.connect(handle.pid)
        sandbox.commands.send_stdin(handle.pid, "it\n")

        assert other.wait().stdout == "got it\n"
        assert handle.wait().stdout == "got it\n"

    def test_a_command_outlives_a_client_that_leaves(self, sandbox: Sandbox) -> None:
        handle = sandbox.commands.run("cat; echo done >/tmp/outlived", background=True, stdin=True)
        handle.disconnect()

        sandbox.commands.close_stdin(handle.pid)
        sandbox.commands.run("until [ -f /tmp/outlived ]; do sleep 0.1; done", timeout=60)

        assert sandbox.files.read("/tmp/outlived") == "done\n"

    def test_large_output_is_complete(self, sandbox: Sandbox) -> None:
        result = sandbox.commands.run("head -c 5000000 /dev/zero | tr '\\0' x", timeout=240)

        assert len(result.stdout) == 5_000_000
        assert set(result.stdout) == {"x"}

    def test_lines_blank_ones_and_split_characters_are_kept(self, sandbox: Sandbox) -> None:
        result = sandbox.commands.run("printf 'a\\n\\n\\nb'; printf '\\303'; sleep 0.3; printf '\\244'")

        assert result.stdout == "a\n\n\nbä"

    def test_a_time_out_ends_the_command(self, sandbox: Sandbox) -> None:
        with pytest.raises(TimeoutException):
            sandbox.commands.run("exec -a aenv-timeout-probe sleep 1000", timeout=2)

        sandbox.commands.run("while pgrep -f '^aenv-timeout-probe'; do sleep 0.1; done", timeout=30)

    def test_many_at_once(self, sandbox: Sandbox) -> None:
        handles = [sandbox.commands.run(f"echo {i}", background=True) for i in range(20)]

        assert [handle.wait().stdout for handle in handles] == [f"{i}\n" for i in range(20)]


class TestFiles:
    def test_write_and_read(self, sandbox: Sandbox) -> None:
        info = sandbox.files.write("notes/today.txt", "grüße\n")

        assert info.path == "/home/user/notes/today.txt"
        assert sandbox.files.read("notes/today.txt") == "grüße\n"
        assert sandbox.commands.run("stat -c %U notes/today.txt").stdout == "user\n"

    def test_bytes_of_any_size(self, sandbox: Sandbox) -> None:
        for size in (0, 1, 18 << 10, 3 << 20):
            data = bytes(i * 7 % 256 for i in range(1024)) * (size // 1024) + b"z" * (size % 1024)
            sandbox.files.write("/tmp/blob", data)
            assert bytes(sandbox.files.read("/tmp/blob", format="bytes")) == data

    def test_several_files_in_one_call(self, sandbox: Sandbox) -> None:
        sandbox.files.write_files([{"path": "/tmp/many/a", "data": "A"}, {"path": "/tmp/many/b/c", "data": "C"}])

        assert sandbox.files.read("/tmp/many/a") + sandbox.files.read("/tmp/many/b/c") == "AC"

    def test_a_missing_file_is_not_found(self, sandbox: Sandbox) -> None:
        with pytest.raises(NotFoundException):
            sandbox.files.read("/no/such/file")

    def test_list_and_info(self, sandbox: Sandbox) -> None:
        sandbox.files.write("/tmp/dir/inner/file", "12345")
        entries = sandbox.files.list("/tmp/dir", depth=2)
        info = sandbox.files.get_info("/tmp/dir/inner/file")

        assert [(e.name, e.type) for e in entries] == [("inner", FileType.DIR), ("file", FileType.FILE)]
        assert (info.size, info.owner, info.permissions) == (5, "user", "-rw-r--r--")

    def test_make_dir_rename_exists_and_remove(self, sandbox: Sandbox) -> None:
        assert sandbox.files.make_dir("/tmp/made/deep") is True
        assert sandbox.files.make_dir("/tmp/made/deep") is False
        sandbox.files.rename("/tmp/made/deep", "/tmp/made/renamed")
        assert not sandbox.files.exists("/tmp/made/deep")
        assert sandbox.files.exists("/tmp/made/renamed")
        sandbox.files.remove("/tmp/made")
        assert not sandbox.files.exists("/tmp/made")

    def test_what_the_user_may_not_write_is_refused(self, sandbox: Sandbox) -> None:
        with pytest.raises(SandboxException):
            sandbox.files.write("/etc/shadow", "mine now")


class TestPauseAndFork:
    def test_a_paused_sandbox_goes_on_where_it_was(self, own: Sandbox) -> None:
        counter = "import time\nn=0\nwhile True:\n n+=1; open('/dev/shm/n','w').write(str(n)); time.sleep(0.02)"
        own.files.write("/tmp/counter.py", counter)
        own.files.write("/tmp/on-disk", "kept")
        handle = own.commands.run("python3 /tmp/counter.py", background=True, timeout=0)
        own.commands.run("until [ -s /dev/shm/n ]; do sleep 0.1; done", timeout=60)
        token = own.connection_config.sandbox_headers if hasattr(own, "connection_config") else None

        assert own.pause() is True
        assert own.get_info().state is SandboxState.PAUSED
        assert own.pause() is False
        assert not own.is_running()
        own.connect(timeout=300)

        assert own.get_info().state is SandboxState.RUNNING
        first = int(own.commands.run("cat /dev/shm/n").stdout or 0)
        own.commands.run(f"until [ $(cat /dev/shm/n || echo 0) -gt {first} ]; do sleep 0.1; done", timeout=60)
        assert own.files.read("/tmp/on-disk") == "kept"
        assert handle.pid in [process.pid for process in own.commands.list()]
        assert token == (own.connection_config.sandbox_headers if hasattr(own, "connection_config") else None)

    def test_ten_cycles_keep_id_files_and_memory(self, own: Sandbox) -> None:
        own.commands.run("echo 0 >/dev/shm/memory; echo 0 >/home/user/disk")
        for cycle in range(1, 11):
            own.pause()
            own.connect(timeout=300)
            kept = own.commands.run("cat /dev/shm/memory /home/user/disk").stdout
            assert kept == f"{cycle - 1}\n{cycle - 1}\n"
            own.commands.run(f"echo {cycle} >/dev/shm/memory; echo {cycle} >/home/user/disk")

    def test_the_clock_is_right_after_a_pause(self, own: Sandbox) -> None:
        own.pause()
        time.sleep(3)
        own.connect(timeout=300)

        before = time.time()
        guest = float(own.commands.run("date +%s.%N").stdout)
        assert before - 1 <= guest <= time.time() + 1

    def test_children_share_the_past_and_nothing_else(self, own: Sandbox) -> None:
        own.files.write("/tmp/past", "shared")
        own.commands.run("echo memory >/dev/shm/past")

        outcomes = own.fork(count=3, timeout=300)

        children = [child for child in outcomes if isinstance(child, Sandbox)]
        try:
            assert len(children) == 3, outcomes
            everyone = [own, *children]
            assert len({each.sandbox_id for each in everyone}) == 4
            for each in everyone:
                assert each.files.read("/tmp/past") == "shared"
                assert each.commands.run("cat /dev/shm/past").stdout == "memory\n"
            for each in everyone:
                each.files.write("/tmp/past", each.sandbox_id)
            for each in everyone:
                assert each.files.read("/tmp/past") == each.sandbox_id
            identity = "cat /etc/machine-id; hostname; head -c 16 /dev/urandom | base64; echo $E2B_SANDBOX_ID"
            lines = [each.commands.run(identity).stdout.splitlines() for each in everyone]
            for told in zip(*lines, strict=True):
                assert len(set(told)) == 4, told
        finally:
            for child in children:
                child.kill()

    def test_a_snapshot_can_be_started_after_its_source_is_gone(self, server: Server) -> None:
        source = Sandbox.create("base", timeout=300, envs={"KEPT": "yes"})
        source.commands.run("echo live >/dev/shm/state; echo disk >/home/user/state")
        snapshot = source.create_snapshot(name="compat-snapshot")
        assert source.commands.run("cat /dev/shm/state").stdout == "live\n"
        source.kill()

        try:
            assert snapshot.snapshot_id in [s.snapshot_id for s in Sandbox.list_snapshots().next_items()]
            for template in ("compat-snapshot", snapshot.snapshot_id):
                with Sandbox.create(template, timeout=120) as made:
                    result = made.commands.run("cat /dev/shm/state /home/user/state; echo $KEPT")
                    assert result.stdout == "live\ndisk\nyes\n"
        finally:
            assert Sandbox.delete_snapshot("compat-snapshot") is True
        assert Sandbox.delete_snapshot("compat-snapshot") is False

    def test_traffic_wakes_a_sandbox_that_may_be_woken(self, server: Server) -> None:
        made = Sandbox.create("base", timeout=300, lifecycle={"on_timeout": "pause", "auto_resume": True})
        try:
            made.pause()
            assert made.commands.run("echo awake").stdout == "awake\n"
            assert made.get_info().state is SandboxState.RUNNING
        finally:
            made.kill()

    def test_an_expired_sandbox_may_be_paused_instead(self, server: Server) -> None:
        made = Sandbox.create("base", timeout=2, lifecycle={"on_timeout": "pause"})
        try:
            made.files.write("/tmp/kept", "yes")
            server.wait_until(lambda: made.get_info().state is SandboxState.PAUSED, "the sandbox to be paused")
            made.connect(timeout=120)
            assert made.files.read("/tmp/kept") == "yes"
        finally:
            made.kill()
