"""An API over a fake node, and a client that holds its key."""

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from agentenv.api.app import create_app
from agentenv.api.settings import ApiSettings
from agentenv.proxy.inbound.serve import http_server
from agentenv.testing.clock import JumpingClock
from agentenv.testing.node import FakeNode
from tests.unit.api.client import KEY, connect


@pytest.fixture
def clock() -> JumpingClock:
    return JumpingClock()


@pytest.fixture
async def node(clock: JumpingClock) -> AsyncIterator[FakeNode]:
    node = FakeNode(clock=clock)
    yield node
    await node.close()


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(api_key=KEY, domain="sandbox.test:8000")


@pytest.fixture
def app(node: FakeNode, settings: ApiSettings, clock: JumpingClock) -> FastAPI:
    return create_app(node, settings, clock=clock)


@pytest.fixture
async def api(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(app) as client:
        yield client


@pytest.fixture(params=["uvicorn", "agentenv"])
async def port(app: FastAPI, request: pytest.FixtureRequest) -> AsyncIterator[int]:
    """Where *app* is served on loopback, by a plain server and by the one of the product."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if request.param == "agentenv":
            server = http_server(app)
        else:
            config = uvicorn.Config(app, http="httptools", lifespan="off", log_config=None, timeout_graceful_shutdown=5)
            server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving
