"""The proxy: what names a sandbox goes to that sandbox, everything else to the control API.

For a sandbox, in this order: may the caller reach that port, is the sandbox running or
may this request wake it, and only then is anything sent or any body read.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

import structlog

from agentenv.aio.tasks import Tasks
from agentenv.guest.answer import Headers
from agentenv.guest.connection import GuestGone
from agentenv.guest.contract import AGENT_PORT
from agentenv.model.errors import AgentEnvError, Bug, DeadlineExceeded
from agentenv.node.contract import Node, Route
from agentenv.proxy import errors
from agentenv.proxy.access import agent_serves, credentials, without_token
from agentenv.proxy.asgi import UPGRADE, ASGIApp, Message, Receive, Scope, Send, TakeOver
from agentenv.proxy.gate import ATTEMPTS, Gate, Refused
from agentenv.proxy.headers import (
    Client,
    Framing,
    expects_continue,
    framing,
    guest_host,
    request_head,
    upgrade_wanted,
)
from agentenv.proxy.pool import Pool, PoolStatistics, RouteChanged
from agentenv.proxy.pump import IDEMPOTENT, Exchange, GuestRequest
from agentenv.proxy.route import Decision, Family, Refuse, ToControl, ToSandbox, ToSigned, Via, route
from agentenv.proxy.settings import ProxySettings

_log = structlog.get_logger(__name__)

_PATIENT_PATH: Final = b"/process.Process/StreamInput"


class Observer(Protocol):
    """Told of every request for a sandbox once it is over."""

    def __call__(self, via: Via | None, method: str, status: int | None, duration_s: float) -> None:
        """*status* is None if the client left first; *via* is None if the request was refused unread."""
        ...


class Proxy:
    """An ASGI application in front of *control*.

    Args:
        node: whose sandboxes it leads to.
        control: answers everything that names no sandbox, and owns the lifespan.
        settings: see `ProxySettings`.
        observe: told of each request for a sandbox.
    """

    def __init__(
        self,
        node: Node,
        control: ASGIApp,
        settings: ProxySettings = ProxySettings(),  # noqa: B008  (frozen)
        *,
        observe: Observer | None = None,
    ) -> None:
        self._node = node
        self._control = control
        self._settings = settings
        self._observe = observe
        self._gate = Gate(node, settings.wake_timeout_s)
        self._pool = Pool(node, settings)
        self._tasks = Tasks("proxy")

    def __repr__(self) -> str:
        return f"<Proxy: {self._pool!r}, {self._tasks.statistics().running} inlets>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await self._lifespan(scope, receive, send)
            case "websocket":
                # This server hands out the bare connection instead (see `asgi`); another one cannot do what we promise.
                await send({"type": "websocket.close", "code": 1011, "reason": "served by agentenv's own server only"})
            case other:
                raise Bug(f"the server speaks {other!r}, which is no ASGI scope that we know")

    def forget(self, sandbox_id: str) -> None:
        """Cut every connection to *sandbox_id*. For the node to call when it stops running: paused, lost or deleted.

        What is in flight ends for its client as a broken connection.
        """
        self._pool.forget(sandbox_id)

    def statistics(self) -> PoolStatistics:
        return self._pool.statistics()

    async def close(self) -> None:
        """Cut every connection to a guest."""
        self._pool.close()
        await self._tasks.close()

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._control(scope, receive, send)
        finally:
            await self.close()

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, path, query = scope["headers"], scope["raw_path"], scope["query_string"]
        decision = route(scope["method"], headers, path, query)
        if isinstance(decision, ToControl):
            await self._control(scope, self._hurried(receive, headers), self._taken(send))
            return
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        via, status = None, None
        try:
            target = self._target(decision)
            via = target.via
            status = await self._serve(target, scope, receive, send)
        except Refused as refused:
            status = refused.answer.status
            await refused.answer.send(send)
        finally:
            if self._observe is not None:
                self._observe(via, scope["method"], status, loop.time() - started_at)

    def _target(self, decision: Decision) -> ToSandbox:
        match decision:
            case ToSandbox():
                return decision
            case ToSigned(file, path):
                sandbox = self._node.find_by_signature(file.matches)
                if sandbox is None:
                    raise Refused(errors.no_such_link())
                return ToSandbox(sandbox.id, AGENT_PORT, Family.E2B, Via.SIGNATURE, path)
            case Refuse(status, message):
                raise Refused(errors.refused(status, message, "invalid"))
            case ToControl():
                raise Bug("a request for the control API came to the proxy's own part")

    async def _serve(self, target: ToSandbox, scope: Scope, receive: Receive, send: Send) -> int | None:
        headers: Headers = scope["headers"]
        body = framing(headers)
        if body is None:
            raise Refused(errors.refused(400, "the length of the body is given twice, or in an unknown way", "invalid"))
        if target.port == AGENT_PORT and not agent_serves(target.path):
            self._gate.sandbox(target)  # one that is not there is not found, whatever is asked of it
            raise Refused(errors.not_served(target.path))
        take_over: TakeOver | None = (scope.get("extensions") or {}).get(UPGRADE)
        upgrade = upgrade_wanted(headers) if take_over is not None else None
        shown = credentials(headers, scope["query_string"], upgrade=upgrade is not None)
        if not body.has_body:
            await receive()  # the empty body; what comes next can only be the client's leaving
        for _ in range(ATTEMPTS):
            way, was_woken = await self._gate.way(target, shown, scope["method"], scope["query_string"])
            if was_woken and not body.has_body and await _has_left(receive):
                return None
            request = self._request(target, way, scope, body, upgrade, take_over)
            try:
                return await self._exchange(way, target.port, request, receive, send)
            except RouteChanged:
                continue
            except AgentEnvError as error:
                raise self._gate.explain(target, error) from error
        raise Refused(errors.not_running(target, "starting and stopping"))

    def _request(
        self,
        target: ToSandbox,
        way: Route,
        scope: Scope,
        body: Framing,
        upgrade: bytes | None,
        take_over: TakeOver | None,
    ) -> GuestRequest:
        method: str = scope["method"]
        headers: Headers = scope["headers"]
        query: bytes = scope["query_string"]
        if upgrade is not None:
            query = without_token(query)
        client: Sequence[object] | None = scope.get("client")
        expect_continue = body.has_body and expects_continue(headers)
        head = request_head(
            method,
            b"%b?%b" % (target.path, query) if query else target.path,
            headers,
            body,
            Client(str(client[0]) if client else None, scope.get("scheme", "http")),
            port=target.port,
            host=guest_host(headers, way.sandbox.ingress.mask_request_host, address=str(way.address), port=target.port),
            api_key=self._settings.api_key,
            upgrade=upgrade,
            expect_continue=expect_continue,
        )
        return GuestRequest(
            head,
            body,
            head_only=method == "HEAD",
            repeatable=method in IDEMPOTENT and not body.has_body and upgrade is None,
            patient=target.port == AGENT_PORT and target.path == _PATIENT_PATH,
            expect_continue=expect_continue,
            take_over=take_over if upgrade is not None else None,
        )

    async def _exchange(self, way: Route, port: int, request: GuestRequest, receive: Receive, send: Send) -> int | None:
        connection = self._pool.reuse_nowait(way, port, repeatable=request.repeatable)
        is_fresh = connection is None
        while True:
            if connection is None:
                connection = await self._pool.connect(way, port)
            exchange = Exchange(connection, request, receive, send, self._settings, self._tasks)
            try:
                return await exchange.run()
            except GuestGone:
                # Closed just as it was used again: if nothing was heard and nothing can be done twice, once more.
                if is_fresh or not request.repeatable or connection.has_answered:
                    raise
                request = replace(request, repeatable=False)
            finally:
                self._pool.give_back(connection)
            connection, is_fresh = None, True

    def _hurried(self, receive: Receive, headers: Headers) -> Receive:
        """*receive* for the control API, which may not be kept waiting in the middle of a body."""
        body = framing(headers)
        if body is None or not body.has_body:
            return receive
        more = True

        async def hurried() -> Message:
            nonlocal more
            if not more:
                return await receive()
            try:
                async with asyncio.timeout(self._settings.control_body_timeout_s):
                    message = await receive()
            except TimeoutError:
                raise DeadlineExceeded("the body of the request did not come") from None
            more = bool(message.get("more_body", False))
            return message

        return hurried

    def _taken(self, send: Send) -> Send:
        """*send* for the control API, whose clients need not have shown who they are to get an answer."""

        async def taken(message: Message) -> None:
            try:
                async with asyncio.timeout(self._settings.control_body_timeout_s):
                    await send(message)
            except TimeoutError:
                raise ConnectionAbortedError("the client does not take its answer") from None

        return taken


async def _has_left(receive: Receive) -> bool:
    """Whether the client of a request without a body has gone by now."""
    try:
        async with asyncio.timeout(0):
            message = await receive()
    except TimeoutError:
        return False
    return bool(message["type"] == "http.disconnect")
