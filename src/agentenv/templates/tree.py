"""Values at paths, where a path can be dropped with everything below it. Pure.

Each call takes time in proportion to the depth of its path, and to what it drops: an
archive that makes and removes the same folders again and again costs no more than
another of its length.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Node(Generic[T]):
    value: T | None = None
    children: "dict[str, _Node[T]]" = field(default_factory=dict)


class Tree(Generic[T]):
    """Paths are absolute, without empty parts; ``/`` is the root."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()

    def put(self, path: str, value: T) -> None:
        node = self._root
        for part in _parts(path):
            if (child := node.children.get(part)) is None:
                child = node.children[part] = _Node()
            node = child
        node.value = value

    def drop(self, path: str) -> None:
        """Forget *path* and what is below it; nothing happens if it is not known."""
        parts = _parts(path)
        if not parts:
            self._root = _Node()
            return
        node = self._root
        for part in parts[:-1]:
            if (child := node.children.get(part)) is None:
                return
            node = child
        node.children.pop(parts[-1], None)

    def innermost_first(self) -> Iterator[tuple[str, T]]:
        """Every path with its value, after all that are below it."""
        pending: list[tuple[str, _Node[T], bool]] = [("", self._root, False)]
        while pending:
            path, node, entered = pending.pop()
            if not entered:
                pending.append((path, node, True))
                pending += [(f"{path}/{name}", child, False) for name, child in node.children.items()]
            elif node.value is not None:
                yield path or "/", node.value


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]
