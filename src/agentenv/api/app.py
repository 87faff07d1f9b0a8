"""The control API as one ASGI application over a node. Parts are joined here and nowhere else."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from agentenv.aio.clock import Clock, SystemClock
from agentenv.api import later
from agentenv.api.auth import api_key_check
from agentenv.api.body import explain
from agentenv.api.builds import BuildRoutes
from agentenv.api.document import build_document
from agentenv.api.edge import Edge, RouteIndex
from agentenv.api.endpoints import Endpoints
from agentenv.api.errors import HttpError, error_response
from agentenv.api.lifecycle import LifecycleRoutes
from agentenv.api.metrics import ApiMetrics
from agentenv.api.nodes import NodeRoutes
from agentenv.api.sandboxes import SandboxRoutes
from agentenv.api.settings import ApiSettings
from agentenv.api.telemetry import TelemetryRoutes
from agentenv.api.templates import TemplateRoutes
from agentenv.model.errors import AgentEnvError
from agentenv.node.contract import Node


def create_app(
    node: Node,
    settings: ApiSettings,
    *,
    builds: BuildRoutes | None = None,
    registry: CollectorRegistry | None = None,
    clock: Clock | None = None,
) -> FastAPI:
    """The API of *node*.

    It owns no task and no connection: the caller starts and closes the node. *builds* are
    the routes that make templates, where this server makes any. *registry*
    is what ``GET /metrics`` shows; others may register in it too. *clock* tells when an
    ``Idempotency-Key`` is forgotten.
    """
    metrics = ApiMetrics(node, registry)
    app = FastAPI(title="AgentENV", version=version("agentenv"), redoc_url=None, swagger_ui_oauth2_redirect_url=None)
    app.router.redirect_slashes = False  # `Edge` has removed them
    endpoints = Endpoints(app.router, api_key_check(settings.api_key))
    if builds is not None:
        builds.declare(endpoints)  # before what `later` refuses: POST /templates/{id} is a route of E2B's
    later.declare(endpoints)  # first: its `/templates/tags` is no template's id
    TelemetryRoutes(node).declare(endpoints)  # before `/sandboxes/{sandbox_id}`: its `/sandboxes/metrics` is no id
    SandboxRoutes(node, settings, metrics, clock or SystemClock()).declare(endpoints)
    LifecycleRoutes(node, settings).declare(endpoints)
    TemplateRoutes(node, builds.cancel if builds is not None else None).declare(endpoints)
    NodeRoutes(node, settings, metrics).declare(endpoints)
    index = RouteIndex(app.router.routes)
    _translate_errors(app, index)
    app.add_middleware(Edge, index=index, metrics=metrics)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = build_document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document
    return app


def _translate_errors(app: FastAPI, index: RouteIndex) -> None:
    def respond(request: Request, error: AgentEnvError) -> Response:
        return error_response(error, method=request.scope["method"], path=request.scope["path"])

    async def on_kind(request: Request, error: Exception) -> Response:
        assert isinstance(error, AgentEnvError)
        return respond(request, error)

    async def on_query(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        details = [{**one, "loc": one["loc"][1:]} for one in error.errors()]
        return respond(request, explain(details, "query parameter"))  # type: ignore[arg-type]  # FastAPI has the shape untyped

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return respond(request, HttpError(404, "route_not_found", "route not found"))
        if error.status_code == 405:
            allowed = ", ".join(index.methods(request.scope["path"]))
            message = f"method not allowed; this route has {allowed}"
            return respond(request, HttpError(405, "method_not_allowed", message, headers={"Allow": allowed}))
        return respond(request, HttpError(error.status_code, "http", str(error.detail)))

    app.add_exception_handler(AgentEnvError, on_kind)
    app.add_exception_handler(RequestValidationError, on_query)
    app.add_exception_handler(HTTPException, on_http)
