"""The types of single fields on the wire, with their limits: each is checked here and nowhere below.

A field of E2B that this release does not have is accepted while it is empty or at its
default, and refused as unsupported as soon as it would have to change something.
"""

import re
from collections.abc import Callable
from ipaddress import IPv4Network, IPv6Network
from typing import Annotated, Any, Final, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

from agentenv.api.body import UNSUPPORTED
from agentenv.model.errors import Invalid
from agentenv.model.ids import parse_name
from agentenv.model.limits import MAX_TIMEOUT_S

MAX_REFRESH_S: Final = 3600
MAX_DESTINATIONS: Final = 512

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
REFERENCE: Final = re.compile(rf"(?:{_NAME}/)?(?P<name>{_NAME})(?::(?P<tag>{_NAME}))?")
_DOTTED: Final = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?:/[0-9]{1,2})?")
_DOMAIN: Final = re.compile(r"(?:\*\.)?[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\.?")
_MASK: Final = re.compile(r"[A-Za-z0-9._-]{1,253}(?::[0-9]{1,5})?")


def _reference(value: str) -> str:
    if not REFERENCE.fullmatch(value):
        raise PydanticCustomError("reference", "must be the id or name of a template: name, name:tag or namespace/name")
    return value


def _snapshot_name(value: str) -> str:
    """The bare name: a namespace says nothing on a server with one tenant, and `default` is the only tag."""
    match = REFERENCE.fullmatch(value)
    if match is None:
        raise PydanticCustomError("name", "must be letters, digits, dots, underscores and hyphens, 128 at most")
    if match["tag"] not in (None, "default"):
        raise PydanticCustomError(UNSUPPORTED, "tags other than 'default' are not supported")
    try:
        return parse_name(match["name"])
    except Invalid as error:
        raise PydanticCustomError("name", "{why}", {"why": error.message}) from None


def _destination(value: object) -> IPv4Network:
    if not isinstance(value, str):
        raise PydanticCustomError("destination", "must be a string")
    if _DOTTED.fullmatch(value):
        try:
            return IPv4Network(value, strict=False)
        except ValueError:
            raise PydanticCustomError("destination", "is not an IPv4 address or CIDR block") from None
    if ":" in value and _is_ipv6(value):
        raise PydanticCustomError("destination", "IPv6 is not supported: sandboxes reach IPv4 only")
    if _DOMAIN.fullmatch(value):
        raise PydanticCustomError("destination", "domain names are not supported; give IPv4 addresses or CIDR blocks")
    raise PydanticCustomError("destination", "is not an IPv4 address or CIDR block")


def _is_ipv6(value: str) -> bool:
    try:
        IPv6Network(value, strict=False)
    except ValueError:
        return False
    return True


def _mask(value: str) -> str:
    if not _MASK.fullmatch(value.replace("${PORT}", "0")):
        raise PydanticCustomError("mask", "must be a host, with an optional port; ${PORT} stands for the port")
    return value


def _refuse(what: str, *, unless: Callable[[Any], bool]) -> AfterValidator:
    def check(value: object) -> object:
        if not unless(value):
            raise PydanticCustomError(UNSUPPORTED, "{what} not supported by this server", {"what": what})
        return value

    return AfterValidator(check)


def _is_empty(value: object) -> bool:
    return not value


Timeout: TypeAlias = Annotated[
    int, Field(ge=1, le=MAX_TIMEOUT_S, description="Time to live from now, in seconds.", examples=[300])
]
Reference: TypeAlias = Annotated[
    str,
    Field(
        max_length=400, examples=["base"], json_schema_extra={"pattern": f"^{REFERENCE.pattern}$".replace("?P", "?")}
    ),
    AfterValidator(_reference),
]
SnapshotName: TypeAlias = Annotated[
    str,
    Field(min_length=1, max_length=400, examples=["after-install"]),
    AfterValidator(_snapshot_name),
]

# A NUL ends a string in C: what is after it would be lost on the way into a guest, or smuggled past a check.
_Text: TypeAlias = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00]*$")]
_Key: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]
_EnvName: TypeAlias = Annotated[str, StringConstraints(max_length=256, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
_EnvValue: TypeAlias = Annotated[str, StringConstraints(max_length=65536, pattern=r"^[^\x00]*$")]
Metadata: TypeAlias = Annotated[
    dict[_Key, _Text],
    Field(max_length=128, description="Labels to find the sandbox by.", examples=[{"team": "alpha"}]),
]
Environment: TypeAlias = Annotated[
    dict[_EnvName, _EnvValue],
    Field(max_length=512, description="Environment of every command.", examples=[{"LANG": "C.UTF-8"}]),
]

Destination: TypeAlias = Annotated[
    IPv4Network,
    BeforeValidator(_destination),
    WithJsonSchema({"type": "string", "description": "An IPv4 address or CIDR block.", "examples": ["8.8.8.0/24"]}),
]
Destinations: TypeAlias = Annotated[list[Destination], Field(max_length=MAX_DESTINATIONS)]
MaskHost: TypeAlias = Annotated[
    str,
    Field(max_length=255, description="Host header that the guest sees.", examples=["localhost:${PORT}"]),
    AfterValidator(_mask),
]

# What E2B has and this release has not.
MustKeepMemory: TypeAlias = Annotated[
    bool, Field(json_schema_extra={"enum": [True]}), _refuse("giving up memory is", unless=bool)
]
NoList: TypeAlias = Annotated[list[Any], Field(json_schema_extra={"maxItems": 0}), _refuse("this is", unless=_is_empty)]
NoObject: TypeAlias = Annotated[
    dict[str, Any], Field(json_schema_extra={"maxProperties": 0}), _refuse("this is", unless=_is_empty)
]
NoExtension: TypeAlias = Annotated[
    dict[str, Any],
    Field(json_schema_extra={"maxProperties": 0}),
    _refuse("no custom extension is configured: parameters are", unless=_is_empty),
]
