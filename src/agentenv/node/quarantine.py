"""What belongs to records that this release cannot read, as far as can be told.

A release that is rolled back meets records of the newer one. It cannot use them, but
it must not remove their VMs, slots and disks as strays either.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from agentenv.state.contract import Quarantined


@dataclass(frozen=True, slots=True)
class Spared:
    """Owners of disks, pids and slot indices that are left alone."""

    owners: frozenset[str]
    pids: frozenset[int]
    slots: frozenset[int]


def spared(records: Iterable[Quarantined]) -> Spared:
    owners, pids, slots = set(), set(), set()
    for record in records:
        owners.add(record.id)
        match _fields(record.record):
            case {"process": {"pid": int(pid)}, "slot_index": int(slot)}:
                pids.add(pid)
                slots.add(slot)
    return Spared(frozenset(owners), frozenset(pids), frozenset(slots))


def _fields(record: str) -> object:
    try:
        return json.loads(record)
    except (ValueError, RecursionError):
        return None
