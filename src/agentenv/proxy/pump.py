"""One request and its answer between a client and a guest, both ways at once and nothing kept.

The outlet (this task) passes the answer on while the inlet (a task of its own) passes
the body on and notices that the client has left. Each waits for the slower side, so a
stream of any length takes the memory of two buffers. An answer that breaks off never
ends cleanly: the exchange stops without the last ASGI message, and the server cuts
the client's connection.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

import structlog

from agentenv.aio.tasks import Tasks
from agentenv.guest.answer import AnswerHead, GuestGarbage
from agentenv.guest.connection import GuestConnection
from agentenv.model.errors import AgentEnvError, Unavailable
from agentenv.proxy.asgi import Receive, Send, TakeOver
from agentenv.proxy.errors import ClientSilent, GuestSilent
from agentenv.proxy.headers import Framing, answer_headers
from agentenv.proxy.settings import ProxySettings
from agentenv.proxy.tunnel import Tunnel

_log = structlog.get_logger(__name__)

IDEMPOTENT: Final = frozenset(("GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"))


@dataclass(frozen=True, slots=True)
class GuestRequest:
    """What is sent to the guest.

    Attributes:
        head: the whole head, with the empty line.
        body: how the body that follows is framed.
        head_only: the answer has no body (HEAD).
        repeatable: doing it twice is doing it once, and there is no body to be lost.
        patient: the body may stand still for as long as it likes (a stream of input).
        expect_continue: the client waits to hear whether the body is wanted.
        take_over: how to get at the client's connection if the guest switches protocols.
    """

    head: bytes
    body: Framing
    head_only: bool = False
    repeatable: bool = False
    patient: bool = False
    expect_continue: bool = False
    take_over: TakeOver | None = None


class Exchange:
    """One attempt. Run it once; it leaves the connection cut unless both messages were complete."""

    def __init__(
        self,
        connection: GuestConnection,
        request: GuestRequest,
        receive: Receive,
        send: Send,
        settings: ProxySettings,
        tasks: Tasks,
    ) -> None:
        self.started = False  # the client has got a byte
        self._connection = connection
        self._request = request
        self._receive = receive
        self._send = send
        self._settings = settings
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._request_sent = not request.body.has_body
        self._answer_sent = False
        self._client_left = False
        self._client_is_due = False  # the next byte has to come from the client
        self._moved_at = self._loop.time()
        self._watchdog: asyncio.TimerHandle | None = None
        self._outlet_limit: asyncio.Timeout | None = None
        self._is_broken = False

    async def run(self) -> int | None:
        """Return the status that was passed on, or None if the client left before there was one.

        Before the answer has begun, raises `GuestGone`, `GuestGarbage`, `GuestSilent`
        or `ClientSilent`. Cancelled, or if the client leaves, the connection is cut.
        """
        connection, request = self._connection, self._request
        connection.begin(head_only=request.head_only, on_broken=self._break_off)
        connection.write(request.head)
        if not request.patient:
            self._watchdog = self._loop.call_later(self._settings.progress_timeout_s, self._check_progress)
        inlet = self._tasks.start("inlet", self._inlet())
        status = None
        try:
            head = await connection.read_head()
            self._stop_watchdog()
            status = head.status
            if status == 101:
                inlet.cancel()
                await self._switch(head)
            else:
                await self._outlet(head)
        except (AgentEnvError, TimeoutError) as error:
            if not self.started and not self._client_left:
                raise
            _log.debug("an answer broke off: %s", error)
        finally:
            self._stop_watchdog()
            inlet.cancel()
            if not (self._answer_sent and self._request_sent):
                connection.abort()
        return status

    async def _outlet(self, head: AnswerHead) -> None:
        start = {
            "type": "http.response.start",
            "status": head.status,
            "headers": answer_headers(head.headers, head.status),
        }
        self.started = True
        try:
            async with asyncio.timeout(None) as self._outlet_limit:
                if self._is_broken:
                    self._break_off()
                await self._send(start)
                body = await self._connection.read_body()
                while not self._connection.is_complete:
                    await self._send({"type": "http.response.body", "body": body, "more_body": True})
                    body = await self._connection.read_body()
        finally:
            self._outlet_limit = None
        self._answer_sent = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _switch(self, head: AnswerHead) -> None:
        take_over = self._request.take_over
        upgrade = next((value for name, value in head.headers if name == b"upgrade"), None)
        if take_over is None or upgrade is None:
            raise GuestGarbage("the guest switched protocols unasked")
        tunnel = Tunnel(half_closed_timeout_s=self._settings.half_closed_timeout_s)
        lines = [b"HTTP/1.1 101 Switching Protocols", b"connection: Upgrade", b"upgrade: " + upgrade]
        lines += [b"%b: %b" % pair for pair in answer_headers(head.headers, head.status)]
        from_guest = self._connection.take_over(tunnel.guest)
        self.started = True
        try:
            from_client = take_over(b"\r\n".join([*lines, b"", b""]), tunnel.client)
        except Unavailable:
            return  # it left meanwhile
        tunnel.start(from_client, from_guest)
        await tunnel.wait_closed()

    async def _inlet(self) -> None:
        if not self._request_sent and not await self._pass_body():
            return
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    async def _pass_body(self) -> bool:
        """Whether all of it was passed on."""
        connection, request = self._connection, self._request
        if request.expect_continue and not await connection.wait_continue(self._settings.continue_timeout_s):
            return False  # answered without it
        more = True
        while more:
            self._client_is_due = True
            message = await self._receive()
            self._client_is_due = False
            if message["type"] == "http.disconnect":
                self._leave()
                return False
            body, more = message.get("body", b""), message.get("more_body", False)
            if body and request.body.chunked:
                connection.write(b"%x\r\n" % len(body), body, b"\r\n")
            elif body:
                connection.write(body)
            self._moved_at = self._loop.time()
            await connection.drain()
            self._moved_at = self._loop.time()
        if request.body.chunked:
            connection.write(b"0\r\n\r\n")
        self._request_sent = True
        return True

    def _leave(self) -> None:
        if not self._answer_sent:  # else it is only the server that has noticed the end
            self._client_left = True
            self._connection.abort()

    def _break_off(self) -> None:
        """The rest will not come: a client that does not read cannot keep what there is of it for ever."""
        self._is_broken = True
        if self._outlet_limit is not None:
            self._outlet_limit.reschedule(self._loop.time() + self._settings.broken_timeout_s)

    def _check_progress(self) -> None:
        due = self._moved_at + self._settings.progress_timeout_s
        if self._loop.time() < due:
            self._watchdog = self._loop.call_at(due, self._check_progress)
        elif self._client_is_due:
            self._connection.abort(ClientSilent("the client stopped sending"))
        else:
            self._connection.abort(GuestSilent("the guest does not answer"))

    def _stop_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
