"""The diagram in the docs is the table of the code."""

import re
from collections import Counter
from pathlib import Path

from agentenv.model.lifecycle import TRANSITIONS, State

PAGE = Path(__file__).parents[3] / "docs/concepts/lifecycle.md"
_ARROW = re.compile(r"^ +(\w+) --> (\w+): (\w+)$", re.MULTILINE)


def _diagram() -> str:
    (diagram,) = re.findall(r"```mermaid\nstateDiagram-v2\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(diagram)


def test_the_diagram_has_the_moves_of_the_table_and_no_others() -> None:
    drawn = Counter(_ARROW.findall(_diagram()))
    moves = Counter(
        (before.value, after.value, event.value) for before, row in TRANSITIONS.items() for event, after in row.items()
    )
    assert drawn == moves


def test_every_line_of_the_diagram_is_a_move() -> None:
    lines = [line for line in _diagram().splitlines() if line.strip()]
    assert [line for line in lines if not _ARROW.fullmatch(line)] == []


def test_every_state_is_explained() -> None:
    rows = re.findall(r"^\| ([a-z, ]+) \|", PAGE.read_text().split("what is true in it", 1)[1], re.MULTILINE)
    assert sorted(name for row in rows for name in row.split(", ")) == sorted(state.value for state in State)
