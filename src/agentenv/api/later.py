"""Routes of E2B and AgentENV that this release does not have.

A typed 501 says so; a 404 would read like a mistake in the address.
"""

from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

from agentenv.api.endpoints import Endpoints
from agentenv.model.errors import Unsupported

_BUILDS: Final = "images and template builds by request are not in this release"
_HINT: Final = "templates are built on the server: aenv template build"
_TAGS: Final = "tags other than 'default' are not in this release"
_PUBLIC: Final = "templates cannot be published: there is one team"
_VOLUMES: Final = "volumes are not in this release"
_SECRETS: Final = "secrets are not in this release"

ROUTES: Final[tuple[tuple[str, str, str], ...]] = (
    ("POST", "/sandboxes-cold", _BUILDS),
    ("POST", "/v3/templates", _BUILDS),
    ("POST", "/v2/templates", _BUILDS),
    ("POST", "/templates", _BUILDS),
    ("POST", "/templates/tags", _TAGS),
    ("DELETE", "/templates/tags", _TAGS),
    ("POST", "/templates/{template_id}", _BUILDS),
    ("PATCH", "/templates/{template_id}", _PUBLIC),
    ("PATCH", "/v2/templates/{template_id}", _PUBLIC),
    ("GET", "/templates/{template_id}/files/{hash}", _BUILDS),
    ("POST", "/templates/{template_id}/builds/{build_id}", _BUILDS),
    ("POST", "/v2/templates/{template_id}/builds/{build_id}", _BUILDS),
    ("GET", "/templates/{template_id}/builds/{build_id}/logs", _BUILDS),
    ("GET", "/volumes", _VOLUMES),
    ("POST", "/volumes", _VOLUMES),
    ("GET", "/volumes/{volume_id}", _VOLUMES),
    ("DELETE", "/volumes/{volume_id}", _VOLUMES),
    ("GET", "/secrets", _SECRETS),
    ("POST", "/secrets", _SECRETS),
    ("GET", "/secrets/{secret_id}", _SECRETS),
    ("POST", "/secrets/{secret_id}", _SECRETS),
    ("DELETE", "/secrets/{secret_id}", _SECRETS),
)


def declare(endpoints: Endpoints) -> None:
    for method, path, what in ROUTES:
        endpoints.add_absent(method, path, _refusal(what))


def _refusal(what: str) -> Callable[[], Awaitable[NoReturn]]:
    async def refuse() -> NoReturn:
        raise Unsupported(what, hint=_HINT if what is _BUILDS else None)

    return refuse
