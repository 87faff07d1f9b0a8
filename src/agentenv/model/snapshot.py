"""Captures and snapshots: everything that a microVM can be started from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from agentenv.model.ids import BlobId, LayerId, SandboxId, SnapshotId
from agentenv.model.machine import Fingerprint, Machine


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers, lowest first, seen as one disk or one memory image of ``size_bytes``."""

    layers: tuple[LayerId, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Capture:
    """What was written down of one stopped VM.

    ``disk`` is None in a record that an older release wrote of a paused sandbox: then what
    that sandbox has on its own is its disk.
    ``control_of`` names the sandbox whose control secret the captured guest agent
    holds; whoever restores from here must use that secret first and then rotate it.
    """

    device_state: BlobId
    memory: Stack
    disk: Stack | None
    control_of: SandboxId
    fingerprint: Fingerprint | None = None  # of the host whose VMM saved it; None: an older release did not say


class Source(StrEnum):
    BUILD = "template"
    SANDBOX = "sandbox"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A capture made permanent. A template is a snapshot whose source is a build."""

    id: SnapshotId
    names: tuple[str, ...]
    source: Source
    sandbox_id: SandboxId | None  # of which it was taken; None for a build
    machine: Machine
    fingerprint: Fingerprint
    capture: Capture
    created_at: datetime
    envd_version: str
    env: Mapping[str, str] = field(default_factory=dict)
    default_user: str | None = "user"
    default_workdir: str | None = None
    spawn_count: int = 0
    last_spawned_at: datetime | None = None

    @property
    def name(self) -> str | None:
        return self.names[0] if self.names else None
