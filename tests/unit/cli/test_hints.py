"""What a newcomer types, and what the answer tells them to type."""

import pytest

from agentenv.cli.ids import may_be_part, whole_id
from tests.unit.cli.world import NOBODY, Terminal, World


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("exec -it ID bash", "aenv shell ID"), ("exec ID -it bash", "aenv shell ID"),
        ("exec ID -t bash", "aenv shell ID"), ("logs -f ID", "tail -f"), ("logs ID --follow", "tail -f"),
        ("ls -a", "running and paused"), ("ps --all", "running and paused"), ("list -a", "running and paused"),
        ("fork ID 2", "--count N"), ("snapshot create ID kept", "--name NAME"), ("snapshot ID kept", "--name NAME"),
        ("ls --url http://127.0.0.1:1", "aenv --url URL ls"), ("exec --url=x ID true", "aenv --url URL exec"),
        ("template list --api-key x", "aenv --api-key KEY template list"),
    ],
)  # fmt: skip
def test_what_other_command_lines_understand(world: World, aenv: Terminal, typed: str, hint: str) -> None:
    sandbox = world.node.add_sandbox()

    run = aenv(*typed.replace("ID", sandbox.id).split())

    assert (run.code, run.out) == (2, "")
    said, hinted = run.err.splitlines()
    assert said.startswith("error: ")
    assert hinted.startswith("hint: ")
    assert hint in hinted
    assert world.ids == {sandbox.id}
    assert len(world.node.snapshots()) == 1


@pytest.mark.parametrize(
    "typed", ["ls --bogus", "logs -x ID", "ls ID", "pause", "info ID ID", "--bogus ls", "timeout ID"]
)
def test_what_nobody_understands_is_wrong_usage_in_the_words_of_the_parser(aenv: Terminal, typed: str) -> None:
    run = aenv(*typed.replace("ID", NOBODY).split())

    assert (run.code, run.out) == (2, "")
    assert "Usage:" in run.err


@pytest.mark.parametrize(
    "command", ["info", "pause", "resume", "fork", "snapshot", "logs", "delete", "exec", "timeout"]
)
def test_a_part_of_an_id_is_answered_with_the_whole(world: World, aenv: Terminal, command: str) -> None:
    sandbox = world.node.add_sandbox().id
    more = {"exec": ["true"], "timeout": ["5m"]}.get(command, [])

    for part in (sandbox[:8], sandbox[:-1], sandbox[:8].upper() + sandbox[8:].upper()):
        run = aenv(command, part, *more)

        assert (run.code, run.out) == (1, "")
        assert run.err.splitlines()[-1] == f"hint: give the whole id: {sandbox}"
    assert world.state(sandbox) == "running"


def test_a_part_of_the_id_of_a_template(world: World, aenv: Terminal) -> None:
    made = world.node.add_template("other").id

    assert f"hint: give the whole id: {made}" in aenv("template", "delete", made[:13]).err.splitlines()
    assert made in {one.id for one in world.node.snapshots()}


def test_the_whole_id_of_nothing_gets_no_such_hint(world: World, aenv: Terminal) -> None:
    world.node.add_sandbox()

    assert "hint:" not in aenv("info", NOBODY).err


def test_few_ids_are_named_and_many_are_counted() -> None:
    known = [f"ab{number:06x}-0000-4000-8000-000000000000" for number in range(5)]

    assert whole_id("AB", known[:2], "aenv ls") == f"give the whole id, one of {known[0]}, {known[1]}"
    assert whole_id("ab", known, "aenv ls") == "give the whole id, as `aenv ls` shows it; 5 begin with ab"
    assert whole_id("b", known, "aenv ls") == "give the whole id, as `aenv ls` shows it; none begin with b"


@pytest.mark.parametrize(
    ("given", "part"),
    [("6e0e5a52", True), (NOBODY.upper(), NOBODY.upper() != NOBODY), (NOBODY, False), ("name", False), ("", False)],
)
def test_what_may_be_a_part_of_an_id(given: str, part: bool) -> None:
    assert may_be_part(given) is part
