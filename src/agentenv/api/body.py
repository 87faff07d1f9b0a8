"""Request bodies: bytes from a client become one checked value, or a 4xx that says what is wrong and where.

JSON is read more strictly than by default, because lax readers disagree about the
same bytes: no duplicate keys, no NaN or Infinity, UTF-8 only, bounded in size, depth
and the time it takes to arrive.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from agentenv.api.errors import HttpError
from agentenv.api.settings import ApiSettings
from agentenv.model.errors import Invalid

MAX_DEPTH: Final = 32
DRAIN_BYTES: Final = 16 << 20
_SHOWN: Final = 80  # characters of what a client sent that an error repeats

UNSUPPORTED: Final = "agentenv_unsupported"


class Wire(BaseModel):
    """Base of request bodies: exact types, no unknown fields, names as on the wire."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


M = TypeVar("M", bound=Wire)


async def read_body(request: Request, settings: ApiSettings) -> bytes:
    """The whole body. Raises `HttpError`: 413 too long, 408 too slow, 415 compressed.

    A body somewhat too long is read to its end and thrown away: closing early would
    reset the connection, and the client would never see why.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise HttpError(415, "unsupported_encoding", f"a {encoding[:_SHOWN]!r} encoded body is not accepted")
    limit = settings.max_body_bytes
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit + DRAIN_BYTES:
        raise _too_long(limit, close=True)
    kept: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    kept.append(chunk)
                elif size > limit + DRAIN_BYTES:
                    raise _too_long(limit, close=True)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_timeout_s:g} s"
        raise HttpError(408, "body_timeout", message, headers={"Connection": "close"}) from None
    if size > limit:
        raise _too_long(limit, close=False)
    return b"".join(kept)


def parse_body(model: type[M], raw: bytes, *, required: bool = True) -> M:
    """*raw* as a checked *model*; an absent body is ``{}`` unless *required*. Raises `Invalid` naming the field."""
    if not raw and required:
        raise Invalid("the request needs a JSON body")
    document = parse_json(raw) if raw else {}
    if not isinstance(document, dict):
        raise Invalid("the body must be a JSON object")
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise explain(error.errors(include_url=False, include_input=False)) from None


def explain(details: Sequence[ErrorDetails], what: str = "field") -> Invalid | HttpError:
    """The error that tells a client of the first of *details*, and how many more there are. A *what* is one input."""
    first = details[0]
    where = ".".join(str(part) for part in first["loc"])[:_SHOWN]
    match first["type"]:
        case "extra_forbidden":
            message = f"unknown {what} {where!r}"
        case "missing":
            message = f"{where} is required"
        case "string_pattern_mismatch":
            message = f"{where}: has characters that are not allowed here"
        case _:
            message = f"{where}: {first['msg']}"
    if len(details) > 1:
        message += f" (and {len(details) - 1} more)"
    if first["type"] == UNSUPPORTED:
        return HttpError(400, "unsupported", message)
    return Invalid(message)


def parse_json(raw: bytes) -> object:
    """*raw* as JSON. Raises `Invalid`."""
    try:
        document: object = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_float=_finite,
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError:
        raise Invalid("the body is not UTF-8") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # also an integer of thousands of digits
        raise Invalid(f"the body is not valid JSON: {str(error)[:_SHOWN]}") from None
    _check(document)
    return document


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise Invalid(f"duplicate key {twice[:_SHOWN]!r}")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Invalid(f"{text[:_SHOWN]} is out of range")
    return value


def _refuse_constant(text: str) -> float:
    raise Invalid(f"{text} is not JSON")


def _check(document: object) -> None:
    """Refuse deep nesting, and strings that no encoder could write (a lone ``\\ud800``)."""
    level: list[object] = [document]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for value in level:
            if isinstance(value, str):
                _check_text(value)
            elif isinstance(value, dict):
                for key in value:
                    _check_text(key)
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
        if not below:
            return
        level = below
    raise _too_deep()


def _check_text(text: str) -> None:
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise Invalid("the body has a string with half of a surrogate pair")


def _too_deep() -> Invalid:
    return Invalid(f"the body is nested more than {MAX_DEPTH} levels deep")


def _too_long(limit: int, *, close: bool) -> HttpError:
    headers = {"Connection": "close"} if close else {}
    return HttpError(413, "body_too_large", f"the body is longer than {limit} bytes", headers=headers)
