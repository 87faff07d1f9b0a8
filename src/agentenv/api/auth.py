"""Who may use the control API: whoever sends its key, exactly once, in ``X-API-Key``.

No other header is a credential here. Two keys are refused even if one is right: hops
in between disagree about which of two headers counts.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from starlette.requests import Request

from agentenv.model.errors import Unauthenticated

Authorise: TypeAlias = Callable[[Request], Awaitable[None]]


def api_key_check(api_key: str) -> Authorise:
    """A check that raises `Unauthenticated` and takes as long for a wrong key as for the right one."""
    expected = api_key.encode()

    async def authorise(request: Request) -> None:
        given = [value for name, value in request.scope["headers"] if name == b"x-api-key"]
        if len(given) != 1:
            what = "no X-API-Key header" if not given else "more than one X-API-Key header"
            raise Unauthenticated(what, hint="send the key of this server once")
        if not hmac.compare_digest(given[0], expected):
            raise Unauthenticated("wrong API key")

    return authorise
