"""No id or name leads anywhere but to the thing it names."""

import pytest

from agentenv.cli.client import CliError, path_of
from tests.unit.cli.world import Terminal, World

TRAPS = ("../sandboxes/{id}", "..%2Fsandboxes%2F{id}", "base/../../sandboxes/{id}", "./../sandboxes/{id}")
NO_IDS = ("", ".", "..", "../templates/base", "x?force=1", "x#y", "x\ny", "\udcff", "%2e%2e")


@pytest.mark.parametrize("trap", TRAPS)
def test_the_name_of_a_template_reaches_no_sandbox(world: World, aenv: Terminal, trap: str) -> None:
    sandbox = world.node.add_sandbox()

    run = aenv("template", "delete", trap.format(id=sandbox.id))

    assert run.code == 1
    assert world.ids == {sandbox.id}
    assert len(world.node.snapshots()) == 1


@pytest.mark.parametrize("command", ["info", "pause", "resume", "fork", "snapshot", "logs", "delete"])
def test_what_is_no_id_is_refused(world: World, aenv: Terminal, command: str) -> None:
    sandbox = world.node.add_sandbox()
    for name in NO_IDS:
        run = aenv(command, name)

        assert run.code in (1, 2), name
        assert run.out == "", name
        assert run.err.strip(), name
        assert "Traceback" not in run.err, name
    assert world.state(sandbox.id) == "running"
    assert world.ids == {sandbox.id}
    assert len(world.node.snapshots()) == 1


@pytest.mark.parametrize("segment", ["", ".", ".."])
def test_a_segment_that_clients_drop_is_refused(segment: str) -> None:
    with pytest.raises(CliError) as refused:
        path_of("templates", segment)

    assert refused.value.code == 2


def test_every_segment_is_quoted() -> None:
    assert path_of("a", "b/../c?d#e%2F", "\N{SNOWMAN}", "\udcff") == "/a/b%2F..%2Fc%3Fd%23e%252F/%E2%98%83/%FF"
