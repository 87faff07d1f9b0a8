"""What is said on the storage daemon's socket, as bytes and values. Pure; see spec/storaged/protocol.md."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentenv.model.errors import (
    AgentEnvError,
    AlreadyExists,
    Bug,
    Conflict,
    Exhausted,
    Invalid,
    NoSpace,
    NotFound,
    Unavailable,
    Unsupported,
)
from agentenv.model.ids import LayerId
from agentenv.model.snapshot import Stack

PROTOCOL: Final = 1
MAX_FRAME_BYTES: Final = 16 << 20
LENGTH_BYTES: Final = 4

Fields = Mapping[str, Any]
"""Of a request or an answer, as JSON has them."""

_KINDS: Final[Mapping[str, type[AgentEnvError]]] = {
    "invalid": Invalid,
    "not_found": NotFound,
    "already_exists": AlreadyExists,
    "conflict": Conflict,
    "exhausted": Exhausted,
    "no_space": NoSpace,
    "corrupt": Bug,
    "unavailable": Unavailable,
    "unsupported": Unsupported,
    "bug": Bug,
}
_HINTS: Final[Mapping[str, str]] = {
    "no_space": "free space in the data directory, or delete snapshots and paused sandboxes",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """To the request with that ``id``: fields, or why not."""

    id: int
    result: Fields | AgentEnvError


@dataclass(frozen=True, slots=True)
class Greeting:
    """Who answers. ``replaced``: whatever had a path of an earlier daemon open gets errors for ever."""

    version: str
    pid: int
    front_ends: tuple[str, ...]
    replaced: bool


@dataclass(frozen=True, slots=True)
class Owned:
    """What an owner has. ``damaged``: its record cannot be read, and it can only be removed."""

    disk: Stack | None = None
    memory: Stack | None = None
    damaged: bool = False

    @property
    def is_empty(self) -> bool:
        return self.disk is None and self.memory is None and not self.damaged


def encode(request_id: int, call: str, fields: Fields) -> bytes:
    """Return the frame of a request. `Invalid` for more than a frame can hold."""
    body = json.dumps({"id": request_id, "call": call, **fields}, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise Invalid(f"a request of {len(body)} bytes is too long for the storage daemon")
    return len(body).to_bytes(LENGTH_BYTES) + body


def length_of(head: bytes) -> int:
    """How long the frame is that begins so. `Bug` if none is."""
    length = int.from_bytes(head)
    if length > MAX_FRAME_BYTES:
        raise Bug(f"the storage daemon announces {length} bytes")
    return length


def decode(frame: bytes) -> Answer:
    """Return the answer in *frame*, or raise `Bug`: what follows on that connection has no meaning then."""
    try:
        document = json.loads(frame)
        request_id, error = int(document["id"]), document.get("error")
        if error is not None:
            return Answer(request_id, failure(error["code"], error["message"], lost=error["left"] == "lost"))
        return Answer(request_id, dict(document["ok"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Bug(f"the storage daemon says {frame[:200]!r}") from None


def failure(code: str, message: str, *, lost: bool) -> AgentEnvError:
    """Return the kind that a daemon's word for an error is here."""
    kind = _KINDS.get(code, Bug)
    if lost:
        return kind(f"{message} (past repair)", hint="it can only be removed")
    return kind(message, hint=_HINTS.get(code))


def to_fields(stack: Stack) -> Fields:
    return {"layers": list(stack.layers), "size_bytes": stack.size_bytes}


def stack_of(fields: Any) -> Stack:
    """Raises `Bug` for what is no stack, like all readers of answers here."""
    try:
        return Stack(tuple(LayerId(str(layer)) for layer in fields["layers"]), int(fields["size_bytes"]))
    except (ValueError, TypeError, KeyError):
        raise _nonsense(fields) from None


def text_of(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise _nonsense(fields)
    return value


def number_of(fields: Fields, name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float):
        raise _nonsense(fields)
    return value


def greeting_of(fields: Fields) -> Greeting:
    try:
        ends = tuple(str(one) for one in fields["front_ends"])
        replaced = fields.get("mounted") == "replaced"
        return Greeting(str(fields["version"]), int(fields["pid"]), ends, replaced)
    except (ValueError, TypeError, KeyError):
        raise _nonsense(fields) from None


def owners_of(fields: Fields) -> dict[str, Owned]:
    def some(stack: Any) -> Stack | None:
        return stack_of(stack) if stack is not None else None

    try:
        return {
            str(one["owner"]): Owned(some(one["disk"]), some(one["memory"]), bool(one.get("damaged", False)))
            for one in fields["owners"]
        }
    except (TypeError, KeyError):
        raise _nonsense(fields) from None


def layers_of(fields: Fields, name: str) -> set[LayerId]:
    """The layers in the list *name*: names, or records that have them as ``layer``."""
    try:
        return {LayerId(str(one["layer"] if isinstance(one, dict) else one)) for one in fields[name]}
    except (TypeError, KeyError):
        raise _nonsense(fields) from None


def names_of(fields: Fields, name: str) -> frozenset[str]:
    try:
        return frozenset(str(one) for one in fields[name])
    except (TypeError, KeyError):
        raise _nonsense(fields) from None


def _nonsense(fields: Any) -> Bug:
    return Bug(f"the storage daemon says {str(fields)[:200]!r}")
