"""What can be done to one sandbox: pause, resume, connect, fork, snapshot, its time to live and its network."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from agentenv.api import present
from agentenv.api.body import parse_body, read_body
from agentenv.api.endpoints import Answer, Body, Endpoints
from agentenv.api.errors import HttpError, fault
from agentenv.api.requests import (
    Connect,
    ConnectV2,
    ExtensionParams,
    Fork,
    NetworkUpdate,
    Pause,
    Refresh,
    Resume,
    SetTimeout,
    TakeSnapshot,
)
from agentenv.api.responses import ForkResult, SandboxShape, SnapshotShape
from agentenv.api.settings import ApiSettings
from agentenv.api.unclaimed import delete_unclaimed
from agentenv.model.errors import DeadlineExceeded, Unavailable
from agentenv.model.lifecycle import State
from agentenv.model.sandbox import Forked, Sandbox
from agentenv.node.contract import Node

GUEST_UNRESPONSIVE: Final = "sandbox_snapshot_guest_agent_unresponsive"  # E2B's word, which its clients look for


class LifecycleRoutes:
    """The verbs of *node* on one sandbox."""

    def __init__(self, node: Node, settings: ApiSettings) -> None:
        self._node = node
        self._settings = settings

    def declare(self, endpoints: Endpoints) -> None:
        self._declare_states(endpoints)
        self._declare_properties(endpoints)

    def _declare_states(self, endpoints: Endpoints) -> None:
        running = Answer(200, SandboxShape, "It was running; its end was moved if that is later.")
        resumed = Answer(201, SandboxShape, "It was paused and runs again.")
        endpoints.add(
            "POST", "/sandboxes/{sandbox_id}/pause", self.pause, Answer(204, description="Memory and disk are kept."),
            tag="lifecycle", summary="Pause", body=Body(Pause, required=False), problems=(404, 409, 503),
        )  # fmt: skip
        endpoints.add(
            "POST", "/sandboxes/{sandbox_id}/resume", self.resume, resumed, tag="lifecycle", summary="Resume",
            body=Body(Resume, required=False), problems=(404, 409, 503), deprecated=True,
        )  # fmt: skip
        endpoints.add(
            "POST", "/sandboxes/{sandbox_id}/connect", self.connect, running, resumed, tag="lifecycle",
            summary="Make it run, and live at least this long", body=Body(Connect, required=False),
            problems=(404, 409, 503),
        )  # fmt: skip
        endpoints.add(
            "POST", "/v2/sandboxes/{sandbox_id}/connect", self.connect_v2, running, resumed, tag="lifecycle",
            summary="Make it run, and live at least this long (v2)", body=Body(ConnectV2, required=False),
            problems=(404, 409, 503),
        )  # fmt: skip
        endpoints.add(
            "POST", "/sandboxes/{sandbox_id}/fork", self.fork,
            Answer(201, list[ForkResult], "One entry per child; the source runs on."),
            tag="lifecycle", summary="Fork into children with the same live state", body=Body(Fork, required=False),
            problems=(404, 409, 503),
        )  # fmt: skip
        endpoints.add(
            "POST", "/sandboxes/{sandbox_id}/snapshots", self.snapshot,
            Answer(201, SnapshotShape, "Kept; the sandbox runs on."), tag="snapshots", summary="Take a snapshot",
            body=Body(TakeSnapshot, required=False), problems=(404, 409, 503),
        )  # fmt: skip

    def _declare_properties(self, endpoints: Endpoints) -> None:
        endpoints.add(
            "POST", "/sandboxes/{sandbox_id}/timeout", self.set_timeout, Answer(204), tag="lifecycle",
            summary="Set the end to now plus so many seconds, earlier or later", body=Body(SetTimeout),
            problems=(404, 409),
        )  # fmt: skip
        endpoints.add(
            "POST", "/sandboxes/{sandbox_id}/refreshes", self.refresh, Answer(204), tag="lifecycle",
            summary="Keep alive at least so many seconds more", body=Body(Refresh, required=False),
            problems=(404, 409),
        )  # fmt: skip
        endpoints.add(
            "PUT", "/sandboxes/{sandbox_id}/network", self.set_network, Answer(204), tag="lifecycle",
            summary="Replace the egress policy", body=Body(NetworkUpdate, required=False), problems=(404, 409),
        )  # fmt: skip
        path = "/sandboxes/{sandbox_id}/custom-extension-params"
        endpoints.add(
            "GET", path, self.extension_params, Answer(200, dict[str, object]), tag="lifecycle",
            summary="Read the parameters of the custom extension", problems=(404,),
        )  # fmt: skip
        endpoints.add(
            "PATCH", path, self.set_extension_params, Answer(200, dict[str, object]), tag="lifecycle",
            summary="Change the parameters of the custom extension", body=Body(ExtensionParams), problems=(404,),
        )  # fmt: skip

    async def pause(self, request: Request, sandbox_id: str) -> Response:
        asked = parse_body(Pause, await read_body(request, self._settings), required=False)
        if asked.require_healthy_guest and self._node.get(sandbox_id).state is State.RUNNING:
            await self._require_agent(sandbox_id)
        await self._node.pause(sandbox_id)
        return present.no_content()

    async def _require_agent(self, sandbox_id: str) -> None:
        try:
            await self._node.metrics(sandbox_id)  # any answer of the agent will do
        except (Unavailable, DeadlineExceeded) as error:
            # Not a 409: to E2B's clients any 409 of a pause says "paused already". Nor is it asked at once again.
            raise HttpError(
                503,
                GUEST_UNRESPONSIVE,
                f"the sandbox is not paused: {error.message}",
                headers={"Should-Retry": "false"},
                hint="pause it without requireHealthyGuest, or delete it",
            ) from error

    async def resume(self, request: Request, sandbox_id: str) -> Response:
        asked = parse_body(Resume, await read_body(request, self._settings), required=False)
        sandbox = await self._node.resume(sandbox_id, asked.timeout, on_timeout_pause=asked.auto_pause)
        return present.json_response(self._sandbox(sandbox), 201)

    async def connect(self, request: Request, sandbox_id: str) -> Response:
        asked = parse_body(Connect, await read_body(request, self._settings), required=False)
        return await self._connect(sandbox_id, asked.timeout)

    async def connect_v2(self, request: Request, sandbox_id: str) -> Response:
        asked = parse_body(ConnectV2, await read_body(request, self._settings), required=False)
        return await self._connect(sandbox_id, asked.timeout)

    async def _connect(self, sandbox_id: str, timeout_s: int) -> Response:
        sandbox, was_resumed = await self._node.connect(sandbox_id, timeout_s)
        return present.json_response(self._sandbox(sandbox), 201 if was_resumed else 200)

    async def fork(self, request: Request, sandbox_id: str) -> Response:
        asked = parse_body(Fork, await read_body(request, self._settings), required=False)
        children = await self._node.fork(sandbox_id, asked.count, asked.timeout)
        await delete_unclaimed(self._node, request, [child.sandbox for child in children if child.sandbox is not None])
        return present.json_response([self._child(child) for child in children], 201)

    async def snapshot(self, request: Request, sandbox_id: str) -> Response:
        asked = parse_body(TakeSnapshot, await read_body(request, self._settings), required=False)
        return present.json_response(present.snapshot(await self._node.snapshot(sandbox_id, asked.name)), 201)

    async def set_timeout(self, request: Request, sandbox_id: str) -> Response:
        asked = parse_body(SetTimeout, await read_body(request, self._settings))
        await self._node.set_timeout(sandbox_id, asked.timeout)
        return present.no_content()

    async def refresh(self, request: Request, sandbox_id: str) -> Response:
        asked = parse_body(Refresh, await read_body(request, self._settings), required=False)
        await self._node.extend(sandbox_id, asked.duration)
        return present.no_content()

    async def set_network(self, request: Request, sandbox_id: str) -> Response:
        asked = parse_body(NetworkUpdate, await read_body(request, self._settings), required=False)
        await self._node.set_egress(sandbox_id, asked.egress())
        return present.no_content()

    async def extension_params(self, sandbox_id: str) -> Response:
        self._node.get(sandbox_id)
        return present.json_response({})

    async def set_extension_params(self, request: Request, sandbox_id: str) -> Response:
        asked = parse_body(ExtensionParams, await read_body(request, self._settings))
        self._node.get(sandbox_id)
        if asked.model_extra:
            raise HttpError(400, "unsupported", "no custom extension is configured: it has no parameters")
        return present.json_response({})

    def _sandbox(self, sandbox: Sandbox) -> present.Json:
        return present.sandbox(sandbox, self._node.tokens(sandbox), self._settings)

    def _child(self, child: Forked) -> present.Json:
        if child.sandbox is not None:
            return {"sandbox": self._sandbox(child.sandbox)}
        return {"error": fault(child.error or RuntimeError("a fork without an outcome")).body()}
