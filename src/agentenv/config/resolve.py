"""From defaults, file, environment and flags to one checked value. Later ones win.

Below this no code reads the environment. Whatever is not known is refused, with the
nearest name that is; each value remembers where it came from.
"""

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from agentenv.config.environment import (
    CONFIG_PATH,
    LISTEN,
    PREFIX,
    WITHOUT_EFFECT,
    is_kubernetes_link,
    variables,
)
from agentenv.config.fields import SECTIONS, Setting, Unreadable, settings_by_name
from agentenv.config.schema import Settings
from agentenv.model.errors import Invalid

T = TypeVar("T")

DEFAULT_FILE: Final = Path("/etc/aenv/config.toml")
MAX_FILE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _Value:
    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings. ``notes`` are for the log: what was set and has no effect, or is unwise."""

    settings: Settings
    file: Path | None
    notes: tuple[str, ...]
    origins: Mapping[str, str]

    def origin(self, name: str) -> str:
        """Where the value of ``section.key`` came from: "default", "file PATH", "environment NAME" or "flag"."""
        if name not in settings_by_name():
            raise _unknown(name, "", settings_by_name())
        return self.origins.get(name, "default")


def resolve(
    flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None, file: Path | None = None
) -> Resolved:
    """Merge *flags* over *environ* over *file* over the defaults; blocking (it reads the file).

    Args:
        flags: values or texts by ``section.key``; None means that the flag was not given.
        environ: the process's environment.
        file: the TOML file; by default what AENV_CONFIG_PATH names, else `DEFAULT_FILE` if it exists.

    Raises `Invalid`, naming the setting and where its value came from (never the value: it may be a secret).
    """
    environ = environ or {}
    notes: list[str] = []
    path = _file_to_read(environ, file)
    merged: dict[str, _Value] = {}
    if path is not None:
        merged |= _from_file(path, notes)
    merged |= _from_environment(environ, notes)
    merged |= _from_flags(flags or {})
    return Resolved(_build(merged), path, tuple(notes), {name: value.origin for name, value in merged.items()})


def _file_to_read(environ: Mapping[str, str], file: Path | None) -> Path | None:
    if file is not None:
        return file.absolute()
    if named := environ.get(CONFIG_PATH):
        return Path(named).absolute()
    return DEFAULT_FILE if DEFAULT_FILE.is_file() else None


def _from_file(path: Path, notes: list[str]) -> dict[str, _Value]:
    try:
        with path.open("rb") as opened:
            raw = opened.read(MAX_FILE_BYTES + 1)
            readable_by_others = path.stat().st_mode & 0o077
        if len(raw) > MAX_FILE_BYTES:
            raise Invalid(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        document = tomllib.loads(raw.decode())
    except OSError as error:
        raise Invalid(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"{path} is not TOML: {error}") from error
    origin = f"file {path}"
    values: dict[str, _Value] = {}
    for section, table in document.items():
        if section not in SECTIONS:
            raise _unknown(section, f" in {path}", SECTIONS)
        if not isinstance(table, dict):
            raise Invalid(f"{section} in {path} is not a table", hint=f"write [{section}] on a line of its own")
        for key, value in table.items():
            setting = _known(f"{section}.{key}", f" in {path}")
            read = _read(setting, origin, setting.from_toml, value)
            values[setting.name] = _Value(_absolute(setting, read, path.parent), origin)
    if readable_by_others and {"auth.api_key", "auth.token_seed"} & values.keys():
        notes.append(f"{path} holds a secret and others may read it; chmod 600 it")
    return values


def _from_environment(environ: Mapping[str, str], notes: list[str]) -> dict[str, _Value]:
    known = variables()
    values: dict[str, _Value] = {}
    for name, text in sorted(environ.items()):
        if name == LISTEN and text:
            values |= _listen_address(text)
        elif name in WITHOUT_EFFECT:
            notes.append(f"{name} is set and has no effect")
        elif name not in known:
            if name.startswith(PREFIX) and not is_kubernetes_link(name, text):
                raise _unknown(name, " in the environment", known)
        elif text and (setting_name := known[name].setting) is not None:  # empty is the same as not set
            setting = settings_by_name()[setting_name]
            origin = f"environment {name}"
            read = _read(setting, origin, setting.from_text, text)
            value = _Value(_absolute(setting, read, Path.cwd()), origin)
            other = values.get(setting.name)
            if other is not None and other.value != value.value:
                raise Invalid(f"{setting.name} is set twice, by {other.origin} and by {origin}, to different values")
            values[setting.name] = value
    return values


def _listen_address(text: str) -> dict[str, _Value]:
    origin = f"environment {LISTEN}"
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host:
        raise Invalid(f"{LISTEN} is not HOST:PORT")
    values = {}
    for name, part in (("server.listen_host", host), ("server.listen_port", port)):
        setting = settings_by_name()[name]
        values[name] = _Value(_read(setting, origin, setting.from_text, part), origin)
    return values


def _from_flags(flags: Mapping[str, object]) -> dict[str, _Value]:
    values = {}
    for name, given in flags.items():
        if given is None:
            continue
        setting = _known(name, " among the flags")
        if isinstance(given, str):
            read = _read(setting, "a flag", setting.from_text, given)
        else:
            read = _read(setting, "a flag", setting.from_python, given)
        values[name] = _Value(_absolute(setting, read, Path.cwd()), "flag")
    return values


def _build(merged: Mapping[str, _Value]) -> Settings:
    sections: dict[str, dict[str, object]] = {}
    for name, value in merged.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value.value
    settings = Settings.model_validate(sections)
    network = settings.network
    if network.warm_low > network.warm_high:
        raise Invalid("network.warm_low is larger than network.warm_high")
    if network.address_cidr.overlaps(network.veth_cidr):
        raise Invalid("network.address_cidr and network.veth_cidr overlap")
    return settings


def _absolute(setting: Setting, value: object, base: Path) -> object:
    return base / value if setting.is_path and isinstance(value, Path) else value


def _read(setting: Setting, origin: str, reader: Callable[[T], object], given: T) -> object:
    try:
        return reader(given)
    except Unreadable as error:
        raise Invalid(f"{setting.name} from {origin}: {error}", hint=setting.description or None) from None


def _known(name: str, where: str) -> Setting:
    setting = settings_by_name().get(name)
    if setting is None:
        raise _unknown(name, where, settings_by_name())
    return setting


def _unknown(name: str, where: str, known: Iterable[str]) -> Invalid:
    names = list(known)
    key = name.rpartition(".")[2]
    same_key = [candidate for candidate in names if candidate.rpartition(".")[2] == key]
    nearest = same_key or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else None
    return Invalid(f"{name[:140]!r}{where} is not a setting", hint=hint)
