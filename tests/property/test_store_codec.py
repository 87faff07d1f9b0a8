"""Any sandbox and any snapshot comes back from its row as it was; strangers in a row harm nobody."""

import json
from dataclasses import MISSING, fields, replace
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.model.ids import BlobId, LayerId, SandboxId, SnapshotId
from agentenv.model.lifecycle import State
from agentenv.model.machine import Fingerprint, Machine, ProcessIdentity
from agentenv.model.policy import EgressPolicy, IngressPolicy
from agentenv.model.sandbox import OnTimeout, Sandbox
from agentenv.model.snapshot import Capture, Snapshot, Source, Stack
from agentenv.state.codec import (
    RECORD_VERSION,
    Undecodable,
    decode_sandbox,
    decode_snapshot,
    encode_sandbox,
    encode_snapshot,
    from_us,
    to_us,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
MAYBE_TEXT = st.none() | TEXT
NUMBERS = st.integers(0, 2**53)
INSTANTS = st.datetimes(datetime(1970, 1, 1), datetime(9000, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001  # bounds
NETWORKS = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 32)).map(lambda pair: IPv4Network(pair, strict=False))
TEXTS = st.dictionaries(TEXT, TEXT, max_size=4)
MACHINES = st.builds(Machine, NUMBERS, NUMBERS, NUMBERS)
STACKS = st.builds(Stack, st.lists(TEXT.map(LayerId), max_size=4).map(tuple), NUMBERS)
MAYBE_FINGERPRINT = st.none() | st.builds(Fingerprint, TEXT, TEXT, TEXT, TEXT, TEXT)
CAPTURES = st.builds(Capture, TEXT.map(BlobId), STACKS, st.none() | STACKS, TEXT.map(SandboxId), MAYBE_FINGERPRINT)
NETWORK_LISTS = st.lists(NETWORKS, max_size=3).map(tuple)

SANDBOXES = st.builds(
    Sandbox,
    id=TEXT.map(SandboxId),
    template_id=TEXT.map(SnapshotId),
    template_name=MAYBE_TEXT,
    state=st.sampled_from(State),
    generation=NUMBERS,
    machine=MACHINES,
    created_at=INSTANTS,
    started_at=INSTANTS,
    ends_at=st.none() | INSTANTS,
    on_timeout=st.sampled_from(OnTimeout),
    auto_resume=st.booleans(),
    secure=st.booleans(),
    metadata=TEXTS,
    env=TEXTS,
    egress=st.builds(EgressPolicy, st.none() | st.booleans(), NETWORK_LISTS, NETWORK_LISTS),
    ingress=st.builds(IngressPolicy, st.booleans(), MAYBE_TEXT),
    envd_version=TEXT,
    default_user=MAYBE_TEXT,
    fingerprint=MAYBE_FINGERPRINT,
    default_workdir=MAYBE_TEXT,
    slot_index=st.none() | NUMBERS,
    process=st.none() | st.builds(ProcessIdentity, NUMBERS, NUMBERS),
    capture=st.none() | CAPTURES,
    reason=MAYBE_TEXT,
)
SNAPSHOTS = st.builds(
    Snapshot,
    id=TEXT.map(SnapshotId),
    names=st.lists(TEXT, max_size=3, unique=True).map(tuple),
    source=st.sampled_from(Source),
    sandbox_id=st.none() | TEXT.map(SandboxId),
    machine=MACHINES,
    fingerprint=st.builds(Fingerprint, TEXT, TEXT, TEXT, TEXT, TEXT),
    capture=CAPTURES,
    created_at=INSTANTS,
    envd_version=TEXT,
    env=TEXTS,
    default_user=MAYBE_TEXT,
    default_workdir=MAYBE_TEXT,
    spawn_count=NUMBERS,
    last_spawned_at=st.none() | INSTANTS,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(SANDBOXES)
def test_a_sandbox_comes_back(sandbox: Sandbox) -> None:
    assert decode_sandbox(encode_sandbox(sandbox)) == sandbox


@given(SNAPSHOTS)
def test_a_snapshot_comes_back(snapshot: Snapshot) -> None:
    assert decode_snapshot(encode_snapshot(snapshot), snapshot.names) == snapshot


@given(INSTANTS)
def test_instants_are_exact(instant: datetime) -> None:
    assert from_us(to_us(instant)) == instant
    assert to_us(instant + timedelta(microseconds=1)) == to_us(instant) + 1


@given(SANDBOXES, st.dictionaries(TEXT.map(lambda name: f"x-{name}"), JSON, max_size=4))
def test_fields_of_a_newer_release_are_ignored(sandbox: Sandbox, strangers: dict[str, object]) -> None:
    row = encode_sandbox(sandbox)
    row["record"] = json.dumps(json.loads(str(row["record"])) | strangers)

    assert decode_sandbox(row) == sandbox


FIRST_RELEASE = {"template_id", "template_name", "machine", "started_at", "ends_at"}  # always written
LATER = sorted({field.name for field in fields(Sandbox)} - FIRST_RELEASE - {"id", "state", "generation", "created_at"})


@given(SANDBOXES, st.sampled_from(LATER))
def test_a_field_that_an_older_release_did_not_write_has_its_default(sandbox: Sandbox, name: str) -> None:
    (field,) = (field for field in fields(Sandbox) if field.name == name)
    default = field.default if field.default_factory is MISSING else field.default_factory()

    decoded = decode_sandbox(_without(encode_sandbox(sandbox), name))

    assert decoded == replace(sandbox, **{name: default})  # type: ignore[arg-type]


@given(SANDBOXES, st.sampled_from(sorted(FIRST_RELEASE)))
def test_a_field_that_was_always_written_is_missed(sandbox: Sandbox, name: str) -> None:
    with pytest.raises(Undecodable, match=name):
        decode_sandbox(_without(encode_sandbox(sandbox), name))


def _without(row: dict[str, object], name: str) -> dict[str, object]:
    record = json.loads(str(row["record"]))
    del record[name]
    return row | {"record": json.dumps(record)}


@given(SANDBOXES, st.text(max_size=30) | JSON.map(json.dumps) | st.binary(max_size=30) | st.none() | st.integers())
def test_garbage_is_told_and_nothing_else(sandbox: Sandbox, record: object) -> None:
    with pytest.raises(Undecodable):
        decode_sandbox(encode_sandbox(sandbox) | {"record": record})


@given(SANDBOXES, st.integers().filter(lambda version: version != RECORD_VERSION) | TEXT | st.none())
def test_a_record_of_another_version_is_told(sandbox: Sandbox, version: object) -> None:
    with pytest.raises(Undecodable, match="version"):
        decode_sandbox(encode_sandbox(sandbox) | {"version": version})
