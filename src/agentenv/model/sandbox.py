"""A sandbox as one frozen value: what it is, where it stands, what it holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from agentenv.model.ids import SandboxId, SnapshotId
from agentenv.model.lifecycle import State
from agentenv.model.machine import Fingerprint, Machine, ProcessIdentity
from agentenv.model.policy import EgressPolicy, IngressPolicy
from agentenv.model.snapshot import Capture


class OnTimeout(StrEnum):
    KILL = "kill"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class Sandbox:
    """One sandbox. A change makes a new value; the store compares state and generation before it takes one.

    ``generation`` counts the VMs that this sandbox has had: every connection pool,
    cache and route is keyed by (id, generation), since addresses are used again.
    """

    id: SandboxId
    template_id: SnapshotId
    template_name: str | None
    state: State
    generation: int
    machine: Machine
    created_at: datetime
    started_at: datetime
    ends_at: datetime | None  # when its time to live runs out; None while paused or for ever
    on_timeout: OnTimeout = OnTimeout.KILL
    auto_resume: bool = False
    secure: bool = True
    metadata: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    egress: EgressPolicy = EgressPolicy()
    ingress: IngressPolicy = IngressPolicy()
    envd_version: str = ""
    default_user: str | None = None
    default_workdir: str | None = None
    slot_index: int | None = None  # journalled together with the process
    process: ProcessIdentity | None = None  # journalled once its VM is loaded, before the guest may run
    # Of the host as it was when the VM started: one that is taken over may be of an older VMM.
    fingerprint: Fingerprint | None = None
    capture: Capture | None = None  # present while paused
    reason: str | None = None  # why it is in error


@dataclass(frozen=True, slots=True)
class CreateSandbox:
    """A checked request for a sandbox. ``template`` is a snapshot id or a name."""

    template: str
    timeout_s: int
    on_timeout: OnTimeout = OnTimeout.KILL
    auto_resume: bool = False
    secure: bool = True
    metadata: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    egress: EgressPolicy = EgressPolicy()
    ingress: IngressPolicy = IngressPolicy()


@dataclass(frozen=True, slots=True)
class Forked:
    """The outcome of one child of a fork: exactly one of the two is set."""

    sandbox: Sandbox | None = None
    error: Exception | None = None
