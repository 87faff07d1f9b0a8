"""Commands on templates and snapshots."""

import json

import pytest

from tests.unit.cli.world import Terminal, World


def test_list(world: World, aenv: Terminal) -> None:
    world.node.add_template("other")

    assert {name for one in json.loads(aenv("template", "list").out) for name in one["names"]} >= {"base", "other"}


@pytest.mark.slow
def test_list_on_a_terminal(aenv: Terminal) -> None:
    head, row = aenv.on_pty("template", "ls").out.strip().split("\n")

    assert head.split()[:2] == ["NAME", "TEMPLATE"]
    assert row.split()[0] == "base"


def test_delete(world: World, aenv: Terminal) -> None:
    made = world.node.add_template("other")

    assert aenv("template", "delete", "other").code == 0
    assert made.id not in {one.id for one in world.node.snapshots()}
    again = aenv("template", "delete", "other")
    assert again.code == 1
    assert "404" in again.err
    assert aenv("template", "delete", "base:default").code == 0  # a colon is quoted and understood


def test_a_failed_delete_stops_none_of_the_others(world: World, aenv: Terminal) -> None:
    world.node.add_template("other")

    run = aenv("template", "delete", "nothing", "other")

    assert (run.code, run.out) == (1, "")
    assert run.err.startswith("nothing: ")
    assert aenv("template", "delete", "other").code == 1


@pytest.mark.slow
def test_delete_on_a_terminal_tells_of_each(world: World, aenv: Terminal) -> None:
    world.node.add_template("other")

    assert aenv.on_pty("template", "delete", "other").out.splitlines() == ["deleted other"]


@pytest.mark.parametrize("words", [["snapshot"], ["snapshot", "create"]])
def test_a_snapshot_is_made_listed_and_deleted(world: World, aenv: Terminal, words: list[str]) -> None:
    sandbox = world.node.add_sandbox()

    made = json.loads(aenv(*words, sandbox.id, "--name", "kept").out)

    assert world.state(sandbox.id) == "running"
    listed = json.loads(aenv("snapshot", "list", "--sandbox", sandbox.id).out)
    assert [one["snapshotID"] for one in listed] == [made["snapshotID"]]
    assert aenv("start", "kept").code == 0
    assert aenv("snapshot", "delete", "kept").code == 0
    assert json.loads(aenv("snapshot", "list").out) == []


def test_quiet_is_the_id_only(world: World, aenv: Terminal) -> None:
    made = aenv("snapshot", world.node.add_sandbox().id, "-q").out.split()

    assert [one["snapshotID"] for one in json.loads(aenv("snapshot", "list").out)] == made


def test_a_bad_name_makes_no_snapshot(world: World, aenv: Terminal) -> None:
    run = aenv("snapshot", world.node.add_sandbox().id, "--name", "../x")

    assert run.code == 1
    assert json.loads(aenv("snapshot", "list").out) == []


def test_build_of_what_is_not_there(aenv: Terminal) -> None:
    assert aenv("template", "build", "x", "--rootfs", "/nonexistent/root.tar").code == 2
