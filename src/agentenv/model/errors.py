"""Every way an operation can fail, by what the caller should do next.

A kind is what clients and tests match on; the sentence is for people. The API
turns a kind into a status in one table (`api/errors.py`); nothing else does.
"""

from typing import ClassVar


class AgentEnvError(Exception):
    """Base of all errors that cross a package boundary.

    Args:
        message: what was asked and what stood in the way.
        hint: what the reader may do about it; never part of the message.
    """

    kind: ClassVar[str] = "bug"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class NotFound(AgentEnvError):
    """The named thing does not exist, or is not the caller's to see."""

    kind = "not_found"


class AlreadyExists(AgentEnvError):
    """The name is taken."""

    kind = "already_exists"


class Conflict(AgentEnvError):
    """The thing exists but is in a state in which this cannot be done."""

    kind = "conflict"


class Invalid(AgentEnvError):
    """The request can never succeed as it stands."""

    kind = "invalid"


class Unauthenticated(AgentEnvError):
    """No credential, or a wrong one."""

    kind = "unauthenticated"


class Exhausted(AgentEnvError):
    """A bounded resource (space, slots, memory) is used up; trying later may work."""

    kind = "exhausted"


class NoSpace(Exhausted):
    """The disk is full. A class of its own because pause turns back on it."""

    kind = "no_space"


class Unavailable(AgentEnvError):
    """The other side (guest, daemon, VMM) is gone or does not answer."""

    kind = "unavailable"


class DeadlineExceeded(AgentEnvError):
    """The operation did not end in the time it was given."""

    kind = "deadline"


class Unsupported(AgentEnvError):
    """This host, driver or release cannot do it; the message says which."""

    kind = "unsupported"


class Bug(AgentEnvError):
    """An invariant of ours was broken."""

    kind = "bug"
