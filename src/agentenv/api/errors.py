"""Every error leaves in one envelope, and this table is the only place that turns a kind into a status.

``{"code": <the HTTP status>, "message": <sentence>, "error_code": <kind>}``, and ``hint``
where there is one: what the reader may do about it. E2B's clients need the first two on
every answer that is not a 2xx, and decide by `code`.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import structlog
from starlette.responses import Response

from agentenv.model.errors import AgentEnvError, Bug

_log = structlog.get_logger(__name__)

STATUS: Final[Mapping[str, int]] = {
    "invalid": 400,
    "unauthenticated": 401,
    "not_found": 404,
    "already_exists": 409,
    "conflict": 409,
    "exhausted": 429,
    "bug": 500,
    "unsupported": 501,
    "unavailable": 503,
    "deadline": 504,
    "no_space": 507,
}

# E2B's Python client sends a request again, whatever its method, when one of these comes without `Should-Retry`.
_RETRIED: Final = frozenset({502, 503, 504})
_RETRY_AFTER_S: Final = 1
_REPLAYABLE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
_REPLAYABLE_VERBS: Final = ("/pause", "/connect", "/timeout", "/refreshes")


class HttpError(AgentEnvError):
    """An answer that only HTTP has a word for: a wrong route, method, length or encoding.

    Args:
        status: of the answer.
        error_code: takes the place of a kind.
        headers: sent with it.
    """

    def __init__(
        self,
        status: int,
        error_code: str,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.error_code = error_code
        self.headers = headers or {}


@dataclass(frozen=True, slots=True)
class Fault:
    """What a client is told about an exception."""

    code: int
    message: str
    error_code: str
    hint: str | None = None

    def body(self) -> dict[str, object]:
        told: dict[str, object] = {"code": self.code, "message": self.message, "error_code": self.error_code}
        return told if self.hint is None else told | {"hint": self.hint}


def fault(error: BaseException) -> Fault:
    """What to tell a client. Anything that is not one of our kinds is a bug: logged whole, told only as an id."""
    if isinstance(error, HttpError):
        return Fault(error.status, error.message, error.error_code, error.hint)
    if isinstance(error, AgentEnvError) and error.kind in STATUS and not isinstance(error, Bug):
        return Fault(STATUS[error.kind], error.message, error.kind, error.hint)
    error_id = secrets.token_hex(8)
    _log.error("internal error %s", error_id, exc_info=error)
    return Fault(500, f"internal error {error_id}; the server's log says more under this id", "bug")


def error_response(error: BaseException, *, method: str, path: str) -> Response:
    """The answer to *error*, with the headers that tell clients whether sending the request again is safe."""
    told = fault(error)
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    if told.code == 401:
        headers["WWW-Authenticate"] = "ApiKey"
    elif told.code == 429:
        # Nothing was taken, so every client may try again; the JavaScript one does only when told how long to wait.
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    elif told.code in _RETRIED and not is_replayable(method, path):
        headers["Should-Retry"] = "false"
    return Response(json.dumps(told.body()).encode(), told.code, headers, media_type="application/json")


def is_replayable(method: str, path: str) -> bool:
    """Whether a second copy of this request does no more than the first."""
    return method in _REPLAYABLE_METHODS or path.endswith(_REPLAYABLE_VERBS)
