"""Around every route: one spelling of a path, HEAD and OPTIONS, a measurement, and a last resort for bugs.

Routes are matched on decoded paths, where ``%2F`` in an id could not be told from a
separator. So each segment is decoded by itself, and a slash in it stays ``%2F``.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentenv.api.errors import error_response
from agentenv.api.metrics import CANCELED, UNMATCHED, ApiMetrics

_ENCODED_SLASH: Final = "%2F"


def canonical_path(raw: bytes) -> str:
    """``//v2/sandboxes/`` is ``/v2/sandboxes``: clients join a base URL that ends in a slash with a path."""
    segments = (unquote_to_bytes(part).decode("utf-8", "replace") for part in raw.split(b"/") if part)
    return "/" + "/".join(segment.replace("/", _ENCODED_SLASH) for segment in segments)


def segment(text: str) -> str:
    """What the client meant by one segment of a canonical path."""
    return text.replace(_ENCODED_SLASH, "/")


class RouteIndex:
    """Which methods a path answers to, over all routes that match it."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes = [route for route in routes if isinstance(route, Route)]

    def methods(self, path: str) -> list[str]:
        """Sorted, for an ``Allow`` header; empty for a path that does not exist."""
        found = {method for route in self._routes if route.path_regex.match(path) for method in (route.methods or ())}
        if not found:
            return []
        if "GET" in found:
            found.add("HEAD")
        return sorted(found | {"OPTIONS"})


@dataclass(slots=True)
class _Progress:
    """How far the answer to one request has come."""

    status: int | None = None
    finished: bool = False


class Edge:
    """ASGI middleware; see the module."""

    def __init__(self, app: ASGIApp, *, index: RouteIndex, metrics: ApiMetrics) -> None:
        self._app = app
        self._index = index
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method: str = scope["method"]
        raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
        inner: Scope = {**scope, "path": canonical_path(raw)}
        if method == "HEAD":
            inner["method"] = "GET"
        progress = _Progress()
        started = time.perf_counter()
        with self._metrics.in_progress.track_inprogress():
            try:
                await self._answer(inner, receive, _watched(send, progress, without_body=method == "HEAD"), progress)
            finally:
                route = getattr(inner.get("route"), "path", UNMATCHED)
                status = str(progress.status) if progress.finished else CANCELED
                self._metrics.ended(method=method, route=route, status=status, seconds=time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, progress: _Progress) -> None:
        if scope["method"] == "OPTIONS" and (allowed := self._index.methods(scope["path"])):
            await Response(status_code=204, headers={"Allow": ", ".join(allowed)})(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            return  # nobody is left to answer
        except Exception as error:
            if progress.status is not None:
                raise  # cut short, so that the client does not take half an answer for a whole one
            answer = error_response(error, method=scope["method"], path=scope["path"])
            await answer(scope, receive, send)


def _watched(send: Send, progress: _Progress, *, without_body: bool) -> Send:
    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start":
            progress.status = message["status"]
        elif message["type"] == "http.response.body":
            progress.finished = not message.get("more_body", False)
            if without_body:
                message = {**message, "body": b""}
        try:
            await send(message)
        except OSError as error:
            raise ClientDisconnect from error
        except RuntimeError as error:
            if "closed" in str(error):  # how uvloop says that the client left a moment ago
                raise ClientDisconnect from error
            raise

    return watched
