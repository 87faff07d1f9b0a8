"""Sandboxes and snapshots as rows and back. Pure.

A reader takes what it knows: fields that are new to it are ignored, fields that an
older release did not write get their defaults. What it cannot make sense of raises
`Undecodable`, so that one bad row never stands for the whole table.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from agentenv.model.errors import Invalid
from agentenv.model.sandbox import Sandbox
from agentenv.model.snapshot import Snapshot

Row: TypeAlias = Mapping[str, object]
T = TypeVar("T")

RECORD_VERSION: Final = 1
"""Raised when a reader of the old version would misread a record, not when a field is added."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_SANDBOX: Final = TypeAdapter(Sandbox)
_SNAPSHOT: Final = TypeAdapter(Snapshot)
_SANDBOX_COLUMNS: Final = frozenset({"id", "state", "generation", "created_at"})
_SNAPSHOT_COLUMNS: Final = frozenset({"id", "names", "created_at", "spawn_count", "last_spawned_at"})


class Undecodable(Exception):  # not an AgentEnvError: it never leaves this package
    """A row that this release cannot read; the message says why."""


def encode_sandbox(sandbox: Sandbox) -> dict[str, object]:
    """Return the row of *sandbox*, or raise `Invalid` for text that no database can hold."""
    return {
        "id": sandbox.id,
        "state": sandbox.state.value,
        "generation": sandbox.generation,
        "created_at_us": to_us(sandbox.created_at),
        "version": RECORD_VERSION,
        "record": _dump(_SANDBOX, sandbox, _SANDBOX_COLUMNS),
    }


def decode_sandbox(row: Row) -> Sandbox:
    return _load(
        _SANDBOX,
        row,
        {
            "id": row["id"],
            "state": row["state"],
            "generation": row["generation"],
            "created_at": from_us(row["created_at_us"]),
        },
    )


def encode_snapshot(snapshot: Snapshot) -> dict[str, object]:
    """Return the row of *snapshot*, or raise `Invalid`. Its names are rows of their own."""
    return {
        "id": snapshot.id,
        "created_at_us": to_us(snapshot.created_at),
        "spawn_count": snapshot.spawn_count,
        "last_spawned_at_us": to_us(snapshot.last_spawned_at) if snapshot.last_spawned_at else None,
        "version": RECORD_VERSION,
        "record": _dump(_SNAPSHOT, snapshot, _SNAPSHOT_COLUMNS),
    }


def decode_snapshot(row: Row, names: Sequence[str]) -> Snapshot:
    return _load(
        _SNAPSHOT,
        row,
        {
            "id": row["id"],
            "names": tuple(names),
            "created_at": from_us(row["created_at_us"]),
            "spawn_count": row["spawn_count"],
            "last_spawned_at": from_us(row["last_spawned_at_us"]) if row["last_spawned_at_us"] is not None else None,
        },
    )


def to_us(instant: datetime) -> int:
    return (instant - _EPOCH) // _MICROSECOND


def from_us(microseconds: object) -> datetime:
    if not isinstance(microseconds, int):
        raise Undecodable(f"{microseconds!r} is not an instant")
    try:
        return _EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:
        raise Undecodable(f"{microseconds} us is not an instant") from None


def _dump(adapter: TypeAdapter[T], value: T, columns: frozenset[str]) -> str:
    try:
        return adapter.dump_json(value, exclude=set(columns), warnings="error").decode()
    except (PydanticSerializationError, UnicodeError) as error:
        raise Invalid(f"the record cannot be stored: {error}") from error


def _load(adapter: TypeAdapter[T], row: Row, columns: Mapping[str, object]) -> T:
    version, record = row["version"], row["record"]
    if not isinstance(version, int) or not 1 <= version <= RECORD_VERSION:
        raise Undecodable(f"record version {version}; this release reads 1 to {RECORD_VERSION}")
    if not isinstance(record, str):
        raise Undecodable("the record is not text")
    try:
        fields = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise Undecodable(f"the record is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Undecodable("the record is not a JSON object")
    try:
        return adapter.validate_python(fields | dict(columns))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Undecodable(f"{where}: {first['msg']} ({error.error_count()} in all)") from error
