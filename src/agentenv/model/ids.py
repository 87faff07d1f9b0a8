"""Names of things, as types that cannot be mixed up."""

import re
import uuid
from typing import Final, NewType

from agentenv.model.errors import Invalid, NotFound

SandboxId = NewType("SandboxId", str)  # UUID text: it becomes a DNS label
SnapshotId = NewType("SnapshotId", str)  # UUID text; templates are snapshots
LayerId = NewType("LayerId", str)  # one immutable file of the storage back end
BlobId = NewType("BlobId", str)  # one opaque immutable file (device state)

NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def new_sandbox_id() -> SandboxId:
    return SandboxId(str(uuid.uuid4()))


def new_snapshot_id() -> SnapshotId:
    return SnapshotId(str(uuid.uuid4()))


def parse_sandbox_id(text: str) -> SandboxId:
    """Return *text* as an id in its one canonical spelling, or raise `NotFound`.

    An id that cannot exist is answered like one that does not: the caller
    learns nothing from the difference, and E2B's clients expect a 404.
    """
    try:
        canonical = str(uuid.UUID(text))
    except ValueError:
        canonical = None
    if canonical != text or canonical is None:
        raise NotFound("no such sandbox")
    return SandboxId(canonical)


def parse_name(text: str) -> str:
    """Return *text* as the name of a template or snapshot, or raise `Invalid`.

    Letters, digits, dot, underscore and hyphen, 1 to 128 of them, starting with a
    letter or digit: a name is used in URLs and may never climb out of a directory.
    """
    if not NAME_PATTERN.fullmatch(text):
        raise Invalid(
            f"{text[:140]!r} is not a name",
            hint="use 1 to 128 letters, digits, dots, underscores and hyphens, starting with a letter or digit",
        )
    return text
