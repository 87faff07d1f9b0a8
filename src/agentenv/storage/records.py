"""What each owner has, one small file per owner, so that it survives a restart.

A record survives the end of this process at once, and a power failure from the first
seal of the disk on: no VM outlives a power failure, so only what a pause leaves behind
has to. A record that cannot be read is set aside under another name and reported; it
never stops a start. All calls block but `encode` and `decode`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from agentenv.model.errors import NotFound
from agentenv.model.ids import LayerId
from agentenv.model.snapshot import Stack
from agentenv.storage.files import replace_text, sync_directory
from agentenv.storage.layout import Layout, layer_kind

_VERSION: Final = 1
_LARGEST_BYTES: Final = 64 << 10
_SUFFIX: Final = ".json"
_BROKEN: Final = ".broken"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """A writable disk. ``next`` is the upper that a seal in progress switches to, or was when a crash cut it short."""

    size_bytes: int
    upper: LayerId
    next: LayerId | None = None


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    owner: str
    disk: DiskRecord | None = None
    memory: Stack | None = None

    @property
    def is_empty(self) -> bool:
        return self.disk is None and self.memory is None


@dataclass(frozen=True, slots=True)
class LoadedRecords:
    records: dict[str, OwnerRecord]
    broken: tuple[str, ...]
    """Names of the files that were set aside, now or earlier: the owners of some uppers are unknown."""


def encode(record: OwnerRecord) -> str:
    document: dict[str, object] = {"version": _VERSION, "owner": record.owner}
    if (disk := record.disk) is not None:
        document["disk"] = {"size_bytes": disk.size_bytes, "upper": disk.upper, "next": disk.next}
    if (memory := record.memory) is not None:
        document["memory"] = {"size_bytes": memory.size_bytes, "layers": list(memory.layers)}
    return json.dumps(document, indent=1) + "\n"


def decode(text: str) -> OwnerRecord:
    """Return the record that *text* holds, or raise `ValueError`, `TypeError`, `KeyError` or `RecursionError`."""
    document = json.loads(text)
    if document["version"] != _VERSION:
        raise ValueError(f"record version {document['version']!r}")
    disk = memory = None
    if (entry := document.get("disk")) is not None:
        following = entry["next"]
        disk = DiskRecord(_count(entry["size_bytes"]), _layer(entry["upper"]), following and _layer(following))
    if (entry := document.get("memory")) is not None:
        memory = Stack(tuple(_layer(layer) for layer in entry["layers"]), _count(entry["size_bytes"]))
    return OwnerRecord(document["owner"], disk, memory)


def load_records(layout: Layout) -> LoadedRecords:
    """Read every record; set aside those that are damaged."""
    records = {}
    broken = broken_records(layout)
    for path in sorted(layout.owners.glob(f"*{_SUFFIX}")):
        try:
            record = _load(path)
            if record is None:
                _log.info("record %s was lost in a power failure before it had to be kept", path.name)
                path.unlink()
                continue
        except (ValueError, TypeError, KeyError, RecursionError, IsADirectoryError) as error:
            aside = _set_aside(path)
            _log.error("record %s is damaged (%s); set aside as %s", path.name, error, aside.name)
            path.rename(aside)
            broken.append(aside.name)
        else:
            records[record.owner] = record
    sync_directory(layout.owners)
    return LoadedRecords(records, tuple(broken))


def broken_records(layout: Layout) -> list[str]:
    """Names of the files that were set aside."""
    return [path.name for path in layout.owners.iterdir() if path.name.endswith(_BROKEN)]


def save_record(layout: Layout, record: OwnerRecord, *, over_durable: bool) -> None:
    """Replace what is there by *record*; an empty one is removed.

    With *over_durable* what is there must survive a power failure, and so does one of the two.
    """
    if record.is_empty:
        remove_record(layout, record.owner)
    else:
        replace_text(layout.owner(record.owner), encode(record), layout.new_temporary(), sync=over_durable)


def remove_record(layout: Layout, owner: str) -> None:
    """Forget *owner*, also where its record was set aside."""
    path = layout.owner(owner)
    for name in (path, _set_aside(path)):
        name.unlink(missing_ok=True)


def _set_aside(path: Path) -> Path:
    return path.with_name(path.name + _BROKEN)


def _load(path: Path) -> OwnerRecord | None:
    """None for a file without content: file systems may leave a name whose content never reached the disk."""
    with path.open("rb") as file:
        data = file.read(_LARGEST_BYTES + 1)
    if not data.strip(b"\0"):
        return None
    if len(data) > _LARGEST_BYTES:
        raise ValueError("too large")
    record = decode(data.decode())
    if f"{record.owner}{_SUFFIX}" != path.name:
        raise ValueError(f"it is about {record.owner!r}")
    return record


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{value!r} is not a number of bytes")
    return value


def _layer(value: object) -> LayerId:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a layer")
    try:
        layer_kind(value)
    except NotFound as error:
        raise ValueError(error.message) from None
    return LayerId(value)
