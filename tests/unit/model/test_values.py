"""The nouns are frozen, comparable values; the error kinds are one each."""

import dataclasses
import inspect
from datetime import UTC, datetime

import pytest

from agentenv.model import errors, machine, policy, sandbox, snapshot
from agentenv.model.errors import AgentEnvError, Exhausted, NoSpace
from agentenv.model.ids import BlobId, LayerId, SandboxId, SnapshotId
from agentenv.model.machine import Fingerprint, Machine
from agentenv.model.snapshot import Capture, Snapshot, Source, Stack

NOUNS = [
    value
    for module in (machine, policy, sandbox, snapshot)
    for value in vars(module).values()
    if inspect.isclass(value) and value.__module__ == module.__name__ and dataclasses.is_dataclass(value)
]
KINDS = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, AgentEnvError) and value is not AgentEnvError
]


def test_there_are_nouns_and_kinds() -> None:
    assert {"Sandbox", "Snapshot", "Machine", "Capture", "EgressPolicy"} <= {noun.__name__ for noun in NOUNS}
    assert len(KINDS) >= 11


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: noun.__name__)
def test_a_noun_is_frozen_and_slotted(noun: type) -> None:
    assert noun.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "__slots__" in vars(noun)


def test_each_error_is_a_kind_of_its_own() -> None:
    kinds = [error.kind for error in KINDS]
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize("error", KINDS, ids=lambda error: error.__name__)
def test_advice_is_kept_apart_from_the_cause(error: type[AgentEnvError]) -> None:
    raised = error("what stood in the way", hint="what to do")
    assert str(raised) == raised.message == "what stood in the way"
    assert raised.hint == "what to do"
    assert error("x").hint is None


def test_a_full_disk_is_something_exhausted() -> None:
    assert issubclass(NoSpace, Exhausted)


def test_a_snapshot_is_called_by_the_first_of_its_names() -> None:
    plain = Snapshot(
        id=SnapshotId("s"),
        names=(),
        source=Source.BUILD,
        sandbox_id=None,
        machine=Machine(1, 512, 1024),
        fingerprint=Fingerprint("qemu", "7.2", "tcg", "max", "d"),
        capture=Capture(BlobId("b"), Stack((LayerId("m"),), 1), None, SandboxId("c")),
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        envd_version="0.1.0",
    )
    assert plain.name is None
    assert dataclasses.replace(plain, names=("base", "other")).name == "base"


def test_memory_is_counted_in_mebibytes() -> None:
    assert Machine(1, 512, 1024).memory_bytes == 512 * 1024 * 1024
