"""Values at paths: what is dropped is gone with all below it, and work grows with the paths, not with their square."""

import sys
from types import FrameType
from typing import Any

from agentenv.templates import tree as module
from agentenv.templates.tree import Tree

ENTRIES = 200_000
MOST_LINES_EACH = 40  # that a path a few folders deep may take


def test_what_is_below_comes_before_what_is_above() -> None:
    tree = Tree[int]()
    for value, path in enumerate(["/a/b/c", "/", "/a", "/z", "/a-b"]):
        tree.put(path, value)

    order = [path for path, _ in tree.innermost_first()]

    assert sorted(order) == ["/", "/a", "/a-b", "/a/b/c", "/z"]
    assert order.index("/a/b/c") < order.index("/a") < order.index("/")


def test_a_dropped_path_takes_what_is_below_it_and_nothing_else() -> None:
    tree = Tree[int]()
    for path in ("/a", "/a/b", "/a/b/c", "/ab", "/b"):
        tree.put(path, 1)

    tree.drop("/a/b")
    tree.drop("/not/there")
    assert {path for path, _ in tree.innermost_first()} == {"/a", "/ab", "/b"}

    tree.put("/a/b/c", 2)
    assert dict(tree.innermost_first()) == {"/a": 1, "/ab": 1, "/b": 1, "/a/b/c": 2}

    tree.drop("/")
    assert list(tree.innermost_first()) == []


def test_folders_that_come_and_go_cost_no_more_than_others() -> None:
    """Counted in lines of the module that run, comprehensions included."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            lines += 1
        return trace

    tree = Tree[int]()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for n in range(ENTRIES):
            tree.put(f"/usr/{n % 1000}/{n}", n)
            if n % 2:
                tree.drop(f"/usr/{n % 1000}/{n}")
    finally:
        sys.settrace(before)

    assert len(list(tree.innermost_first())) == ENTRIES // 2
    assert lines <= MOST_LINES_EACH * ENTRIES
