"""Named places in the code where a test can make the world go wrong.

A failpoint does nothing unless it is armed: by a test through `REGISTRY`, or in a
server under test by a text such as ``pause.memory_saved=kill; *=kill@17``:

    kill            SIGKILL to this process, as a crash or the OOM killer would
    raise:KIND      raise the error of that kind ("no_space", "unavailable", ...)
    sleep:SECONDS   take that long
    stall           wait until released (by a test in the same process)

``@N`` lets the first N - 1 passes through, and ``*`` counts passes of every name.
Each action happens once. Names are ``verb.step``, the step just done.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import structlog

from agentenv.model.errors import AgentEnvError, Bug, Invalid

ANY: Final = "*"
_LONGEST_SLEEP_S: Final = 3600.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Kill:
    """End this process at once, with nothing cleaned up."""


@dataclass(frozen=True, slots=True)
class Raise:
    error: Exception


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


@dataclass(frozen=True, slots=True)
class Stall:
    """Hold whoever comes by: `reached` is set when someone does, and `released` lets them go on."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)


Action: TypeAlias = Kill | Raise | Sleep | Stall


@dataclass(slots=True)
class _Armed:
    action: Action
    passes_left: int


class Failpoints:
    """Which failpoints are armed. The product has one, `REGISTRY`."""

    def __init__(self) -> None:
        self._armed: dict[str, _Armed] = {}

    def __bool__(self) -> bool:
        return bool(self._armed)

    def arm(self, name: str, action: Action, *, on_pass: int = 1) -> None:
        """Let *action* happen at the *on_pass*-th pass of *name* from now, once."""
        if on_pass < 1:
            raise Invalid(f"failpoint {name}: pass {on_pass} will never come")
        self._armed[name] = _Armed(action, on_pass)

    def disarm(self, name: str) -> None:
        self._armed.pop(name, None)

    @contextmanager
    def armed(self, name: str, action: Action, *, on_pass: int = 1) -> Iterator[None]:
        """Armed inside the block, and disarmed after it whether it was reached or not."""
        self.arm(name, action, on_pass=on_pass)
        try:
            yield
        finally:
            self.disarm(name)

    def arm_text(self, text: str) -> None:
        """Arm what *text* says (see the module), or raise `Invalid` and arm nothing."""
        parsed = [_parse(item) for item in text.split(";") if item.strip()]
        for name, action, on_pass in parsed:
            _log.warning("failpoint %s is armed: %s at pass %d", name, action, on_pass)
            self.arm(name, action, on_pass=on_pass)

    def take(self, name: str) -> Action | None:
        """Count a pass of *name*; return the action that is due, which is then disarmed."""
        due = None
        for armed_name in (name, ANY):
            armed = self._armed.get(armed_name)
            if armed is None:
                continue
            armed.passes_left -= 1
            if armed.passes_left <= 0 and due is None:
                del self._armed[armed_name]
                due = armed.action
        return due


REGISTRY: Final = Failpoints()


async def failpoint(name: str) -> None:
    """Do what is armed for *name*, normally nothing."""
    if not REGISTRY:
        return
    match REGISTRY.take(name):
        case Sleep(seconds):
            await asyncio.sleep(seconds)
        case Stall() as stall:
            stall.reached.set()
            await stall.released.wait()
        case action:
            _act(name, action)


def failpoint_nowait(name: str) -> None:
    """The same from code that cannot wait, such as a thread; only killing and raising can happen."""
    if REGISTRY:
        _act(name, REGISTRY.take(name))


def _act(name: str, action: Action | None) -> None:
    match action:
        case None:
            return
        case Kill():
            os.kill(os.getpid(), signal.SIGKILL)
        case Raise(error):
            raise error
        case _:
            raise Bug(f"failpoint {name} cannot wait here")


def _parse(item: str) -> tuple[str, Action, int]:
    name, _, rest = (part.strip() for part in item.partition("="))
    what, _, pass_text = rest.partition("@")
    verb, _, argument = what.partition(":")
    try:
        on_pass = int(pass_text or "1")
        action = _action(name, verb, argument)
    except ValueError:
        action, on_pass = None, 0
    if not name or action is None or on_pass < 1:
        raise Invalid(
            f"{item.strip()!r} does not arm a failpoint",
            hint="write name=kill, name=raise:KIND, name=sleep:SECONDS or name=stall, each with @PASS if not the first",
        )
    return name, action, on_pass


def _action(name: str, verb: str, argument: str) -> Action | None:
    match verb, argument:
        case "kill", "":
            return Kill()
        case "stall", "":
            return Stall()
        case "sleep", seconds if 0 <= float(seconds) <= _LONGEST_SLEEP_S:
            return Sleep(float(seconds))
        case "raise", kind if kind in _KINDS:
            return Raise(_KINDS[kind](f"failpoint {name}"))
        case _:
            return None


def _kinds(base: type[AgentEnvError]) -> dict[str, type[AgentEnvError]]:
    found: dict[str, type[AgentEnvError]] = {}
    for error in base.__subclasses__():
        found |= {error.kind: error} | _kinds(error)
    return found


_KINDS: Final = _kinds(AgentEnvError)
