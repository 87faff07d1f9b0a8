"""The HTTP client of the agent inside a guest.

One `HttpAgent` belongs to one VM generation and closes its connections with it:
slot addresses are used again, and a pooled connection would reach the wrong VM.
"""

import asyncio
import base64
import math
import time
from collections.abc import Iterator
from datetime import timedelta
from ipaddress import IPv4Address
from typing import Any, Final

from agentenv.guest.connect import STREAM_TYPE, FrameReader, encode_frame
from agentenv.guest.contract import AGENT_PORT, Agent, Completed, GuestMetrics, Identity
from agentenv.guest.exchange import TOKEN_HEADER, Answer, Exchange, NotConnected
from agentenv.guest.output import CommandOutput
from agentenv.model.errors import Bug, DeadlineExceeded, Unavailable

# A SYN that meets a guest whose network is not up yet is lost, and the kernel sends the next one a second
# later; asking again with a fresh connection is sooner. A guest that is slow to answer gets longer each time.
FIRST_CONNECT_S: Final = 0.25
LONGEST_CONNECT_S: Final = 8.0
FREEZE_ANSWER_S: Final = 1.0  # beyond the limit that the agent was given
REFUSED_PAUSE_S: Final = 0.01
_MAX_COUNT: Final = 1 << 63


class HttpAgents:
    """Makes an HTTP client for each VM generation."""

    def agent(self, address: IPv4Address, *, secret: str) -> Agent:
        return HttpAgent(str(address), AGENT_PORT, secret=secret)


class HttpAgent:
    """See `agentenv.guest.contract.Agent`."""

    def __init__(self, host: str, port: int, *, secret: str) -> None:
        self._exchange = Exchange(host, port)
        self._secret = secret
        self._turn = 0

    async def init(self, identity: Identity, *, secret: str | None, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._init(identity, secret)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the guest agent did not answer within {timeout_s:g} s") from error

    async def _init(self, identity: Identity, secret: str | None) -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        body = _body_of(identity)
        delivered = False
        for connect_s in _connect_timeouts():
            # The clock is set to when it is asked, not to when waiting for the guest began.
            body["timestamp"] = (identity.timestamp + timedelta(seconds=loop.time() - begun_s)).isoformat()
            try:
                answer = await self._exchange.ask(
                    "POST", "/init", secret=secret, body=body, connect_timeout_s=connect_s
                )
            except NotConnected as broken:
                delivered = delivered or broken.delivered
                await asyncio.sleep(REFUSED_PAUSE_S)
                continue
            if answer.status == 401 and delivered and secret != identity.control_secret:
                secret = identity.control_secret  # an answer was lost, and the secret is the new one already
            elif answer.status == 409 and identity.ca_bundle is not None and "caBundle" not in body:
                # Only a guest that was captured with another bundle, or none, has to be sent it.
                body["caBundle"] = identity.ca_bundle.pem
            else:
                _check(answer, "/init")
                return

    async def freeze(self, *, timeout_s: float) -> None:
        # The agent gives up first, and says what would not stand still.
        limit = {"timeoutMs": int(1000 * timeout_s)}
        await self._ask("POST", "/freeze", timeout_s + FREEZE_ANSWER_S, turn=self._next_turn(), body=limit)

    async def thaw(self, *, timeout_s: float) -> None:
        await self._ask("POST", "/thaw", timeout_s, turn=self._next_turn())

    async def metrics(self, *, access_token: str | None, timeout_s: float) -> GuestMetrics:
        answer = (await self._ask("GET", "/metrics", timeout_s, access_token=access_token)).json()
        try:
            return GuestMetrics(
                timestamp=_count(answer["ts"]),
                cpu_count=_count(answer["cpu_count"]),
                cpu_used_pct=_finite(answer["cpu_used_pct"]),
                memory_total=_count(answer["mem_total"]),
                memory_used=_count(answer["mem_used"]),
                memory_cache=_count(answer["mem_cache"]),
                disk_total=_count(answer["disk_total"]),
                disk_used=_count(answer["disk_used"]),
            )
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise Bug(f"the guest agent's metrics lack {error}") from error

    async def run(self, command: list[str], *, user: str, access_token: str | None, timeout_s: float) -> Completed:
        headers = {
            "Content-Type": STREAM_TYPE,
            "Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode(),
        }
        if access_token is not None:
            headers[TOKEN_HEADER] = access_token
        start = {"process": {"cmd": command[0], "args": command[1:]}, "stdin": False}
        output = CommandOutput(command[0])
        reader = FrameReader()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._exchange.stream(
                    "POST", "/process.Process/Start", headers, encode_frame(start), connect_timeout_s=timeout_s
                ) as answer,
            ):
                if answer.status != 200:
                    refusal = Answer(answer.status, await answer.read())
                    raise Bug(f"the guest agent refused to start {command[0]}: {refusal.message}")
                async for data in answer.parts():
                    for frame in reader.feed(data):
                        output.add(frame)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{command[0]} did not end within {timeout_s:g} s") from error
        except NotConnected as error:
            raise Unavailable(f"the guest agent went away: {error}") from error
        return output.completed()

    async def close(self) -> None:
        await self._exchange.close()

    def _next_turn(self) -> int:
        """Later than any before, also of a server before this one: the agent does not carry out what comes late.

        An answer that was given up on leaves its request on the way, and a freeze that arrived after
        the thaw that followed would hold user processes for ever.
        """
        self._turn = max(self._turn + 1, time.monotonic_ns() // 1000)
        return self._turn

    async def _ask(
        self,
        method: str,
        path: str,
        timeout_s: float,
        *,
        access_token: str | None = None,
        turn: int | None = None,
        body: dict[str, Any] | None = None,
    ) -> Answer:
        """Ask until there is an answer: the agent may be starting again. What is asked here may be asked twice."""
        broken: NotConnected | None = None
        try:
            async with asyncio.timeout(timeout_s):
                for connect_s in _connect_timeouts():
                    try:
                        answer = await self._exchange.ask(
                            method,
                            path,
                            secret=self._secret,
                            access_token=access_token,
                            turn=turn,
                            body=body,
                            connect_timeout_s=connect_s,
                        )
                    except NotConnected as error:
                        broken = error
                        await asyncio.sleep(REFUSED_PAUSE_S)
                    else:
                        return _check(answer, path)
        except TimeoutError as error:
            why = f": {broken}" if broken is not None else ""
            raise Unavailable(f"the guest agent did not answer {path} within {timeout_s:g} s{why}") from error
        raise AssertionError("unreachable: time-outs never end")


def _check(answer: Answer, path: str) -> Answer:
    """Return a good answer. `Unavailable` for one that says "not now", `Bug` for one that names a failed step."""
    if answer.status == 503:
        raise Unavailable(f"the guest agent: {answer.message}")
    if not 200 <= answer.status < 300:
        raise Bug(f"the guest agent answered {answer.status} to {path}: {answer.message}")
    return answer


def _count(number: Any) -> int:
    if not 0 <= (value := int(number)) < _MAX_COUNT:
        raise ValueError("a number that cannot be")
    return value


def _finite(number: Any) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"a number: {value}")
    return value


def _connect_timeouts() -> Iterator[float]:
    connect_s = FIRST_CONNECT_S
    while True:
        yield connect_s
        connect_s = min(2 * connect_s, LONGEST_CONNECT_S)


def _body_of(identity: Identity) -> dict[str, Any]:
    body: dict[str, Any] = {
        "accessToken": identity.access_token,
        "envVars": dict(identity.env),
        "hostname": identity.hostname,
        "machineId": identity.machine_id,
        "entropy": base64.b64encode(identity.entropy).decode(),
        "sandboxId": identity.sandbox_id,
        "templateId": identity.template_id,
        "controlSecret": identity.control_secret,
    }
    if identity.default_user is not None:
        body["defaultUser"] = identity.default_user
    if identity.default_workdir is not None:
        body["defaultWorkdir"] = identity.default_workdir
    if identity.ca_bundle is not None:
        body["caDigest"] = identity.ca_bundle.digest
    return body
