"""`aenv exec` against an agent behind the proxy: output, input, exit codes."""

import base64
import signal
import subprocess

import pytest

from tests.unit.cli.world import NOBODY, WAIT_S, Terminal, World, started


@pytest.fixture
def sandbox(world: World) -> str:
    return world.node.add_sandbox().id


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["exit", "0"], 0), (["exit", "3"], 3), (["exit", "255"], 255), (["say", "a", "b"], 0),
        (["signal", "signal: terminated"], 143), (["signal", "signal: segmentation fault (core dumped)"], 139),
        (["missing"], 127), (["slow"], 124), (["vanish"], 1),
    ],
)  # fmt: skip
def test_the_exit_code_is_the_command_s(aenv: Terminal, sandbox: str, command: list[str], code: int) -> None:
    assert aenv("exec", sandbox, "--", *command).code == code


def test_both_outputs_arrive_where_they_belong(aenv: Terminal, sandbox: str) -> None:
    run = aenv("exec", sandbox, "say", "to out", "to err")

    assert (run.out, run.err) == ("to out", "to err")


def test_the_command_is_passed_on_as_it_is(world: World, aenv: Terminal, sandbox: str) -> None:
    run = aenv("exec", "-u", "root", "-w", "/srv", "-e", "A=b=c", sandbox, "say", "--json", "-x")

    assert run.out == "--json"
    assert world.agent.started == [
        {"process": {"cmd": "say", "args": ["--json", "-x"], "cwd": "/srv", "envs": {"A": "b=c"}}, "stdin": False}
    ]
    assert world.agent.users == [f"Basic {base64.b64encode(b'root:').decode()}"]
    assert world.agent.tokens == {f"envd-{sandbox}"}


@pytest.mark.slow
def test_input_is_passed_on_byte_by_byte(aenv: Terminal, sandbox: str) -> None:
    # Beyond one chunk, and with bytes that are no text; only text can be compared on the way back.
    sent = ("line\n" * 20_000).encode()

    run = aenv.process("exec", "-i", sandbox, "cat", stdin=sent)

    assert (run.code, run.out) == (0, sent.decode())


@pytest.mark.slow
def test_output_is_bytes(aenv: Terminal, sandbox: str) -> None:
    done = subprocess.run(
        aenv.command("exec", sandbox, "bytes"), env=aenv.environment, capture_output=True, timeout=WAIT_S, check=False
    )

    assert done.stdout == bytes(range(256))


def test_input_is_left_alone_unless_asked_for(world: World, aenv: Terminal, sandbox: str) -> None:
    assert aenv("exec", sandbox, "exit", "0").code == 0
    assert not world.agent.closed.is_set()


@pytest.mark.slow
def test_a_command_ends_with_the_reader_of_its_output(world: World, aenv: Terminal, sandbox: str) -> None:
    with started(
        aenv.command("exec", sandbox, "yes"), env=aenv.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.read(2) == b"y\n"
        child.stdout.close()
        assert (child.wait(WAIT_S), child.stderr.read()) == (0, b"")

    assert world.agent.signals == ["SIGNAL_SIGTERM"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_ends_with_us(world: World, aenv: Terminal, sandbox: str, number: signal.Signals) -> None:
    with started(
        aenv.command("exec", sandbox, "yes"), env=aenv.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.read(2) == b"y\n"
        child.send_signal(number)
        _, said = child.communicate(timeout=WAIT_S)

    assert (child.returncode, said) == (128 + number, b"")
    assert world.agent.signals == ["SIGNAL_SIGTERM"]


def test_a_paused_sandbox_is_said_to_be_paused(world: World, aenv: Terminal, sandbox: str) -> None:
    aenv("pause", sandbox)

    run = aenv("exec", sandbox, "exit", "0")

    assert run.code == 1
    assert f"aenv resume {sandbox}" in run.err
    assert world.agent.started == []


def test_a_sandbox_in_error_says_why(world: World, aenv: Terminal, sandbox: str) -> None:
    world.node.lose(sandbox, "its virtual machine ended")

    run = aenv("exec", sandbox, "exit", "0")

    assert run.code == 1
    assert run.err.splitlines() == [
        "error: the sandbox is in error: its virtual machine ended", f"hint: aenv delete {sandbox}"
    ]  # fmt: skip


def test_wrong_usage(aenv: Terminal, sandbox: str) -> None:
    assert aenv("exec", sandbox).code == 2
    assert aenv("exec", sandbox, "--").code == 2
    assert aenv("exec", "-e", "novalue", sandbox, "exit", "0").code == 2
    assert aenv("shell", sandbox).code in (1, 2)
    assert aenv("exec", NOBODY, "exit", "0").code == 1


def test_options_after_the_id(world: World, aenv: Terminal, sandbox: str) -> None:
    run = aenv("exec", sandbox, "-u", "root", "exit", "0")

    assert run.code == 2
    assert "options go before the sandbox id" in run.err
    assert world.agent.started == []
    aenv("exec", sandbox, "--", "-u")
    assert world.agent.started[0]["process"]["cmd"] == "-u"
