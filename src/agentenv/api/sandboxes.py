"""Create, list, read and delete sandboxes, on both generations of E2B's paths."""

import hashlib
from typing import Annotated, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from agentenv.aio.clock import Clock
from agentenv.api import present, queries
from agentenv.api.body import parse_body, read_body
from agentenv.api.endpoints import NEXT_TOKEN, Answer, Body, Endpoints
from agentenv.api.idempotency import Replays
from agentenv.api.metrics import ApiMetrics
from agentenv.api.paging import in_order, page
from agentenv.api.requests import NewSandbox, NewSandboxV2
from agentenv.api.responses import ListedSandbox, SandboxDetail, SandboxShape
from agentenv.api.settings import ApiSettings
from agentenv.api.unclaimed import delete_unclaimed
from agentenv.model.errors import Invalid, NotFound
from agentenv.model.sandbox import CreateSandbox, Sandbox
from agentenv.node.contract import Node

_ID_HEADER: Final = "x-agentenv-sandbox-id"
_CREATE_PROBLEMS: Final = (404, 409, 422, 503)
_KEY_PARAMETER: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "A second create with the same key answers with the sandbox of the first, while that exists.",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,255}$"},
}


class SandboxRoutes:
    """The sandboxes of *node*."""

    def __init__(self, node: Node, settings: ApiSettings, metrics: ApiMetrics, clock: Clock) -> None:
        self._node = node
        self._settings = settings
        self._metrics = metrics
        self._replays: Replays[Sandbox] = Replays(clock)

    def declare(self, endpoints: Endpoints) -> None:
        created = Answer(
            201,
            SandboxShape,
            "The agent in the sandbox answers; its time to live starts now.",
            {_ID_HEADER: {"description": "Id of the sandbox.", "schema": {"type": "string"}}},
        )
        endpoints.add(
            "POST", "/sandboxes", self.create, created, tag="sandboxes", summary="Create a sandbox",
            body=Body(NewSandbox), problems=_CREATE_PROBLEMS, parameters=(_KEY_PARAMETER,),
        )  # fmt: skip
        endpoints.add(
            "POST", "/v2/sandboxes", self.create_v2, created, tag="sandboxes", summary="Create a sandbox (v2)",
            body=Body(NewSandboxV2), problems=_CREATE_PROBLEMS, parameters=(_KEY_PARAMETER,),
        )  # fmt: skip
        endpoints.add(
            "GET", "/sandboxes", self.list_running, Answer(200, list[ListedSandbox], "All that run, newest first."),
            tag="sandboxes", summary="List running sandboxes", problems=(400,), deprecated=True,
        )  # fmt: skip
        endpoints.add(
            "GET", "/v2/sandboxes", self.list_page, Answer(200, list[ListedSandbox], "One page.", NEXT_TOKEN),
            tag="sandboxes", summary="List sandboxes", problems=(400,),
        )  # fmt: skip
        endpoints.add(
            "GET", "/sandboxes/{sandbox_id}", self.detail, Answer(200, SandboxDetail), tag="sandboxes",
            summary="Read a sandbox", problems=(404,),
        )  # fmt: skip
        endpoints.add(
            "DELETE", "/sandboxes/{sandbox_id}", self.delete, Answer(204), tag="sandboxes",
            summary="Kill a sandbox, whatever its state", problems=(404,),
        )  # fmt: skip

    async def create(self, request: Request) -> Response:
        raw = await read_body(request, self._settings)
        asked = parse_body(NewSandbox, raw)
        return await self._create(request, raw, asked.to_model(timeout_s=asked.timeout, secure=asked.secure))

    async def create_v2(self, request: Request) -> Response:
        raw = await read_body(request, self._settings)
        asked = parse_body(NewSandboxV2, raw)
        return await self._create(request, raw, asked.to_model(timeout_s=asked.timeout, secure=True))

    async def _create(self, request: Request, raw: bytes, asked: CreateSandbox) -> Response:
        keys = request.headers.getlist("idempotency-key")
        if not keys:
            sandbox = await self._node.create(asked)
            await delete_unclaimed(self._node, request, [sandbox])
        elif len(keys) > 1:
            raise Invalid("more than one Idempotency-Key header")
        else:
            digest = hashlib.sha256(request.scope["path"].encode() + b"\0" + raw).digest()
            sandbox, replayed = await self._replays.run(
                keys[0], digest, lambda: self._node.create(asked), is_current=self._exists
            )
            if replayed:
                self._metrics.replays.inc()
        document = present.sandbox(sandbox, self._node.tokens(sandbox), self._settings)
        return present.json_response(document, 201, {_ID_HEADER: sandbox.id})

    def _exists(self, sandbox: Sandbox) -> bool:
        try:
            self._node.get(sandbox.id)
        except NotFound:
            return False
        return True

    async def list_running(self, query: Annotated[queries.RunningSandboxes, Query()]) -> Response:
        chosen = queries.SandboxFilter.running(query)
        found = in_order((one for one in self._node.sandboxes() if chosen.matches(one)), "desc")
        return present.json_response([present.listed_sandbox(one) for one in found])

    async def list_page(self, query: Annotated[queries.Sandboxes, Query()]) -> Response:
        chosen = queries.SandboxFilter.of(query, self._template_id(query.template))
        found = (one for one in self._node.sandboxes() if chosen.matches(one))
        shown, token = page(found, limit=query.limit, token=query.next_token, order=query.order)
        headers = {} if token is None else {"X-Next-Token": token}
        return present.json_response([present.listed_sandbox(one) for one in shown], headers=headers)

    async def detail(self, sandbox_id: str) -> Response:
        sandbox = self._node.get(sandbox_id)
        return present.json_response(present.sandbox_detail(sandbox, self._node.tokens(sandbox), self._settings))

    async def delete(self, sandbox_id: str) -> Response:
        await self._node.delete(sandbox_id)
        return present.no_content()

    def _template_id(self, reference: str | None) -> str | None:
        if reference is None:
            return None
        try:
            return self._node.find_snapshot(reference).id
        except NotFound:
            return None  # deleted since, perhaps: sandboxes still carry its name
