"""The ASGI interface, as types, and the one extension that this project adds to it.

ASGI has no way to hand over a connection that leaves HTTP, so the server of this
package puts a `TakeOver` under the name `UPGRADE` into the extensions of a request that
asks to switch protocols. A server that has no such extension serves everything else.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Protocol, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

UPGRADE: Final = "agentenv.upgrade"


class TakeOver(Protocol):
    def __call__(self, head: bytes, end: asyncio.Protocol) -> bytes:
        """Send *head*, an answer with status 101, and let *end* have the connection from now on.

        Instead of ASGI's ``send``, and at most once. *end* gets ``connection_made`` at
        once; reading is paused until it resumes it. Returns what the client has sent
        already. Raises `Unavailable` if the client has left.
        """
        ...
