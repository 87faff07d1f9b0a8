"""How a route is declared: path, handler, and everything the OpenAPI document says about it, in one call.

Handlers read their own bodies (`body`) and build their own answers (`present`), so that
each is parsed and written once; what FastAPI would have inferred is said here instead.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from fastapi import APIRouter, Depends
from starlette.responses import Response

from agentenv.api.auth import Authorise
from agentenv.api.body import Wire
from agentenv.api.queries import refuse_repeats
from agentenv.api.responses import Error

Handler: TypeAlias = Callable[..., Awaitable[Response]]

API_KEY_SCHEME: Final = "ApiKey"
NEXT_TOKEN: Final = {
    "X-Next-Token": {
        "description": "Present if there are more: `nextToken` of the next page.",
        "schema": {"type": "string"},
    }
}

_PROBLEMS: Final[Mapping[int, str]] = {
    400: "The request can never succeed as it stands.",
    401: "No API key, a wrong one, or more than one.",
    404: "There is no such thing.",
    408: "Nothing of the body has come for too long.",
    409: "It is in a state in which this cannot be done.",
    413: "The body is longer than this server could ever keep.",
    422: "The Idempotency-Key was used with another request.",
    501: "Not in this release.",
    503: "The other side does not answer. `Should-Retry: false` if sending it again could do it twice.",
    429: "As much as may be is under way; nothing was taken.",
    507: "The disk is full, but for what is kept in reserve.",
}
_ANY_PROBLEM: Final = (
    "Any other error: 405, 408 slow body, 413 long body, 415, 429 nothing left to give, 500, 504 deadline, "
    "507 disk full."
)


@dataclass(frozen=True, slots=True)
class Body:
    """The JSON object that a request carries."""

    model: type[Wire]
    required: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer that is not an error."""

    status: int
    model: Any = None
    description: str = "Done."
    headers: Mapping[str, Any] | None = None


class Endpoints:
    """Adds routes to *router*, behind *authorise* unless they are open."""

    def __init__(self, router: APIRouter, authorise: Authorise) -> None:
        self._router = router
        self._guard = [Depends(authorise), Depends(refuse_repeats)]

    def add(
        self,
        method: str,
        path: str,
        handler: Handler,
        *answers: Answer,
        tag: str,
        summary: str,
        body: Body | None = None,
        problems: Sequence[int] = (),
        parameters: Sequence[Mapping[str, Any]] = (),
        is_open: bool = False,
        deprecated: bool = False,
    ) -> None:
        """*problems* are the error statuses worth naming; 401 and 400 go without saying where they can occur."""
        named = sorted({*problems, *(() if is_open else (401,)), *((400,) if body is not None else ())})
        responses: dict[int | str, dict[str, Any]] = {}
        for answer in answers:
            responses[answer.status] = _described(answer)
        for status in named:
            responses[status] = {"model": Error, "description": _PROBLEMS[status]}
        responses["default"] = {"model": Error, "description": _ANY_PROBLEM}
        extra: dict[str, Any] = {}
        if not is_open:
            extra["security"] = [{API_KEY_SCHEME: []}]
        if body is not None:
            extra["requestBody"] = _request_body(body)
        if parameters:
            extra["parameters"] = [dict(one) for one in parameters]
        self._router.add_api_route(
            path,
            handler,
            methods=[method],
            response_model=None,
            response_class=Response,
            status_code=answers[0].status,
            response_description=answers[0].description,
            summary=summary,
            tags=[tag],
            responses=responses,
            dependencies=None if is_open else self._guard,
            deprecated=deprecated or None,
            operation_id=operation_id(method, path),
            openapi_extra=extra,
        )

    def add_absent(self, method: str, path: str, handler: Handler) -> None:
        """A route that only refuses; it is no part of the document, which promises nothing about it."""
        self._router.add_api_route(
            path,
            handler,
            methods=[method],
            response_model=None,
            dependencies=self._guard,
            include_in_schema=False,
        )


def operation_id(method: str, path: str) -> str:
    """``post_v2_sandboxes_sandbox_id_connect``: what E2B's generators call the same operation."""
    words = path.strip("/").replace("{", "").replace("}", "").replace("-", "_").replace("/", "_")
    return f"{method.lower()}_{words}"


def _described(answer: Answer) -> dict[str, Any]:
    described: dict[str, Any] = {"description": answer.description}
    if answer.model is not None:
        described["model"] = answer.model
    if answer.headers is not None:
        described["headers"] = dict(answer.headers)
    return described


def _request_body(body: Body) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{body.model.__name__}"}
    return {"required": body.required, "content": {"application/json": {"schema": reference}}}
