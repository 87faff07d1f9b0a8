"""The node itself: whether it lives, what it holds, and who its one team is."""

from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from agentenv.api import present, queries
from agentenv.api.endpoints import Answer, Endpoints
from agentenv.api.metrics import CONTENT_TYPE, ApiMetrics
from agentenv.api.responses import NodeDetail, NodeShape, Team
from agentenv.api.settings import ApiSettings
from agentenv.model.errors import NotFound
from agentenv.node.contract import Node

_TEAM_ID = "00000000-0000-0000-0000-000000000000"


class NodeRoutes:
    """A cluster of one: *node*."""

    def __init__(self, node: Node, settings: ApiSettings, metrics: ApiMetrics) -> None:
        self._node = node
        self._settings = settings
        self._metrics = metrics

    def declare(self, endpoints: Endpoints) -> None:
        endpoints.add(
            "GET", "/health", self.health, Answer(204, description="The server answers."), tag="node",
            summary="Whether the server lives", is_open=True,
        )  # fmt: skip
        endpoints.add(
            "GET", "/metrics", self.prometheus, Answer(200, description="Prometheus text format."), tag="node",
            summary="Metrics of the server", is_open=True,
        )  # fmt: skip
        endpoints.add(
            "GET", "/nodes", self.list_nodes, Answer(200, list[NodeShape]), tag="node", summary="List nodes",
            problems=(400,),
        )  # fmt: skip
        endpoints.add(
            "GET", "/nodes/{node_id}", self.detail, Answer(200, NodeDetail), tag="node", summary="Read a node",
            problems=(400, 404),
        )  # fmt: skip
        endpoints.add(
            "GET", "/teams", self.teams, Answer(200, list[Team]), tag="node", summary="List teams: there is one"
        )

    async def health(self) -> Response:
        return present.no_content()

    async def prometheus(self) -> Response:
        return Response(self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def list_nodes(self, query: Annotated[queries.Cluster, Query()]) -> Response:
        if query.cluster_id not in (None, self._settings.cluster_id):
            return present.json_response([])
        return present.json_response([present.node(self._node.info(), self._settings)])

    async def detail(self, node_id: str, query: Annotated[queries.Cluster, Query()]) -> Response:
        info = self._node.info()
        if node_id != info.id or query.cluster_id not in (None, self._settings.cluster_id):
            raise NotFound("no such node")
        return present.json_response(present.node(info, self._settings) | {"cachedBuilds": []})

    async def teams(self, request: Request) -> Response:
        key = request.headers["x-api-key"]
        team = {"teamID": _TEAM_ID, "name": "default", "apiKey": key, "isDefault": True}
        return present.json_response([team])
