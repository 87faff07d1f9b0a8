"""Where everything lies below the data directory, and who may use it.

    VERSION         which back end's layout it is; one that this release does not know is refused
    lock            held by the one process that uses the directory
    blobs/          opaque immutable files
    temporary/      files in the making; emptied at start

With the plain back end (version 1) also:

    layers/         sealed layers (read-only) and the uppers that VMMs write (read-write)
    owners/         one record per owner
    zero/           one all-zero memory image per size

With the layered one (version 2):

    daemon/         the storage daemon's own; nothing else touches it

A layer's name of the plain back end says what it is: ``ID.raw``, ``ID.qcow2``, ``ID.memory`` (a flat image) or
``ID.delta`` (pages that differ from a flat image).
"""

import fcntl
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from agentenv.model.errors import Bug, Conflict, Invalid, NotFound, Unsupported
from agentenv.model.ids import BlobId, LayerId
from agentenv.storage.files import empty_directory, replace_text, sync_directory


class BackEnd(StrEnum):
    PLAIN = "plain"
    LAYERED = "layered"


VERSIONS: Final = {BackEnd.PLAIN: 1, BackEnd.LAYERED: 2}

_LAYER_NAME: Final = re.compile(r"[0-9a-f]{32}\.(raw|qcow2|memory|delta)")
_BLOB_NAME: Final = re.compile(r"[0-9a-f]{32}\.blob")
_OWNER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_UNFINISHED: Final = "VERSION.new"
_NOT_OURS: Final = frozenset({"lost+found"})  # what a fresh file system has


class LayerKind(StrEnum):
    RAW = "raw"
    QCOW2 = "qcow2"
    MEMORY = "memory"
    DELTA = "delta"

    @property
    def is_disk(self) -> bool:
        return self in (LayerKind.RAW, LayerKind.QCOW2)


def new_layer_id(kind: LayerKind) -> LayerId:
    return LayerId(f"{uuid.uuid4().hex}.{kind}")


def layer_kind(layer: str) -> LayerKind:
    """Return what kind of layer *layer* names; `NotFound` if it cannot be a layer of ours."""
    match = _LAYER_NAME.fullmatch(layer)
    if match is None:
        raise NotFound(f"no layer {layer[:80]!r}")
    return LayerKind(match.group(1))


def new_blob_id() -> BlobId:
    return BlobId(f"{uuid.uuid4().hex}.blob")


def check_owner(owner: str) -> None:
    """Raise `Invalid` if *owner* cannot be a file name that stays in its directory."""
    if not _OWNER_NAME.fullmatch(owner):
        raise Invalid(f"{owner[:140]!r} cannot be an owner")


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths below an absolute *root*."""

    root: Path

    @property
    def layers(self) -> Path:
        return self.root / "layers"

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    @property
    def owners(self) -> Path:
        return self.root / "owners"

    @property
    def zero(self) -> Path:
        return self.root / "zero"

    @property
    def temporary(self) -> Path:
        return self.root / "temporary"

    @property
    def daemon(self) -> Path:
        return self.root / "daemon"

    def directories(self, back_end: BackEnd) -> tuple[Path, ...]:
        """Those that this process makes."""
        both = (self.blobs, self.temporary)
        return both if back_end is BackEnd.LAYERED else (*both, self.layers, self.owners, self.zero)

    def layer(self, layer: LayerId) -> Path:
        """`NotFound` for what cannot be a layer of ours, so that no name leads out of the directory."""
        layer_kind(layer)
        return self.layers / layer

    def blob(self, blob: BlobId) -> Path:
        """`NotFound` for what cannot be a blob of ours."""
        if not _BLOB_NAME.fullmatch(blob):
            raise NotFound(f"no blob {blob[:80]!r}")
        return self.blobs / blob

    def owner(self, owner: str) -> Path:
        check_owner(owner)
        return self.owners / f"{owner}.json"

    def zero_image(self, size_bytes: int) -> Path:
        return self.zero / f"{size_bytes}.memory"

    def new_temporary(self) -> Path:
        return self.temporary / uuid.uuid4().hex


def written_by(root: Path) -> BackEnd | None:
    """Whose data the data directory *root* holds; None if there are none yet. Blocks.

    Raises as `open_root` does for a directory that is none of ours.
    """
    layout = Layout(root)
    version = _read_version(layout)
    if version is None or (version is BackEnd.PLAIN and _is_unused(layout)):
        return None
    return version


def open_root(root: Path, back_end: BackEnd = BackEnd.PLAIN) -> tuple[Layout, int]:
    """Lock the data directory *root*, made if missing, and bring it to this layout; return it with the lock.

    The lock is a descriptor to close. Raises `Conflict` if another process has the
    directory, `Unsupported` if a newer release or the other back end wrote it, `Invalid` if it
    holds something else.
    """
    root.mkdir(parents=True, exist_ok=True)
    layout = Layout(root.resolve())
    lock = _lock(layout.root)
    try:
        _check_version(layout, back_end)
        for directory in layout.directories(back_end):
            directory.mkdir(mode=0o700, exist_ok=True)
        empty_directory(layout.temporary)
        sync_directory(layout.root)
    except BaseException:
        os.close(lock)
        raise
    return layout, lock


def scan_names(directory: Path, pattern: re.Pattern[str]) -> list[str]:
    """Return the names in *directory* that match *pattern*; others are not ours and are left alone."""
    return [entry.name for entry in directory.iterdir() if pattern.fullmatch(entry.name)]


def layer_names(layout: Layout) -> list[LayerId]:
    return [LayerId(name) for name in scan_names(layout.layers, _LAYER_NAME)]


def blob_names(layout: Layout) -> list[BlobId]:
    return [BlobId(name) for name in scan_names(layout.blobs, _BLOB_NAME)]


def _lock(root: Path) -> int:
    fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Conflict(
            f"another process uses the data directory {root}", hint="stop it, or give this one a directory of its own"
        ) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_version(layout: Layout) -> BackEnd | None:
    path = layout.root / "VERSION"
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return None
    if not text.isascii() or not text.isdigit():
        raise Bug(f"{path} is damaged")
    found = next((back_end for back_end, version in VERSIONS.items() if version == int(text)), None)
    if found is None:
        raise Unsupported(
            f"{layout.root} was written by a newer release (layout {text}; this one knows {max(VERSIONS.values())})",
            hint="use that release, or another data directory",
        )
    return found


def _check_version(layout: Layout, wanted: BackEnd) -> None:
    found = _read_version(layout)
    if found is wanted:
        return
    if found is None:
        _check_empty(layout)
    elif found is BackEnd.PLAIN and _is_unused(layout):
        for directory in (layout.layers, layout.owners, layout.zero):
            shutil.rmtree(directory, ignore_errors=True)
    else:
        raise Unsupported(
            f"{layout.root} holds the data of the {found} back end, and this server was told to use the {wanted} one",
            hint=f"set storage.backend to {found}; or start with an empty home and build the templates again",
        )
    unfinished = layout.root / _UNFINISHED
    unfinished.unlink(missing_ok=True)
    replace_text(layout.root / "VERSION", f"{VERSIONS[wanted]}\n", unfinished, sync=True)


def _check_empty(layout: Layout) -> None:
    strangers = {entry.name for entry in layout.root.iterdir()} - {"lock", _UNFINISHED} - _NOT_OURS
    if strangers:
        raise Invalid(
            f"{layout.root} is not empty and not a data directory of ours", hint="give storage a directory of its own"
        )


def _is_unused(layout: Layout) -> bool:
    """Whether a plain directory has nothing that anybody may miss."""
    return not any(
        any(directory.iterdir()) for directory in (layout.layers, layout.owners, layout.blobs) if directory.is_dir()
    )
