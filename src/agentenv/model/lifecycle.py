"""Which moves a sandbox may make, and nothing else.

The table is the only place that knows the rules: the registry applies it, the
diagram in docs/concepts/lifecycle.md is compared with it, and the property tests walk it.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from agentenv.model.errors import Conflict


class State(StrEnum):
    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    SNAPSHOTTING = "snapshotting"
    FORKING = "forking"
    KILLING = "killing"
    ERROR = "error"  # its VM is lost; the reason says why; only delete is left
    GONE = "gone"  # never stored: the record is deleted

    @property
    def is_settled(self) -> bool:
        """Whether a sandbox may stay here; every other state has an operation and a deadline."""
        return self in (State.RUNNING, State.PAUSED, State.ERROR, State.GONE)

    @property
    def has_guest(self) -> bool:
        """Whether a VM that runs user code may exist."""
        return self in (State.RUNNING, State.PAUSING, State.RESUMING, State.SNAPSHOTTING, State.FORKING)


class Event(StrEnum):
    PAUSE = "pause"  # requests, taken only in a settled state
    RESUME = "resume"
    SNAPSHOT = "snapshot"
    FORK = "fork"
    KILL = "kill"  # taken in every state: whatever runs is cut short first
    DONE = "done"  # outcomes, reported by the operation in progress
    ROLLED_BACK = "rolled_back"  # failed, and the sandbox is as it was before
    LOST = "lost"  # failed past the point of return, or the VM died by itself


TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.CREATING: {Event.DONE: State.RUNNING, Event.LOST: State.KILLING, Event.KILL: State.KILLING},
    State.RUNNING: {
        Event.PAUSE: State.PAUSING,
        Event.SNAPSHOT: State.SNAPSHOTTING,
        Event.FORK: State.FORKING,
        Event.KILL: State.KILLING,
        Event.LOST: State.ERROR,
    },
    State.PAUSING: {
        Event.DONE: State.PAUSED,
        Event.ROLLED_BACK: State.RUNNING,
        Event.LOST: State.ERROR,
        Event.KILL: State.KILLING,
    },
    State.PAUSED: {Event.RESUME: State.RESUMING, Event.KILL: State.KILLING, Event.LOST: State.ERROR},
    State.RESUMING: {
        Event.DONE: State.RUNNING,
        Event.ROLLED_BACK: State.PAUSED,
        Event.LOST: State.ERROR,
        Event.KILL: State.KILLING,
    },
    State.SNAPSHOTTING: {
        Event.DONE: State.RUNNING,
        Event.ROLLED_BACK: State.RUNNING,
        Event.LOST: State.ERROR,
        Event.KILL: State.KILLING,
    },
    State.FORKING: {
        Event.DONE: State.RUNNING,
        Event.ROLLED_BACK: State.RUNNING,
        Event.LOST: State.ERROR,
        Event.KILL: State.KILLING,
    },
    State.KILLING: {Event.DONE: State.GONE, Event.KILL: State.KILLING},
    State.ERROR: {Event.KILL: State.KILLING, Event.LOST: State.ERROR},
    State.GONE: {},
}


def next_state(state: State, event: Event) -> State:
    """Return the state that *event* leads to, or raise `Conflict` if none does."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise Conflict(f"cannot {event} a sandbox that is {state}") from None
