"""process.Process: starting, output, ends, signals."""

import base64
import time

import pytest

from tests.unit.guest_envd.agent import Agent, StreamError, as_user, is_alive, wait_gone, wait_until
from tests.unit.guest_envd.conftest import USER_ID, Box

pytestmark = pytest.mark.needs("root", "mount", "envd")

START = "process.Process/Start"


def selector(pid: int) -> dict[str, dict[str, int]]:
    return {"process": {"pid": pid}}


def test_a_successful_command_has_no_error(agent: Agent) -> None:
    outcome = agent.run("echo", "hi")
    assert outcome.stdout == b"hi\n"
    assert outcome.end == {"exitCode": 0, "exited": True, "status": "exit status 0"}


def test_an_exit_code_is_in_the_status_and_in_the_error(agent: Agent) -> None:
    outcome = agent.shell("echo out; echo err >&2; exit 3")
    assert (outcome.stdout, outcome.stderr) == (b"out\n", b"err\n")
    assert outcome.end == {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}


def test_the_snake_case_and_null_forms_of_a_request_are_understood(agent: Agent) -> None:
    with agent.stream(
        START, {"process": {"cmd": "true", "args": None, "envs": None, "cwd": None}, "pty": None}
    ) as stream:
        assert stream.outcome(stream.started()).end["exitCode"] == 0


def test_every_byte_comes_through(agent: Agent) -> None:
    outcome = agent.shell(r"printf '\0\377\n\n\303'; printf '\274'")
    assert outcome.stdout == b"\0\xff\n\n\xc3\xbc"


@pytest.mark.slow
def test_a_large_output_comes_through_whole(agent: Agent) -> None:
    outcome = agent.shell("seq 1 2000000")
    assert outcome.stdout == "".join(f"{n}\n" for n in range(1, 2_000_001)).encode()


def test_a_process_runs_as_the_user_with_all_groups_in_its_home(box: Box) -> None:
    outcome = box.agent.shell(
        "id -u; id -G; pwd; echo $HOME $USER $LOGNAME; umask; ps -o sid= -p $$ | tr -d ' '; echo $$"
    )
    lines = outcome.stdout.decode().split("\n")
    assert lines[0] == str(USER_ID)
    assert sorted(lines[1].split()) == ["1000", "1234"]
    assert lines[2:5] == [str(box.home), f"{box.home} user user", "0022"]
    assert lines[5] == lines[6] == str(outcome.pid), "it leads a session of its own"


def test_the_user_of_a_call_overrides_the_default(agent: Agent) -> None:
    assert agent.shell("id -u", headers=as_user("root")).stdout == b"0\n"


def test_an_unknown_user_is_unauthenticated(agent: Agent) -> None:
    with agent.start("true", headers=as_user("nobody-here")) as stream, pytest.raises(StreamError) as failed:
        next(stream)
    assert failed.value.code == "unauthenticated"


@pytest.mark.parametrize("header", ["Bearer x", "Basic", "Basic !!!", "nonsense"])
def test_credentials_that_are_not_understood_are_unauthenticated(agent: Agent, header: str) -> None:
    assert agent.failure("filesystem.Filesystem/Stat", {"path": "/"}, {"Authorization": header}) == (
        401,
        "unauthenticated",
    )


def test_variables_of_the_request_win_over_those_of_the_sandbox(agent: Agent) -> None:
    agent.init(envVars={"A": "sandbox", "B": "sandbox"}, sandboxId="sbx", templateId="tpl")
    outcome = agent.shell("echo $A $B $E2B_SANDBOX $E2B_SANDBOX_ID $E2B_TEMPLATE_ID", process={"envs": {"A": "own"}})
    agent.init(envVars={})
    assert outcome.stdout == b"own sandbox true sbx tpl\n"


def test_the_program_is_searched_for_in_the_path_of_the_process(box: Box) -> None:
    tool = box.home / "tool"
    tool.write_text("#!/bin/sh\necho found\n")
    tool.chmod(0o755)
    assert box.agent.run("tool", process={"envs": {"PATH": f"/nowhere:{box.home}"}}).stdout == b"found\n"


def test_the_working_directory_is_that_of_the_request(agent: Agent) -> None:
    assert agent.shell("pwd", process={"cwd": "/usr/bin/../lib"}).stdout == b"/usr/lib\n"


@pytest.mark.parametrize(
    "process",
    [
        {"cmd": "no-such-program"},
        {"cmd": "/no/such/program"},
        {"cmd": "/etc/passwd"},
        {"cmd": "/etc"},
        {"cmd": ""},
        {"cmd": "true", "cwd": "/no/such/directory"},
        {"cmd": "true", "cwd": "/etc/passwd"},
        {"cmd": "a\0b"},
        {"cmd": "true", "args": ["x" * 200_000]},
    ],
)
def test_what_cannot_be_run_is_an_invalid_argument(agent: Agent, process: dict[str, object]) -> None:
    with agent.stream(START, {"process": process}) as stream, pytest.raises(StreamError) as failed:
        next(stream)
    assert failed.value.code == "invalid_argument"
    assert agent.pids() == []


def test_a_signal_is_told_by_its_name(agent: Agent) -> None:
    assert agent.shell("kill -SEGV $$").end["status"].startswith("signal: segmentation fault")
    assert agent.shell("kill -HUP $$").end == {
        "exitCode": -1, "exited": False, "status": "signal: hangup", "error": "signal: hangup",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"), [("SIGNAL_SIGKILL", "killed"), ("SIGNAL_SIGTERM", "terminated"), (9, "killed")]
)
def test_a_sent_signal_ends_the_process_and_all_subscribers_hear_of_it(agent: Agent, name: object, text: str) -> None:
    with agent.start("sleep", "60") as first:
        pid = first.started()
        with agent.stream("process.Process/Connect", selector(pid)) as second:
            assert second.started() == pid
            assert agent.call("process.Process/SendSignal", {**selector(pid), "signal": name}) == {}
            for stream in (first, second):
                end = stream.outcome(pid).end
                assert (end["exitCode"], end["exited"], end["status"]) == (-1, False, f"signal: {text}")
    assert agent.failure("process.Process/SendSignal", {**selector(pid), "signal": name}) == (404, "not_found")


def test_other_signals_cannot_be_sent(agent: Agent) -> None:
    with agent.start("sleep", "60") as stream:
        pid = stream.started()
        for value in ("SIGNAL_UNSPECIFIED", 2):
            assert agent.failure("process.Process/SendSignal", {**selector(pid), "signal": value}) == (
                501,
                "unimplemented",
            )
        assert agent.failure("process.Process/SendSignal", {**selector(pid), "signal": "SIGNUP"}) == (
            400,
            "invalid_argument",
        )


def test_a_kill_reaches_the_whole_group_and_does_not_wait_for_survivors(agent: Agent) -> None:
    with agent.start("/bin/sh", "-c", "sleep 61 & setsid sleep 62 & echo $!; wait", stdin=False) as stream:
        pid = stream.started()
        stream.until_output(b"\n")
        children = _children_of(agent, pid)
        agent.call("process.Process/SendSignal", {**selector(pid), "signal": "SIGNAL_SIGKILL"})
        assert stream.outcome(pid).end["status"] == "signal: killed"
    in_group = [child for child, session in children if session == pid]
    assert len(in_group) == 1
    wait_gone(in_group[0])
    for child, _ in children:
        agent.shell(f"kill -9 {child} 2>/dev/null; true")


def _children_of(agent: Agent, pid: int) -> list[tuple[int, int]]:
    listed = agent.shell(f"ps -o pid=,sid= --ppid {pid}").stdout.decode()
    return [(int(child), int(session)) for child, session in (line.split() for line in listed.splitlines())]


def test_the_end_waits_for_children_that_hold_the_output(agent: Agent) -> None:
    outcome = agent.shell("(sleep 0.5; echo late) & echo early")
    assert outcome.stdout == b"early\nlate\n"


def test_a_deadline_kills_the_process(agent: Agent) -> None:
    with agent.start("/bin/sh", "-c", "echo on; sleep 60", headers={"Connect-Timeout-Ms": "400"}) as stream:
        pid = stream.started()
        with pytest.raises(StreamError) as failed:
            stream.outcome(pid)
    assert failed.value.code == "deadline_exceeded"
    wait_gone(pid)
    wait_until(lambda: agent.pids() == [])


def test_a_deadline_of_a_connection_ends_only_the_stream(agent: Agent) -> None:
    with agent.start("sleep", "60") as first:
        pid = first.started()
        with (
            agent.stream("process.Process/Connect", selector(pid), {"Connect-Timeout-Ms": "100"}) as second,
            pytest.raises(StreamError) as failed,
        ):
            second.outcome(second.started())
        assert failed.value.code == "deadline_exceeded"
        assert is_alive(pid)


def test_a_client_that_leaves_does_not_end_the_process(agent: Agent) -> None:
    with agent.start("/bin/sh", "-c", "read line; echo got $line") as stream:
        pid = stream.started()
    with agent.stream("process.Process/Connect", selector(pid)) as stream:
        stream.started()
        text = base64.b64encode(b"it\n").decode()
        agent.call("process.Process/SendInput", {**selector(pid), "input": {"stdin": text}})
        assert stream.outcome(pid).stdout == b"got it\n"


def test_the_deadline_of_a_client_that_left_still_holds(agent: Agent) -> None:
    with agent.start("sleep", "60", headers={"Connect-Timeout-Ms": "300"}) as stream:
        pid = stream.started()
    wait_gone(pid)


@pytest.mark.parametrize("bad", ["x", "-1", "12345678901", "1.5"])
def test_a_malformed_deadline_is_refused(agent: Agent, bad: str) -> None:
    with agent.start("true", headers={"Connect-Timeout-Ms": bad}) as stream, pytest.raises(StreamError) as failed:
        next(stream)
    assert failed.value.code == "invalid_argument"


def test_live_processes_are_listed_with_their_configuration(agent: Agent) -> None:
    config = {"cwd": "/tmp", "envs": {"A": "b"}}
    with agent.start("sleep", "60", process=config, tag="my tag") as stream:
        pid = stream.started()
        (info,) = agent.call("process.Process/List", {})["processes"]
        assert info == {"config": {"cmd": "sleep", "args": ["60"], **config}, "pid": pid, "tag": "my tag"}
        agent.call("process.Process/SendSignal", {"process": {"tag": "my tag"}, "signal": "SIGNAL_SIGKILL"})
        stream.outcome(pid)
    assert agent.call("process.Process/List", {}) == {"processes": []}


def test_a_connection_gets_what_comes_after_it(agent: Agent) -> None:
    with agent.start("/bin/sh", "-c", "echo before; read x; echo after") as first:
        pid = first.started()
        first.until_output(b"before\n")
        with agent.stream("process.Process/Connect", selector(pid)) as second:
            second.started()
            agent.call("process.Process/CloseStdin", selector(pid))
            assert second.outcome(pid).stdout == b"after\n"
        assert first.outcome(pid).end["exitCode"] == 0


@pytest.mark.parametrize("method", ["SendSignal", "SendInput", "Update", "CloseStdin"])
@pytest.mark.parametrize("which", [{"pid": 999_999_999}, {"tag": "no such tag"}])
def test_a_process_that_is_not_there_is_not_found(agent: Agent, method: str, which: dict[str, object]) -> None:
    fields = {"signal": "SIGNAL_SIGKILL", "input": {"stdin": "eA=="}, "pty": {"size": {"cols": 1, "rows": 1}}}
    assert agent.failure(f"process.Process/{method}", {"process": which, **fields}) == (404, "not_found")


def test_connecting_to_a_process_that_is_not_there_ends_the_stream(agent: Agent) -> None:
    with agent.stream("process.Process/Connect", selector(999_999_999)) as stream, pytest.raises(StreamError) as failed:
        next(stream)
    assert failed.value.code == "not_found"


@pytest.mark.parametrize("which", [{}, {"pid": 1, "tag": "x"}, {"pid": -1}, {"pid": "x"}, None])
def test_a_selector_must_select(agent: Agent, which: object) -> None:
    assert agent.failure("process.Process/CloseStdin", {"process": which}) == (400, "invalid_argument")


def test_silence_is_broken_by_keepalives_after_the_start(agent: Agent) -> None:
    with agent.start("sleep", "60", headers={"Keepalive-Ping-Interval": "1"}) as stream:
        stream.started()
        began = time.monotonic()
        assert stream.event() == {"keepalive": {}}
        assert time.monotonic() - began > 0.9


def test_standard_input_is_nothing_when_it_is_not_wanted(agent: Agent) -> None:
    assert agent.shell("readlink /proc/self/fd/0; cat").stdout == b"/dev/null\n"


def test_a_process_gets_no_descriptor_of_the_agent(agent: Agent) -> None:
    outcome = agent.shell("ls /proc/$$/fd")
    assert outcome.stdout.split() == [b"0", b"1", b"2"]


def test_a_process_starts_with_no_signal_blocked_or_ignored(agent: Agent) -> None:
    status = agent.run("grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status").stdout.split()
    assert status[1::2] == [b"0" * 16, b"0" * 16]


def test_a_pid_is_not_given_away_before_its_end_is_told(agent: Agent) -> None:
    with agent.start("/bin/sh", "-c", "(sleep 0.5) & exit 0", stdin=False) as stream:
        pid = stream.started()
        wait_until(lambda: not is_alive(pid))
        assert agent.pids() == [pid]
        stream.outcome(pid)
    assert agent.pids() == []
