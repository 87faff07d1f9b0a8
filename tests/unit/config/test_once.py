"""A default that an operator can change is written down once, in the schema; the parts refer to it."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import agentenv
from agentenv.config.fields import settings_by_name

SOURCES: Final = Path(agentenv.__file__).parent
KEYS: Final = frozenset(setting.key for setting in settings_by_name().values())
# Fakes are nobody's product, and the command line has settings of its own.
ELSEWHERE: Final = frozenset({"config", "testing", "cli"})


def test_no_part_writes_the_default_of_a_setting_down_again() -> None:
    again = [
        f"{path.relative_to(SOURCES)}: {name} = {ast.unparse(value)}"
        for path in sorted(SOURCES.rglob("*.py"))
        if path.relative_to(SOURCES).parts[0] not in ELSEWHERE
        for name, value in defaults(ast.parse(path.read_text()))
        if name in KEYS and says_a_value(value)
    ]

    assert again == []


def test_a_default_that_is_written_twice_would_be_found() -> None:
    source = "class A:\n    mtu: int = 1500\n    max_slots: int | None = None\n\ndef f(*, warm_low=1 << 2): ..."

    found = [name for name, value in defaults(ast.parse(source)) if name in KEYS and says_a_value(value)]

    assert found == ["mtu", "warm_low"]


def defaults(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The fields and arguments of *tree* that have a default, and it."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(body=body):
                for statement in body:
                    match statement:
                        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                            yield name, value
            case ast.FunctionDef(args=arguments) | ast.AsyncFunctionDef(args=arguments):
                placed = [*arguments.posonlyargs, *arguments.args]
                yield from ((a.arg, d) for a, d in zip(reversed(placed), reversed(arguments.defaults), strict=False))
                yield from (
                    (a.arg, d)
                    for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
                    if d is not None
                )


def says_a_value(value: ast.expr) -> bool:
    """Whether *value* is a number or a text written out, and not a name for one. None says that nothing was set."""
    match value:
        case ast.Constant(value=constant):
            return constant is not None and not isinstance(constant, bool)
        case ast.UnaryOp(operand=operand):
            return says_a_value(operand)
        case ast.BinOp(left=left, right=right):
            return says_a_value(left) and says_a_value(right)
        case _:
            return False
