"""Snapshots and templates: one catalogue, where a template is a snapshot that a build made.

Each has one build and one tag, ``default``. A name may come as ``name``, ``name:default``
or ``namespace/name``, percent-encoded or not.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeAlias

from fastapi import Query
from starlette.responses import Response

from agentenv.api import present, queries
from agentenv.api.edge import segment
from agentenv.api.endpoints import NEXT_TOKEN, Answer, Endpoints
from agentenv.api.fields import REFERENCE
from agentenv.api.paging import in_order, page
from agentenv.api.responses import AliasShape, BuildStatus, SnapshotShape, Tag, TemplateDetail, TemplateShape
from agentenv.model.errors import Invalid, NotFound
from agentenv.model.snapshot import Snapshot, Source
from agentenv.node.contract import Node

CancelBuild: TypeAlias = Callable[[str], Awaitable[bool]]


class TemplateRoutes:
    """The catalogue of *node*; *cancel_build* calls off the build of a name, and says whether there was one."""

    def __init__(self, node: Node, cancel_build: CancelBuild | None = None) -> None:
        self._node = node
        self._cancel_build = cancel_build

    def declare(self, endpoints: Endpoints) -> None:
        endpoints.add(
            "GET", "/snapshots", self.list_snapshots,
            Answer(200, list[SnapshotShape], "One page, newest first; templates are not among them.", NEXT_TOKEN),
            tag="snapshots", summary="List snapshots of sandboxes", problems=(400,),
        )  # fmt: skip
        endpoints.add(
            "GET", "/snapshots/{snapshot_id}", self.snapshot, Answer(200, SnapshotShape), tag="snapshots",
            summary="Read a snapshot of a sandbox, by id or name", problems=(404,),
        )  # fmt: skip
        endpoints.add(
            "GET", "/templates", self.list_templates, Answer(200, list[TemplateShape], "All, newest first."),
            tag="templates", summary="List templates", problems=(400,),
        )  # fmt: skip
        endpoints.add(
            "GET", "/v2/templates", self.list_templates_page,
            Answer(200, list[TemplateShape], "One page, newest first.", NEXT_TOKEN),
            tag="templates", summary="List templates (v2)", problems=(400,),
        )  # fmt: skip
        endpoints.add(
            "GET", "/templates/aliases/{alias}", self.alias, Answer(200, AliasShape), tag="templates",
            summary="Find a template or snapshot by name", problems=(400, 404),
        )  # fmt: skip
        endpoints.add(
            "GET", "/templates/{template_id}", self.detail, Answer(200, TemplateDetail), tag="templates",
            summary="Read a template or snapshot, by id or name", problems=(404,),
        )  # fmt: skip
        endpoints.add(
            "GET", "/templates/{template_id}/tags", self.tags, Answer(200, list[Tag]), tag="templates",
            summary="List the tags of a template", problems=(404,),
        )  # fmt: skip
        endpoints.add(
            "GET", "/templates/{template_id}/builds/{build_id}/status", self.build_status, Answer(200, BuildStatus),
            tag="templates", summary="Read the status of a build; a template that exists is ready", problems=(404,),
        )  # fmt: skip
        endpoints.add(
            "DELETE", "/templates/{template_id}", self.delete,
            Answer(204, description="Sandboxes made from it live on. A build of its name is called off."),
            tag="templates", summary="Delete a template or snapshot, by id or name", problems=(404,),
        )  # fmt: skip

    async def list_snapshots(self, query: Annotated[queries.Snapshots, Query()]) -> Response:
        name = queries.bare_name(query.name) if query.name is not None else None
        chosen = (
            one
            for one in self._node.snapshots(Source.SANDBOX)
            if query.sandbox_id in (None, one.sandbox_id) and (name is None or name in one.names)
        )
        shown, token = page(chosen, limit=query.limit, token=query.next_token)
        headers = {} if token is None else {"X-Next-Token": token}
        return present.json_response([present.snapshot(one) for one in shown], headers=headers)

    async def snapshot(self, snapshot_id: str) -> Response:
        found = self._find(snapshot_id)
        if found.source is not Source.SANDBOX:
            raise NotFound("this is a template, not a snapshot of a sandbox")
        return present.json_response(present.snapshot(found))

    async def list_templates(self, query: Annotated[queries.Team, Query()]) -> Response:  # noqa: ARG002 - documents a parameter that has no effect
        found = in_order(self._node.snapshots(Source.BUILD), "desc")
        return present.json_response([present.template(one) for one in found])

    async def list_templates_page(self, query: Annotated[queries.Templates, Query()]) -> Response:
        shown, token = page(self._node.snapshots(Source.BUILD), limit=query.limit, token=query.next_token)
        headers = {} if token is None else {"X-Next-Token": token}
        return present.json_response([present.template(one) for one in shown], headers=headers)

    async def alias(self, alias: str) -> Response:
        if not REFERENCE.fullmatch(segment(alias)):
            raise Invalid("this cannot be the name of a template")
        return present.json_response({"templateID": self._find(alias).id, "public": False})

    async def detail(self, template_id: str) -> Response:
        return present.json_response(present.template_detail(self._find(template_id)))

    async def tags(self, template_id: str) -> Response:
        found = self._find(template_id)
        only = {"tag": "default", "buildID": found.id, "createdAt": present.timestamp(found.created_at)}
        return present.json_response([only])

    async def build_status(self, template_id: str, build_id: str) -> Response:
        found = self._find(template_id)
        if build_id != found.id:
            raise NotFound("this template has no such build")
        return present.json_response(
            {"templateID": found.id, "buildID": found.id, "status": "ready", "logs": [], "logEntries": []}
        )

    async def delete(self, template_id: str) -> Response:
        called_off = await self._call_off(queries.bare_name(segment(template_id)))
        try:
            found = self._find(template_id)
        except NotFound:
            if not called_off:
                raise
            return present.no_content()
        for name in found.names:
            await self._call_off(name)
        await self._node.delete_snapshot(found.id)
        return present.no_content()

    async def _call_off(self, name: str) -> bool:
        return self._cancel_build is not None and await self._cancel_build(name)

    def _find(self, text: str) -> Snapshot:
        """What cannot be a name is answered like a name that nothing has."""
        reference = segment(text)
        if not REFERENCE.fullmatch(reference):
            raise NotFound("no such template or snapshot")
        return self._node.find_snapshot(reference)
