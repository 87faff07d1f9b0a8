"""The OpenAPI document: what FastAPI makes of the routes, with what it cannot see put in.

Request bodies are read by our own parser, so their models are added here; a wrong
request is a 400 and never a 422; every parameter of a path is text.
"""

import re
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from agentenv.api import requests
from agentenv.api.body import Wire
from agentenv.api.endpoints import API_KEY_SCHEME

_MODELS: Final[tuple[type[Wire], ...]] = (
    requests.NewSandbox, requests.NewSandboxV2, requests.Connect, requests.ConnectV2, requests.Resume, requests.Pause,
    requests.SetTimeout, requests.Refresh, requests.Fork, requests.TakeSnapshot, requests.NetworkUpdate,
    requests.ExtensionParams,
)  # fmt: skip

_ABOUT: Final = """
Sandboxes, one microVM each, behind the API of E2B. Times to live are in seconds, memory and disk sizes in MiB
(`memoryMB`, `diskSizeMB`), timestamps RFC 3339 in UTC.

**Errors.** Every answer that is not a 2xx is `{"code", "message", "error_code"}`; `code` is the HTTP status. `hint` is
there as well if something can be done about it. 503 and 504 carry `Should-Retry: false` where sending the request again
could do it twice; after a 429 nothing was taken.

**Input.** Fields that are not documented are refused with 400, and so are values of the wrong type, duplicate keys and
unknown query parameters. Fields of E2B that this release lacks are accepted while they are empty.

**Time to live.** 1 second to 30 days; 15 s on the first generation of paths and 300 s on `/v2` if left out. At its end
a sandbox is killed, or paused if `autoPause` was given. Zero is refused: to end a sandbox, delete it.

**States.** `state` is `running` or `paused`, as E2B's clients expect. A sandbox is `running` from its creation on, also
while it is copied by a snapshot or a fork; it is `paused` from the beginning of a pause. One in error (its VM was lost)
counts as `paused`: it can be listed, read and deleted, everything else is a 409 with the reason. `lifecycleState` has
the exact state.

**Lists.** Newest first, by creation. `X-Next-Token` is present only if there is more; between two pages anything may be
created or deleted, and nothing is shown twice or left out.

**Creating once.** A create with an `Idempotency-Key` that was used in the last 24 hours, since the server started,
answers with the sandbox of the first; with another body it is a 422. If that sandbox has been deleted since, the key is
new again and the create makes another. Without a key, a sandbox whose client hangs up before the answer is deleted; so
are the children of a fork. An answer that was sent and is lost on the way cannot be told from one that arrived.

**Healthy pauses.** A pause with `requireHealthyGuest` asks the agent first. If it does not answer, the sandbox runs on
and the answer is a 503 with `error_code` `sandbox_snapshot_guest_agent_unresponsive`, which E2B's clients raise as
their error for it; they take every 409 of a pause to mean that it was paused already.

**Ports.** `domain` is the first of `server.domains`. Without one it is `localhost` with the server's port, if the
server listens on loopback or on every address, and null if it listens on one other address only.
""".strip()


def build_document(app: FastAPI) -> dict[str, Any]:
    """The document of *app*, as a value that is written as JSON or YAML."""
    document: dict[str, Any] = get_openapi(
        title="AgentENV", version=app.version, description=_ABOUT, routes=app.router.routes
    )
    schemas: dict[str, Any] = document["components"]["schemas"]
    _, definitions = models_json_schema(
        [(model, "validation") for model in _MODELS], by_alias=True, ref_template="#/components/schemas/{model}"
    )
    schemas.update(definitions["$defs"])
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    document["components"]["securitySchemes"] = {
        API_KEY_SCHEME: {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "Exactly once."}
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if not _says_422(operation):
                operation["responses"].pop("422", None)
            _name_path_parameters(path, operation)
    document["components"]["schemas"] = dict(sorted(schemas.items()))
    return document


def _says_422(operation: dict[str, Any]) -> bool:
    return "Idempotency" in operation["responses"].get("422", {}).get("description", "")


def _name_path_parameters(path: str, operation: dict[str, Any]) -> None:
    """Parameters that a handler takes from FastAPI are there already."""
    parameters: list[dict[str, Any]] = operation.setdefault("parameters", [])
    named = {one["name"] for one in parameters}
    parameters.extend(
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
        if name not in named
    )
    if not parameters:
        del operation["parameters"]
