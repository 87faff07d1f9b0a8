"""The command line's view of a server: the REST API, and a sandbox's agent through the proxy.

Synchronous on purpose: a command does one thing and ends.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx

from agentenv.cli.ids import may_be_part, whole_id
from agentenv.guest.connect import STREAM_TYPE, Frame, FrameReader, encode_frame
from agentenv.guest.contract import AGENT_PORT

DEFAULT_URL: Final = "http://127.0.0.1:8000"
DEFAULT_KEY_FILE: Final = Path("/var/lib/aenv/secrets/api-key")
# As shells have it: 127 for a program that cannot be run, 124 for one that ran out of time.
STREAM_EXIT_CODES: Final = {"invalid_argument": 127, "deadline_exceeded": 124}
TIMEOUT: Final = httpx.Timeout(10.0, read=180.0)
USAGE: Final = 2  # the exit code for what was asked wrongly


class CliError(Exception):
    """Something the person at the terminal should read. ``code`` is the exit code, ``status`` that of HTTP, if any."""

    def __init__(self, message: str, *, hint: str | None = None, code: int = 1, status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code
        self.status = status


def path_of(*segments: str) -> str:
    """The path of *segments*, each of which stays one segment whatever it is made of.

    Raises `CliError` for what cannot be one: HTTP clients drop ``.`` and ``..`` before they ask, so that a
    request for one thing would reach another.
    """
    for segment in segments:
        if segment in ("", ".", ".."):
            raise CliError(f"{segment!r} is no id or name", code=USAGE)
    # What a terminal passes on that is not UTF-8 goes as the bytes it came in.
    return "/" + "/".join(quote(segment, safe="", errors="surrogateescape") for segment in segments)


@dataclass(frozen=True, slots=True)
class Target:
    """Where the server is and with which key."""

    url: str
    api_key: str


def resolve_target(url: str | None, api_key: str | None) -> Target:
    """Flags, then AENV_API_URL and AENV_API_KEY, then E2B's names, then the key file of a server on this machine."""
    environ = os.environ
    url = url or environ.get("AENV_API_URL") or environ.get("E2B_API_URL") or DEFAULT_URL
    api_key = api_key or environ.get("AENV_API_KEY") or environ.get("E2B_API_KEY")
    if not api_key:
        home = environ.get("AENV_HOME_PATH") or environ.get("AENV_PATHS_HOME")
        key_file = Path(home) / "secrets/api-key" if home else DEFAULT_KEY_FILE
        try:
            api_key = key_file.read_text().strip()
        except OSError as error:
            raise CliError(
                f"no API key: {key_file} cannot be read ({error.strerror})",
                hint="set AENV_API_KEY, or AENV_HOME_PATH to the home of the server, or run as the user that runs it",
            ) from error
    if not (api_key.isascii() and api_key.isprintable()):
        raise CliError("the API key has characters that no key has", hint="see AENV_API_KEY", code=USAGE)
    return Target(url.rstrip("/"), api_key)


class Client:
    """One server. Every failure is a `CliError` that says what was asked and what the server said."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._agents: list[SandboxClient] = []
        with self._translated():
            self._http = httpx.Client(base_url=target.url, headers={"X-API-Key": target.api_key}, timeout=TIMEOUT)

    def close(self) -> None:
        """Close the connections, those to sandboxes too."""
        for agent in self._agents:
            agent.close()
        self._http.close()

    def call(self, method: str, *segments: str, **arguments: Any) -> Any:
        """Return the JSON body of a successful answer, or None where there is none. For *segments* see `path_of`."""
        path = path_of(*segments)
        with self._translated():
            answer = self._http.request(method, path, **arguments)
        try:
            _raise_for(answer.status_code, answer.content)
        except CliError as error:
            if error.status == 404:
                error.hint = error.hint or self._whole_id(segments)
            raise
        return self._parsed(answer) if answer.content else None

    def call_running(self, method: str, sandbox_id: str, verb: str, **arguments: Any) -> Any:
        """`call` of what only a running sandbox does; where it is paused or in error, the hint is what helps then."""
        try:
            return self.call(method, "sandboxes", sandbox_id, verb, **arguments)
        except CliError as error:
            if error.status == 409:
                with suppress(CliError):  # what it was asked for matters more than why the state is not known
                    detail = self.call("GET", "sandboxes", sandbox_id)
                    exact = detail.get("lifecycleState") or detail.get("state")
                    helps = {"paused": f"aenv resume {sandbox_id}", "error": f"aenv delete {sandbox_id}"}
                    error.hint = helps.get(exact, error.hint)
            raise

    def pages(
        self, *segments: str, params: dict[str, str] | None = None, timeout: httpx.Timeout = TIMEOUT
    ) -> list[Any]:
        """Every item of a paginated list."""
        path = path_of(*segments)
        items: list[Any] = []
        token: str | None = None
        while True:
            asked = {**(params or {}), **({"nextToken": token} if token else {})}
            with self._translated():
                answer = self._http.get(path, params=asked, timeout=timeout)
            _raise_for(answer.status_code, answer.content)
            items += self._parsed(answer)
            token = answer.headers.get("x-next-token")
            if not token:
                return items

    @contextmanager
    def stream(self, method: str, *segments: str, **arguments: Any) -> Iterator[httpx.Response]:
        """A successful answer whose body is read as it comes."""
        path = path_of(*segments)
        patient = httpx.Timeout(10.0, read=None)
        with self._translated(), self._http.stream(method, path, timeout=patient, **arguments) as answer:
            if answer.status_code >= 300:
                _raise_for(answer.status_code, answer.read())
            yield answer

    def sandbox(self, sandbox_id: str) -> "SandboxClient":
        """The agent of one sandbox, with the token the server gives for it."""
        detail = self.call("GET", "sandboxes", sandbox_id)
        if detail.get("lifecycleState") == "error":
            reason = (detail.get("error") or {}).get("reason") or "no reason given"
            raise CliError(f"the sandbox is in error: {reason}", hint=f"aenv delete {sandbox_id}")
        if detail.get("state") == "paused" and not (detail.get("lifecycle") or {}).get("autoResume"):
            raise CliError("the sandbox is paused", hint=f"aenv resume {sandbox_id}")
        agent = SandboxClient(self.target.url, sandbox_id, detail.get("envdAccessToken"))
        self._agents.append(agent)
        return agent

    def _whole_id(self, segments: tuple[str, ...]) -> str | None:
        """A hint where what was not found was asked for by a part of its id."""
        with suppress(CliError):  # what was asked for matters more than why no hint can be given
            match segments:
                case ("sandboxes", given, *_) | ("v2", "sandboxes", given, *_) if may_be_part(given):
                    return whole_id(given, (one["sandboxID"] for one in self.pages("v2", "sandboxes")), "aenv ls")
                case ("templates", given) if may_be_part(given):
                    found = [one["templateID"] for one in self.pages("v2", "templates")]
                    found += [one["snapshotID"] for one in self.pages("snapshots")]
                    return whole_id(given, found, "aenv template list")
        return None

    def _parsed(self, answer: httpx.Response) -> Any:
        try:
            return answer.json()
        except ValueError as error:
            raise CliError(f"what answers at {self.target.url} is not AgentENV", hint="see AENV_API_URL") from error

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise CliError(
                f"no server answers at {self.target.url}",
                hint="start one with `aenv server`, or set AENV_API_URL",
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CliError(f"{self.target.url}: {str(error) or type(error).__name__}") from error


class SandboxClient:
    """Calls to a sandbox's agent through the proxy."""

    def __init__(self, url: str, sandbox_id: str, access_token: str | None) -> None:
        headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(AGENT_PORT)}
        if access_token:
            headers["X-Access-Token"] = access_token
        self.sandbox_id = sandbox_id
        self._http = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(60.0, read=None))

    def close(self) -> None:
        self._http.close()

    def unary(self, service: str, message: dict[str, Any]) -> Any:
        try:
            answer = self._http.post(f"/{service}", json=message, timeout=60.0)
        except httpx.HTTPError as error:
            raise CliError(f"the sandbox went away: {str(error) or type(error).__name__}") from error
        _raise_for(answer.status_code, answer.content)
        return answer.json() if answer.content else {}

    def stream(self, service: str, message: dict[str, Any], *, user: str | None = None) -> Iterator[Frame]:
        """Frames of a server stream, the last one included; an error in it is raised."""
        auth = httpx.BasicAuth(user, "") if user else None
        reader = FrameReader()
        try:
            with self._http.stream(
                "POST",
                f"/{service}",
                content=encode_frame(message),
                headers={"Content-Type": STREAM_TYPE, "Keepalive-Ping-Interval": "50"},
                auth=auth or httpx.USE_CLIENT_DEFAULT,
            ) as answer:
                if answer.status_code != 200:
                    _raise_for(answer.status_code, answer.read())
                for data in answer.iter_raw():
                    for frame in reader.feed(data):
                        if frame.end and (error := frame.message.get("error")):
                            raise CliError(
                                error.get("message") or error.get("code", "the command failed"),
                                code=STREAM_EXIT_CODES.get(error.get("code"), 1),
                            )
                        yield frame
                        if frame.end:
                            return
        except httpx.HTTPError as error:
            raise CliError(f"the sandbox went away: {str(error) or type(error).__name__}") from error
        raise CliError("the sandbox went away in the middle of the command")


def told(error: dict[str, Any]) -> tuple[str, str | None]:
    """The message and the hint of an *error* of the server.

    A hint is a field, the end of the message, or both; it is shown once.
    """
    message, hint = str(error["message"]), error.get("hint")
    if not hint:
        return message, None
    return message.removesuffix(f"; {hint}"), str(hint)


def _raise_for(status: int, body: bytes) -> None:
    if status < 300:
        return
    try:
        message, hint = told(json.loads(body))
    except (ValueError, KeyError, TypeError):
        message, hint = body[:500].decode(errors="replace") or "no reason given", None
    if status == 401:
        hint = hint or "is this the server's key? see AENV_API_KEY"
    raise CliError(f"{message} ({status})", hint=hint, status=status)
