"""The data plane: HTTP and everything that grows out of it, from outside to any port of a sandbox."""

from agentenv.proxy.app import Observer, Proxy
from agentenv.proxy.inbound.limits import ServerLimits
from agentenv.proxy.inbound.serve import http_server, raise_descriptor_limit, serve
from agentenv.proxy.metrics import ProxyMetrics
from agentenv.proxy.settings import ProxySettings

__all__ = [
    "Observer",
    "Proxy",
    "ProxyMetrics",
    "ProxySettings",
    "ServerLimits",
    "http_server",
    "raise_descriptor_limit",
    "serve",
]
