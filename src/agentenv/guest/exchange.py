"""One request to the agent of a guest and its answer, with nothing believed that comes back.

Whoever is root in a guest may replace the agent. So an answer is bounded in size, never
unpacked, never followed to another address and never remembered in a cookie: the
node would be made to speak to its own network, with the control secret at hand.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from agentenv.model.errors import Unavailable

CONTROL_HEADER: Final = "X-Agentenv-Control"
TOKEN_HEADER: Final = "X-Access-Token"  # noqa: S105 - the name of a header
MAX_ANSWER_BYTES: Final = 1 << 20
_MAX_MESSAGE_BYTES: Final = 2000
_CONNECTIONS: Final = 8


class NotConnected(Exception):
    """The exchange broke off; asking again may work. ``delivered``: the agent may have done what was asked."""

    def __init__(self, why: str, *, delivered: bool) -> None:
        super().__init__(why)
        self.delivered = delivered


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON; `Unavailable` if it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise Unavailable("the guest agent gave no proper answer: it is not JSON") from error

    @property
    def message(self) -> str:
        return self.body[:_MAX_MESSAGE_BYTES].decode(errors="replace") or f"status {self.status}"


class Exchange:
    """The connections to one agent. After `close` there is no other: its address is given to another guest."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def ask(
        self,
        method: str,
        path: str,
        *,
        secret: str | None = None,
        access_token: str | None = None,
        body: dict[str, Any] | None = None,
        connect_timeout_s: float,
    ) -> Answer:
        """Return the answer, whatever its status. `NotConnected` or `Unavailable` if there is none."""
        headers = {}
        if secret is not None:
            headers[CONTROL_HEADER] = secret
        if access_token is not None:
            headers[TOKEN_HEADER] = access_token
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        try:
            async with self.session().request(
                method, self.url(path), json=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                return Answer(answer.status, await read_bounded(answer))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotConnected(str(error), delivered=False) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise NotConnected(str(error) or "connection lost", delivered=True) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise Unavailable(f"the guest agent gave no proper answer to {path}: {error}") from error

    def url(self, path: str) -> str:
        return self._base_url + path

    def session(self) -> aiohttp.ClientSession:
        """The open session; `Unavailable` after `close`."""
        if self._closed:
            raise Unavailable("the connection to this guest is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_CONNECTIONS, use_dns_cache=False),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                headers={"Accept-Encoding": "identity"},
            )
        return self._session

    async def close(self) -> None:
        """Close every connection. Idempotent; an exchange that is going on breaks off."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()


async def read_bounded(answer: aiohttp.ClientResponse) -> bytes:
    """The body of *answer*; `Unavailable` for one that goes on and on."""
    body = bytearray()
    async for data in answer.content.iter_any():
        body += data
        if len(body) > MAX_ANSWER_BYTES:
            raise Unavailable(f"the guest agent sent more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)
