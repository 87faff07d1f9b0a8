"""The HTTP client of the agent inside a guest.

One `HttpAgent` belongs to one VM generation and closes its connections with it:
slot addresses are used again, and a pooled connection would reach the wrong VM.
"""

import asyncio
import base64
from ipaddress import IPv4Address
from typing import Any, Final

import aiohttp

from agentenv.guest.connect import STREAM_TYPE, FrameReader, encode_frame
from agentenv.guest.contract import AGENT_PORT, Agent, Completed, GuestMetrics, Identity
from agentenv.model.errors import AgentEnvError, Bug, DeadlineExceeded, Unavailable

CONTROL_HEADER: Final = "X-Agentenv-Control"
# A SYN that meets a guest whose network is not up yet is lost, and the kernel sends the next
# one a second later; asking again with a fresh connection after this long is much sooner.
CONNECT_ATTEMPT_S: Final = 0.25
MAX_OUTPUT_BYTES: Final = 10 << 20


class HttpAgents:
    """Makes an HTTP client for each VM generation."""

    def agent(self, address: IPv4Address, *, secret: str) -> Agent:
        return HttpAgent(f"http://{address}:{AGENT_PORT}", secret=secret)


class HttpAgent:
    """See `agentenv.guest.contract.Agent`."""

    def __init__(self, base_url: str, *, secret: str) -> None:
        self._base_url = base_url
        self._secret = secret
        self._session: aiohttp.ClientSession | None = None

    async def init(self, identity: Identity, *, secret: str | None, timeout_s: float) -> None:
        body: dict[str, Any] = {
            "accessToken": identity.access_token,
            "envVars": dict(identity.env),
            "timestamp": identity.timestamp.isoformat(),
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
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await self._call("POST", "/init", secret=secret, body=body)
                        return
                    except _BundleWanted:
                        # Only a guest that was captured with another bundle, or none, has to be sent it.
                        body["caBundle"] = identity.ca_bundle.pem if identity.ca_bundle is not None else ""
                    except _NotConnected:
                        await asyncio.sleep(0.01)  # refused at once: the agent is not listening yet
        except TimeoutError as error:
            raise DeadlineExceeded(f"the guest agent did not answer within {timeout_s:g} s") from error

    async def freeze(self, *, timeout_s: float) -> None:
        await self._bounded("POST", "/freeze", timeout_s)

    async def thaw(self, *, timeout_s: float) -> None:
        await self._bounded("POST", "/thaw", timeout_s)

    async def metrics(self, *, access_token: str | None, timeout_s: float) -> GuestMetrics:
        answer = await self._bounded("GET", "/metrics", timeout_s, access_token=access_token)
        try:
            return GuestMetrics(
                timestamp=int(answer["ts"]),
                cpu_count=int(answer["cpu_count"]),
                cpu_used_pct=float(answer["cpu_used_pct"]),
                memory_total=int(answer["mem_total"]),
                memory_used=int(answer["mem_used"]),
                memory_cache=int(answer["mem_cache"]),
                disk_total=int(answer["disk_total"]),
                disk_used=int(answer["disk_used"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Bug(f"the guest agent's metrics lack {error}") from error

    async def run(self, command: list[str], *, user: str, access_token: str | None, timeout_s: float) -> Completed:
        headers = {"Content-Type": STREAM_TYPE, "Authorization": aiohttp.BasicAuth(user, "").encode()}
        if access_token is not None:
            headers["X-Access-Token"] = access_token
        start = {"process": {"cmd": command[0], "args": command[1:]}, "stdin": False}
        output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        exit_code: int | None = None
        reader = FrameReader()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client().post(
                    self._base_url + "/process.Process/Start", data=encode_frame(start), headers=headers
                ) as answer,
            ):
                if answer.status != 200:
                    raise Bug(f"the guest agent refused to start {command[0]}: {await _message(answer)}")
                async for data in answer.content.iter_any():
                    for frame in reader.feed(data):
                        if frame.end and "error" in frame.message:
                            raise Bug(f"{command[0]}: {frame.message['error'].get('message')}")
                        event = frame.message.get("event", {})
                        for stream, text in event.get("data", {}).items():
                            output[stream] += base64.b64decode(text)
                            if len(output[stream]) > MAX_OUTPUT_BYTES:
                                raise Bug(f"{command[0]} wrote more than {MAX_OUTPUT_BYTES} bytes")
                        if "end" in event:
                            exit_code = int(event["end"].get("exitCode", 0))
        except TimeoutError as error:
            raise DeadlineExceeded(f"{command[0]} did not end within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise Unavailable(f"the guest agent went away: {error}") from error
        if exit_code is None:
            raise Unavailable(f"the guest agent did not say how {command[0]} ended")
        return Completed(exit_code, bytes(output["stdout"]), bytes(output["stderr"]))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=8, ttl_dns_cache=None),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_ATTEMPT_S),
            )
        return self._session

    async def _bounded(self, method: str, path: str, timeout_s: float, *, access_token: str | None = None) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._call(method, path, secret=self._secret, access_token=access_token)
        except TimeoutError as error:
            raise Unavailable(f"the guest agent did not answer {path} within {timeout_s:g} s") from error
        except _NotConnected as error:
            raise Unavailable(f"the guest agent cannot be reached: {error}") from error

    async def _call(
        self,
        method: str,
        path: str,
        *,
        secret: str | None,
        access_token: str | None = None,
        body: dict[str, Any] | None = None,
    ) -> Any:
        headers = {} if secret is None else {CONTROL_HEADER: secret}
        if access_token is not None:
            headers["X-Access-Token"] = access_token
        try:
            async with self._client().request(method, self._base_url + path, json=body, headers=headers) as answer:
                if answer.status == 409:
                    raise _BundleWanted
                if answer.status == 503:
                    raise Unavailable(f"the guest agent: {await _message(answer)}")
                if answer.status >= 300:
                    raise Bug(f"the guest agent answered {answer.status} to {path}: {await _message(answer)}")
                return await answer.json() if answer.status == 200 else None
        except AgentEnvError:
            raise
        except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, aiohttp.ServerTimeoutError) as error:
            raise _NotConnected(str(error)) from error
        except aiohttp.ClientOSError as error:
            raise _NotConnected(str(error)) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise Unavailable(f"the guest agent gave no proper answer to {path}: {error}") from error


class _BundleWanted(Exception):
    """The agent does not have the CA bundle that was named."""


class _NotConnected(Exception):
    """Nobody took the connection; asking again may work."""


async def _message(answer: aiohttp.ClientResponse) -> str:
    text = (await answer.content.read(2000)).decode(errors="replace")
    return text or str(answer.reason)
