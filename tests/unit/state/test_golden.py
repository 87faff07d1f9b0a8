"""Records of format 1 as they lie in databases (`spec/records`): every later release reads them as they were meant."""

import json
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Network
from typing import Any

import pytest

from agentenv.model.ids import BlobId, LayerId, SandboxId, SnapshotId
from agentenv.model.lifecycle import State
from agentenv.model.machine import Fingerprint, Machine, ProcessIdentity
from agentenv.model.policy import EgressPolicy, IngressPolicy
from agentenv.model.sandbox import OnTimeout, Sandbox
from agentenv.model.snapshot import Capture, Snapshot, Source, Stack
from agentenv.state.codec import decode_sandbox, decode_snapshot, encode_sandbox, encode_snapshot
from tests.capabilities import REPO

AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
CAPTURE = Capture(
    device_state=BlobId("0" * 31 + "1.blob"),
    memory=Stack((LayerId("0" * 31 + "2.memory"), LayerId("0" * 31 + "3.delta")), 512 << 20),
    disk=Stack((LayerId("0" * 31 + "4.raw"), LayerId("0" * 31 + "5.qcow2")), 4 << 30),
    control_of=SandboxId("33333333-3333-4333-8333-333333333333"),
)
FULL_SANDBOX = Sandbox(
    id=SandboxId("11111111-1111-4111-8111-111111111111"),
    template_id=SnapshotId("22222222-2222-4222-8222-222222222222"),
    template_name="base",
    state=State.PAUSED,
    generation=3,
    machine=Machine(vcpu_count=2, memory_mib=512, disk_mib=4096),
    created_at=AT,
    started_at=AT + timedelta(seconds=1),
    ends_at=AT + timedelta(hours=1),
    on_timeout=OnTimeout.PAUSE,
    auto_resume=True,
    secure=False,
    metadata={"run": "7"},
    env={"LANG": "C.UTF-8"},
    egress=EgressPolicy(
        allow_internet=False, allow_out=(IPv4Network("192.0.2.0/24"),), deny_out=(IPv4Network("0.0.0.0/0"),)
    ),
    ingress=IngressPolicy(allow_public_traffic=False, mask_request_host="localhost:${PORT}"),
    envd_version="0.1.0",
    default_user="user",
    default_workdir="/home/user",
    slot_index=4,
    process=ProcessIdentity(pid=4711, start_time=123456),
    capture=CAPTURE,
    reason="its virtual machine was lost",
)
PLAIN_SANDBOX = Sandbox(
    id=SandboxId("44444444-4444-4444-8444-444444444444"),
    template_id=SnapshotId("22222222-2222-4222-8222-222222222222"),
    template_name=None,
    state=State.RUNNING,
    generation=1,
    machine=Machine(vcpu_count=1, memory_mib=256, disk_mib=1024),
    created_at=AT,
    started_at=AT,
    ends_at=None,
)
FULL_SNAPSHOT = Snapshot(
    id=SnapshotId("22222222-2222-4222-8222-222222222222"),
    names=("base", "base-12"),
    source=Source.SANDBOX,
    sandbox_id=SandboxId("33333333-3333-4333-8333-333333333333"),
    machine=Machine(vcpu_count=2, memory_mib=512, disk_mib=4096),
    fingerprint=Fingerprint("qemu", "7.2.22", "tcg", "max,-erms", "0" * 64),
    capture=CAPTURE,
    created_at=AT,
    envd_version="0.1.0",
    env={"LANG": "C.UTF-8"},
    default_user="root",
    default_workdir="/srv",
    spawn_count=12,
    last_spawned_at=AT + timedelta(days=1),
)
PLAIN_SNAPSHOT = Snapshot(
    id=SnapshotId("55555555-5555-4555-8555-555555555555"),
    names=(),
    source=Source.BUILD,
    sandbox_id=None,
    machine=Machine(vcpu_count=1, memory_mib=256, disk_mib=1024),
    fingerprint=Fingerprint("qemu", "7.2.22", "tcg", "max,-erms", "0" * 64),
    capture=CAPTURE,
    created_at=AT,
    envd_version="0.1.0",
)


def golden(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((REPO / "spec/records" / name).read_text())
    return rows


def stored(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"record": json.dumps(row["record"])}


def holds(written: dict[str, object], row: dict[str, Any]) -> bool:
    """Whether *written* says all that *row* does: a later release may say more, and nothing else."""
    record = json.loads(str(written["record"]))
    columns = {name: value for name, value in written.items() if name != "record"}
    return columns == {k: v for k, v in row.items() if k != "record"} and says_all(record, row["record"])


def says_all(written: object, specified: object) -> bool:
    """Whether *written* is *specified*, at any depth with more fields at most."""
    if isinstance(written, dict) and isinstance(specified, dict):
        return all(name in written and says_all(written[name], value) for name, value in specified.items())
    return written == specified


@pytest.mark.parametrize(
    ("row", "sandbox"),
    list(zip(golden("sandbox-1.json"), (FULL_SANDBOX, PLAIN_SANDBOX), strict=True)),
    ids=["full", "plain"],
)
def test_a_sandbox_is_read_and_written_as_specified(row: dict[str, Any], sandbox: Sandbox) -> None:
    assert decode_sandbox(stored(row)) == sandbox
    assert holds(encode_sandbox(sandbox), row)


@pytest.mark.parametrize(
    ("row", "snapshot"),
    list(zip(golden("snapshot-1.json"), (FULL_SNAPSHOT, PLAIN_SNAPSHOT), strict=True)),
    ids=["full", "plain"],
)
def test_a_snapshot_is_read_and_written_as_specified(row: dict[str, Any], snapshot: Snapshot) -> None:
    assert decode_snapshot(stored(row), snapshot.names) == snapshot
    assert holds(encode_snapshot(snapshot), row)
