"""Running it: uvicorn brings the loop, the signals, the lifespan and the listening sockets, and the protocol is ours.

uvicorn's own protocols bound neither the head of a request nor the time it takes, lose
the body of a request that offers an upgrade, and decode WebSockets that we only carry.
"""

import asyncio
import functools
import math
import resource
from typing import Any, cast

import uvicorn

from agentenv.proxy.asgi import ASGIApp
from agentenv.proxy.inbound.connection import ClientConnection, Server
from agentenv.proxy.inbound.limits import ServerLimits


def http_server(
    app: ASGIApp, host: str = "127.0.0.1", port: int = 8000, limits: ServerLimits | None = None
) -> uvicorn.Server:
    """A server of *app* (usually a `Proxy`) that has not started; `uvicorn.Server.serve` runs it.

    *port* 0 takes a free one. Set ``should_exit`` to stop it gracefully.
    """
    limits = limits or ServerLimits()
    config = uvicorn.Config(
        cast("Any", app),
        host=host,
        port=port,
        http=cast("Any", functools.partial(_connection, limits=limits)),
        ws="none",
        loop="uvloop",
        lifespan="auto",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=4096,
        timeout_graceful_shutdown=math.ceil(limits.stop_timeout_s),
    )
    return uvicorn.Server(config)


def serve(app: ASGIApp, host: str = "127.0.0.1", port: int = 8000, limits: ServerLimits | None = None) -> None:
    """Serve *app* until SIGINT or SIGTERM. Blocks; makes its own event loop."""
    raise_descriptor_limit()
    http_server(app, host, port, limits).run()


def raise_descriptor_limit() -> int:
    """Allow this process as many descriptors as it may have, and return that number: each stream takes two."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _connection(
    *,
    config: uvicorn.Config,
    server_state: Server,
    app_state: dict[str, object],
    limits: ServerLimits,
    _loop: asyncio.AbstractEventLoop | None = None,
) -> ClientConnection:
    """What uvicorn calls for each connection it accepts."""
    return ClientConnection(config.loaded_app, server_state, app_state, limits)
