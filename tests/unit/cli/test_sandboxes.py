"""Commands on sandboxes, by what they print, what they do to the node, and how they exit."""

import json
from datetime import UTC, datetime

import pytest
import typer

from agentenv.cli.times import parse_duration
from agentenv.model.errors import Exhausted
from agentenv.node.contract import LogLine
from tests.unit.cli.world import NOBODY, Terminal, World


def test_start_prints_what_was_made(world: World, aenv: Terminal) -> None:
    run = aenv("start", "base", "-t", "1h30m", "-m", "who=me", "-e", "A=1", "--auto-pause", "--no-internet")

    assert run.code == 0
    assert {json.loads(run.out)["sandboxID"]} == world.ids
    asked = world.node.asked[0]
    assert (asked.template, asked.timeout_s, asked.metadata, asked.env) == ("base", 5400, {"who": "me"}, {"A": "1"})
    assert asked.on_timeout == "pause"


def test_start_of_an_unknown_template(world: World, aenv: Terminal) -> None:
    run = aenv("start", "nothing")

    assert (run.code, run.out, world.ids) == (1, "", set())
    assert "error:" in run.err
    assert "nothing" in run.err


def test_ls_piped_is_json(world: World, aenv: Terminal) -> None:
    world.node.add_sandbox(metadata={"a": "1 &"})
    world.node.add_sandbox()

    assert {one["sandboxID"] for one in json.loads(aenv("ls").out)} == world.ids
    assert len(json.loads(aenv("ls", "-m", "a=1 &").out)) == 1
    assert json.loads(aenv("ls", "--state", "paused").out) == []
    assert set(aenv("ls", "-q").out.split()) == world.ids


def test_ls_reads_every_page(world: World, aenv: Terminal) -> None:
    for _ in range(230):
        world.node.add_sandbox()

    assert set(aenv("ls", "-q").out.split()) == world.ids


@pytest.mark.slow
def test_ls_on_a_terminal_is_a_table(world: World, aenv: Terminal) -> None:
    sandbox = world.node.add_sandbox(metadata={"note": "[/red]\x1b]0;title\x07"})

    run = aenv.on_pty("ls")

    assert run.code == 0
    head, row = run.out.strip().split("\n")
    assert head.split()[:3] == ["SANDBOX", "TEMPLATE", "STATE"]
    assert row.split()[:3] == [sandbox.id, "base", "running"]
    assert "note=[/red]" in row  # as it is, and not as a colour
    assert "\x1b" not in row
    assert json.loads(aenv.on_pty("ls", "--json").out)[0]["sandboxID"] == sandbox.id


@pytest.mark.slow
def test_ls_on_a_terminal_shows_the_exact_state(world: World, aenv: Terminal) -> None:
    world.node.lose(world.node.add_sandbox().id, "its virtual machine ended")

    assert aenv.on_pty("ls").out.strip().split("\n")[1].split()[2] == "error"


@pytest.mark.slow
@pytest.mark.parametrize("metadata", [{}, {"purpose": "a long note on what this one is for"}])
def test_ls_on_a_narrow_terminal_keeps_ids_whole(world: World, aenv: Terminal, metadata: dict[str, str]) -> None:
    sandbox = world.node.add_sandbox(metadata=metadata)

    rows = aenv.on_pty("ls", columns=80).out.strip().split("\n")

    assert rows[1].startswith(f"{sandbox.id} ")
    assert " ago " in rows[1]
    assert " in " in rows[1]
    assert max(map(len, rows)) <= 80


def test_info(world: World, aenv: Terminal) -> None:
    sandbox = world.node.add_sandbox()

    assert json.loads(aenv("info", sandbox.id).out)["sandboxID"] == sandbox.id
    assert aenv("info", NOBODY).code == 1


@pytest.mark.slow
def test_info_on_a_terminal(world: World, aenv: Terminal) -> None:
    sandbox = world.node.add_sandbox(metadata={"a": "[/b]"})

    run = aenv.on_pty("info", sandbox.id)

    assert run.code == 0
    lines = run.out.splitlines()
    assert f"sandboxID: {sandbox.id}" in lines
    assert "metadata.a: [/b]" in lines
    assert "lifecycle.autoResume: no" in lines
    assert "{" not in run.out


@pytest.mark.slow
def test_info_shows_a_token_only_to_programs_and_on_request(world: World, aenv: Terminal) -> None:
    sandbox = world.node.add_sandbox(secure=True)
    token = json.loads(aenv("info", sandbox.id).out)["envdAccessToken"]

    hidden, shown = aenv.on_pty("info", sandbox.id), aenv.on_pty("info", "--show-secrets", sandbox.id)

    assert token not in hidden.out
    assert "envdAccessToken: (hidden; --show-secrets)" in hidden.out.splitlines()
    assert f"envdAccessToken: {token}" in shown.out.splitlines()


def test_pause_and_resume(world: World, aenv: Terminal) -> None:
    sandbox = world.node.add_sandbox()

    assert aenv("pause", sandbox.id).code == 0
    assert world.state(sandbox.id) == "paused"
    again = aenv("pause", sandbox.id)
    assert again.code == 1
    assert "409" in again.err
    assert aenv("resume", sandbox.id, "-t", "10m").code == 0
    assert world.state(sandbox.id) == "running"


def test_the_help_of_resume_says_what_becomes_of_the_time_that_was_left(aenv: Terminal) -> None:
    told = " ".join(aenv("resume", "--help").out.split())

    assert "--timeout from now, 5m if not given" in told
    assert "however much time was left" in told


@pytest.mark.parametrize("command", ["start", "resume", "fork", "timeout"])
def test_help_does_not_call_a_length_of_time_a_number(aenv: Terminal, command: str) -> None:
    line = next(one for one in aenv(command, "--help").out.splitlines() if ": 90" in one)

    assert "DURATION" in line
    assert "<int>" not in line


def test_fork_prints_every_child_and_fails_with_one(world: World, aenv: Terminal) -> None:
    sandbox = world.node.add_sandbox()
    world.node.fork_failures[1] = Exhausted("no [/slot] is free", hint="delete a sandbox")

    run = aenv("fork", sandbox.id, "-n", "3")

    assert run.code == 1
    children = json.loads(run.out)
    assert [child.get("error") is not None for child in children] == [False, True, False]
    assert "no [/slot] is free" in run.err
    assert run.err.count("delete a sandbox") == 1
    assert len(world.ids) == 3
    world.node.fork_failures.clear()
    assert aenv("fork", sandbox.id).code == 0
    assert aenv("fork", sandbox.id, "-n", "0").code == 2


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90), ("90s", 90), ("5m", 300), ("1h30m", 5400), ("1h1m1s", 3661), (" 2h ", 7200), ("1d", 86400),
        ("1d2h", 93600),
    ],
)  # fmt: skip
def test_a_length_of_time(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", " ", "h", "-5", "d", "2h1d", "5m1h", "1.5h", "ten", "5 m", "1h30m5x"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_duration(text)


def test_timeout(world: World, aenv: Terminal) -> None:
    sandbox = world.node.add_sandbox()

    assert aenv("timeout", sandbox.id, "2h").code == 0
    ends_at = world.node.get(sandbox.id).ends_at
    assert ends_at is not None
    assert sandbox.ends_at is not None
    assert (ends_at - sandbox.ends_at).total_seconds() > 6000
    assert aenv("timeout", sandbox.id, "soon").code == 2
    assert aenv("timeout", sandbox.id, "9" * 30 + "h").code == 1
    assert aenv("start", "-t", "soon").code == 2


@pytest.mark.parametrize("text", ["-5", "-5m", "-1h"])
@pytest.mark.parametrize("words", [["timeout", NOBODY], ["start", "-t"], ["resume", NOBODY, "--timeout"]])
def test_a_negative_length_of_time_is_told_as_that(aenv: Terminal, words: list[str], text: str) -> None:
    run = aenv(*words, text)

    assert run.code == 2
    assert "is not a length of time" in run.err
    assert "option:" not in run.err.lower()


def test_logs_piped_are_json(world: World, aenv: Terminal) -> None:
    sandbox = world.node.add_sandbox()
    at = datetime(2026, 1, 2, tzinfo=UTC)
    world.node.console[sandbox.id] = [LogLine(at, "info", f"line {number}") for number in range(3)]

    entries = json.loads(aenv("logs", sandbox.id, "-n", "2").out)

    assert [one["message"] for one in entries] == ["line 1", "line 2"]
    assert entries[0]["level"] == "info"
    assert json.loads(aenv("logs", world.node.add_sandbox().id).out) == []


@pytest.mark.slow
def test_logs_on_a_terminal_are_text_that_the_terminal_does_not_obey(world: World, aenv: Terminal) -> None:
    sandbox = world.node.add_sandbox()
    world.node.console[sandbox.id] = [LogLine(datetime(2026, 1, 2, tzinfo=UTC), "warn", "a\x1b[2Jb [/x]")]

    run = aenv.on_pty("logs", sandbox.id)

    assert run.code == 0
    assert run.out.startswith("2026-01-02T00:00:00")
    assert run.out.rstrip().endswith("warn  a\N{REPLACEMENT CHARACTER}[2Jb [/x]")
    assert json.loads(aenv.on_pty("logs", "--json", sandbox.id).out)[0]["message"] == "a\x1b[2Jb [/x]"


def test_logs_of_a_silent_console_say_so(world: World, aenv: Terminal) -> None:
    sandbox = world.node.add_sandbox()

    assert "nothing on the console" in aenv("logs", sandbox.id).err
    assert aenv("logs", "--json", sandbox.id).err == ""


def test_quiet_is_ids_only(world: World, aenv: Terminal) -> None:
    started = aenv("start", "-q").out.split()
    forked = aenv("fork", "-q", "-n", "2", *started).out.split()

    assert (len(started), len(forked)) == (1, 2)
    assert {*started, *forked} == world.ids


def test_until_when_it_runs(world: World, aenv: Terminal) -> None:
    sandbox = world.node.add_sandbox()

    assert aenv("timeout", sandbox.id, "2h").err.startswith("running until ")
    assert aenv("pause", sandbox.id).code == 0
    assert aenv("resume", sandbox.id).err.startswith("running until ")


@pytest.mark.parametrize("words", [["fork"], ["snapshot"], ["timeout", "{}", "1h"]])
def test_what_needs_a_running_sandbox_says_how_to_get_one(world: World, aenv: Terminal, words: list[str]) -> None:
    sandbox, lost = world.node.add_sandbox().id, world.node.add_sandbox().id
    aenv("pause", sandbox)
    world.node.lose(lost, "its virtual machine ended")

    for one, hint in ((sandbox, f"hint: aenv resume {sandbox}"), (lost, f"hint: aenv delete {lost}")):
        run = aenv(words[0], one, *words[2:])
        assert run.code == 1
        assert run.err.splitlines()[-1] == hint


def test_delete_by_id(world: World, aenv: Terminal) -> None:
    first, second, third = (world.node.add_sandbox().id for _ in range(3))

    run = aenv("delete", first, NOBODY, second, second)

    assert run.code == 1
    assert NOBODY in run.err
    assert second not in run.err
    assert world.ids == {third}


def test_delete_what_matches(world: World, aenv: Terminal) -> None:
    kept = world.node.add_sandbox(metadata={"a": "1"}).id
    world.node.add_sandbox(metadata={"a": "1", "b": "2"})

    assert aenv("delete", "-m", "a=1", "-m", "b=2").code == 0
    assert world.ids == {kept}
    assert aenv("delete", "-m", "a=other").code == 0
    assert world.ids == {kept}


def test_delete_all(world: World, aenv: Terminal) -> None:
    for _ in range(3):
        world.node.add_sandbox()

    assert aenv("delete", "--all").code == 0
    assert world.ids == set()
    assert aenv("delete", "--all").code == 0


@pytest.mark.slow
def test_delete_on_a_terminal_tells_of_each(world: World, aenv: Terminal) -> None:
    first, second, third = (world.node.add_sandbox().id for _ in range(3))

    assert aenv.on_pty("delete", first).out.splitlines() == [f"deleted {first}"]
    assert {*aenv.on_pty("delete", "--all").out.splitlines()} == {f"deleted {second}", f"deleted {third}"}
    assert aenv.on_pty("delete", "--all").out.splitlines() == ["no sandbox to delete"]


def test_delete_piped_is_silent(world: World, aenv: Terminal) -> None:
    run = aenv("delete", world.node.add_sandbox().id)

    assert (run.code, run.out, run.err) == (0, "", "")


def test_delete_nothing_is_wrong_usage(world: World, aenv: Terminal) -> None:
    kept = world.node.add_sandbox().id

    run = aenv("delete")

    assert run.code == 2
    assert "--all" in run.err
    assert world.ids == {kept}


@pytest.mark.parametrize(("list_", "start", "delete"), [("ps", "create", "kill"), ("list", "start", "rm")])
def test_the_words_of_other_command_lines(world: World, aenv: Terminal, list_: str, start: str, delete: str) -> None:
    made = aenv(start, "base", "-q").out.strip()
    assert aenv(list_, "-q").out.split() == [made]

    assert aenv(delete, made).code == 0
    assert aenv(list_, "-q").out.split() == []
