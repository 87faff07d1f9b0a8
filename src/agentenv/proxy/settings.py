"""What an operator may change about the proxy. Lengths are seconds, sizes bytes."""

from dataclasses import dataclass, field
from typing import Final

from agentenv.config import schema

_PROXY: Final = schema.Proxy()


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """How long the proxy waits and how much it holds.

    Attributes:
        api_key: the platform's key; a request header equal to it never reaches a guest.
        connect_timeout_s: for a TCP connection to a guest.
        progress_timeout_s: until the answer begins, how long neither side may stand still.
            Once the head of the answer has come there is no limit: streams may be silent for hours.
        continue_timeout_s: how long a guest may think about ``Expect: 100-continue``.
        wake_timeout_s: for a paused sandbox to run again.
        control_body_timeout_s: how long a client of the control API may stand still in a body, of a request or answer.
        broken_timeout_s: how long a client may take to read what there was of an answer that broke off.
        half_closed_timeout_s: how long an upgraded connection may be silent once one side has ended.
        max_connections_per_sandbox: open connections to one sandbox, idle ones included.
        max_idle_per_sandbox: connections kept open between requests.
        max_idle_s: how long one is kept.
        max_idle_unsafe_s: how long one may have been idle to carry a request that must not be sent twice.
        sweep_interval_s: how soon a sandbox that stopped running without a word loses its connections.
    """

    api_key: str | None = field(default=None, repr=False)
    connect_timeout_s: float = _PROXY.connect_timeout_s
    progress_timeout_s: float = _PROXY.progress_timeout_s
    continue_timeout_s: float = _PROXY.continue_timeout_s
    wake_timeout_s: float = _PROXY.wake_timeout_s
    control_body_timeout_s: float = _PROXY.control_body_timeout_s
    broken_timeout_s: float = 30.0
    half_closed_timeout_s: float = _PROXY.half_closed_timeout_s
    max_connections_per_sandbox: int = _PROXY.max_connections_per_sandbox
    max_idle_per_sandbox: int = _PROXY.max_idle_per_sandbox
    max_idle_s: float = _PROXY.max_idle_s
    max_idle_unsafe_s: float = _PROXY.max_idle_unsafe_s
    sweep_interval_s: float = _PROXY.sweep_interval_s
