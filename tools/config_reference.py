"""Writes docs/reference/configuration.md from the schema; a test fails while it is stale."""

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import SecretStr, StringConstraints

from agentenv.config import environment
from agentenv.config.fields import Setting, section_type, settings_by_name
from agentenv.config.schema import Settings

PAGE = Path(__file__).parent.parent / "docs/reference/configuration.md"

_HEAD = """# Configuration

<!-- Written by `python -m tools.config_reference` from src/agentenv/config/schema.py: change that, not this. -->

A setting comes from the first of these that has it: a flag of `aenv server`, the environment, the
configuration file, the default below. The file is TOML, with a table for each section; it is what
`--config` or `AENV_CONFIG_PATH` names, else `/etc/aenv/config.toml` if there is one. Names that are
not known are refused. In the environment, lists are separated by commas and an empty value is the
same as none. Paths in the file may be relative to its directory.

```toml
[server]
listen_port = 8000
domains = ["sandbox.example.com"]

[network]
allow_private = ["10.20.0.0/16"]
```
"""


def render() -> str:
    """Return the whole page."""
    parts = [_HEAD]
    by_section: dict[str, list[Setting]] = {}
    for setting in settings_by_name().values():
        by_section.setdefault(setting.section, []).append(setting)
    for section, settings in by_section.items():
        kind = section_type(Settings.model_fields[section])
        parts.append(f"\n## [{section}]\n\n{kind.__doc__}\n")
        parts.append("| setting | type | default | environment | meaning |\n| --- | --- | --- | --- | --- |")
        parts += [_row(setting) for setting in settings]
    parts.append("\n## Environment\n\nBeside `AENV_SECTION_KEY` for every setting above, these are read:\n")
    parts.append("| variable | meaning |\n| --- | --- |")
    for variable in (*environment.ALIASES, *environment.SPECIAL, *environment.CLIENT, *environment.TOOLS):
        sets = f" (`{variable.setting}`)" if variable.setting else ""
        parts.append(f"| `{variable.name}` | {_cell(variable.help)}{sets} |")
    names = ", ".join(f"`{name}`" for name in sorted(environment.WITHOUT_EFFECT))
    parts.append(f"\nKnown from the published AgentENV, and without effect here: {names}.")
    return "\n".join(parts) + "\n"


def _row(setting: Setting) -> str:
    variable = f"{environment.PREFIX}{setting.section}_{setting.key}".upper()
    cells = (f"`{setting.key}`", _type(setting), _default(setting.default), f"`{variable}`", _cell(setting.description))
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _default(value: object) -> str:
    if value in (None, (), ""):
        return "none"
    return f"`{value}`"


def _type(setting: Setting) -> str:
    name = _type_name(setting.info.annotation)
    limits = _limits(_constraints(setting.info.annotation) + list(setting.info.metadata))
    return f"{name}{limits}"


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin in (Union, UnionType):
        return _type_name(next(argument for argument in arguments if argument is not NoneType))
    if origin is Literal:
        return " \\| ".join(f"`{argument}`" for argument in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if annotation is SecretStr:
        return "secret"
    name = str(annotation.__name__)
    return {"str": "text", "int": "integer", "float": "number", "IPv4Network": "IPv4 range"}.get(name, name.lower())


def _constraints(annotation: Any) -> list[object]:
    found: list[object] = []
    if get_origin(annotation) is Annotated:
        for item in annotation.__metadata__:
            found += getattr(item, "metadata", [item])
    return found


def _limits(constraints: list[object]) -> str:
    words = []
    for limit in constraints:
        match limit:
            case Ge(least):
                words.append(f">= {least}")
            case Gt(least):
                words.append(f"> {least}")
            case Le(most):
                words.append(f"<= {most}")
            case Lt(most):
                words.append(f"< {most}")
            case MinLen() | MaxLen() | StringConstraints():
                pass
    return f", {', '.join(words)}" if words else ""


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(render())
