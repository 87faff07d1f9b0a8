"""What the proxy says when the guest does not: one answer per thing that can be wrong.

The wording is an interface. E2B's clients take a 502 with "was not found" for a sandbox
that is gone and "port is not open" for a port that nobody listens on, and nothing else;
AgentENV's expect 404 and 410. ``code`` always equals the status, and ``error_code``
says the same to programs in one stable word.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agentenv.guest.answer import GuestGarbage
from agentenv.guest.connection import GuestGone
from agentenv.model.errors import (
    AgentEnvError,
    Conflict,
    DeadlineExceeded,
    Exhausted,
    NoSpace,
    NotFound,
    Unavailable,
)
from agentenv.proxy.asgi import Send
from agentenv.proxy.route import Family, ToSandbox


class PortClosed(Unavailable):
    """The guest is there, and nothing listens on the port."""


class GuestSilent(DeadlineExceeded):
    """The guest neither takes what it is sent nor answers."""


class ClientSilent(DeadlineExceeded):
    """The client announced a body and does not send it."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes

    async def send(self, send: Send) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(self.body)),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def refused(status: int, message: str, error_code: str) -> Answer:
    return _answer(status, {"code": status, "message": message, "error_code": error_code})


def no_such_sandbox(target: ToSandbox) -> Answer:
    if target.family is Family.E2B:
        return _not_found_e2b(target.sandbox_id, "sandbox_not_found")
    return refused(404, f"there is no sandbox {target.sandbox_id}", "sandbox_not_found")


def no_such_link() -> Answer:
    """For a signed link that no running sandbox has given out."""
    return _not_found_e2b("", "sandbox_not_found")


def not_running(target: ToSandbox, state: str) -> Answer:
    """*state* is where it is instead, in words: "paused", "in error"."""
    error_code = "sandbox_paused" if state == "paused" else "sandbox_not_running"
    if target.family is Family.E2B:
        return _not_found_e2b(target.sandbox_id, error_code)
    return refused(410, f"sandbox {target.sandbox_id} is {state}", error_code)


def token_required(target: ToSandbox) -> Answer:
    return refused(403, f"port {target.port} of this sandbox needs its traffic token, once", "traffic_token_required")


def agent_token_required() -> Answer:
    return refused(401, "unauthenticated: the sandbox sleeps, and only its access token wakes it", "unauthenticated")


def not_served(path: bytes) -> Answer:
    return refused(404, f"the guest agent has nothing at {path[:80].decode('latin-1')}", "not_found")


def failed(target: ToSandbox, error: AgentEnvError) -> Answer:
    """The answer for what went wrong on the way to the guest, before a byte of its answer was passed on."""
    match error:
        case PortClosed():
            return _answer(
                502,
                {
                    "sandboxId": target.sandbox_id,
                    "message": "The sandbox is running but port is not open",
                    "port": target.port,
                    "code": 502,
                    "error_code": "port_closed",
                },
            )
        case ClientSilent():
            return refused(408, "the body of the request did not come", "deadline")
        case GuestSilent():
            return refused(504, f"the guest does not answer on port {target.port}", "guest_not_answering")
        case GuestGone():
            return refused(502, f"the guest closed port {target.port} without an answer", "guest_not_answering")
        case GuestGarbage():
            return refused(502, f"what answers on port {target.port} does not speak HTTP/1.1", "guest_garbage")
        case Exhausted():
            return refused(503, error.message, "exhausted")
        case Unavailable():
            return refused(502, f"the guest cannot be reached: {error.message}", "guest_not_answering")
        case _:
            return refused(500, "the proxy failed", "bug")


def not_woken(target: ToSandbox, error: AgentEnvError) -> Answer:
    """The answer when a paused sandbox should have come back and did not."""
    match error:
        case NotFound():
            return no_such_sandbox(target)
        case Conflict():
            return not_running(target, "paused")
        case DeadlineExceeded():
            return refused(504, "the sandbox did not wake in time", "wake_deadline")
        case NoSpace():
            status = 507
        case Exhausted():
            status = 429
        case _:
            status = 502
    return refused(status, f"the sandbox could not be woken: {error.message}", f"wake_{error.kind}")


def _not_found_e2b(sandbox_id: str, error_code: str) -> Answer:
    return _answer(
        502,
        {"sandboxId": sandbox_id, "message": "The sandbox was not found", "code": 502, "error_code": error_code},
    )


def _answer(status: int, content: Mapping[str, object]) -> Answer:
    return Answer(status, json.dumps(content, separators=_COMPACT).encode())


_COMPACT: Final = (",", ":")
