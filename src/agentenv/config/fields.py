"""The settings one by one: their dotted names, and how a text or a TOML value becomes one."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from agentenv.config.schema import Section, Settings
from agentenv.model.errors import Invalid


class Unreadable(Exception):
    """A value cannot be that of its setting; the message says what is expected, never what was given."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. ``section.key`` is its name."""

    section: str
    key: str
    info: FieldInfo

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    @property
    def default(self) -> object:
        return self.info.get_default(call_default_factory=True)

    @property
    def description(self) -> str:
        return self.info.description or ""

    @property
    def is_list(self) -> bool:
        return any(get_origin(choice) is tuple for choice in _choices(self.info.annotation))

    @property
    def is_path(self) -> bool:
        return Path in _choices(self.info.annotation)

    def from_text(self, text: str) -> object:
        """Return the value that *text* (of the environment or a flag) means; lists are separated by commas."""
        if self.is_list:
            items = [item.strip() for item in text.split(",") if item.strip()]
            return self._checked(lambda adapter: adapter.validate_python(items))
        return self._checked(lambda adapter: adapter.validate_strings(text))

    def from_toml(self, value: object) -> object:
        """Return what *value* means; it has to be of the right TOML type."""
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise Unreadable("a date or a number that is none is not expected") from None
        return self._checked(lambda adapter: adapter.validate_json(text, strict=True))

    def from_python(self, value: object) -> object:
        """Return *value*, checked; a list is as good as a tuple."""
        given = tuple(value) if isinstance(value, list) else value
        return self._checked(lambda adapter: adapter.validate_python(given, strict=True))

    def _checked(self, read: Callable[[TypeAdapter[object]], object]) -> object:
        limited: Any = Annotated[self.info.annotation, self.info]
        adapter: TypeAdapter[object] = TypeAdapter(limited)
        try:
            return read(adapter)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise Unreadable(first["msg"]) from None


def check(section: str, values: Mapping[str, object]) -> None:
    """Raise `Invalid` if one of *values*, by the names of settings of *section*, is out of its bounds."""
    for key, value in values.items():
        try:
            settings_by_name()[f"{section}.{key}"].from_python(value)
        except Unreadable as error:
            raise Invalid(f"{section}.{key}: {error}") from None


@cache
def settings_by_name() -> Mapping[str, Setting]:
    """Every setting, in the order of the schema."""
    return {
        setting.name: setting
        for section, info in Settings.model_fields.items()
        for setting in (Setting(section, key, field) for key, field in section_type(info).model_fields.items())
    }


def section_type(info: FieldInfo) -> type[Section]:
    assert isinstance(info.annotation, type)
    assert issubclass(info.annotation, Section)
    return info.annotation


def _choices(annotation: object) -> list[object]:
    if get_origin(annotation) in (Union, UnionType):
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    if get_origin(annotation) is Annotated:
        return _choices(get_args(annotation)[0])
    return [annotation]


SECTIONS: Final = tuple(Settings.model_fields)
