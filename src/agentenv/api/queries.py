"""What may stand after the question mark, and which sandboxes it chooses.

A filter that we do not know is refused: ignored, it would choose too much, and the
next thing a client does with a list may be to delete what is in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final, Literal, Self, TypeAlias
from urllib.parse import unquote, unquote_plus

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from agentenv.api.fields import REFERENCE
from agentenv.api.paging import MAX_PAGE, Order
from agentenv.api.present import PublicState, public_state
from agentenv.model.errors import Invalid
from agentenv.model.sandbox import Sandbox

MAX_LOG_LINES: Final = 1000
MAX_METRIC_IDS: Final = 100
_MAX_PAIRS: Final = 128
_STATES: Final[tuple[PublicState, ...]] = ("running", "paused")


def _instant(value: object) -> object:
    """RFC 3339 only; a plus sign that was not escaped arrives as a space."""
    if not isinstance(value, str) or "T" not in value.upper():
        raise PydanticCustomError("instant", "must be an RFC 3339 date and time")
    return value.replace(" ", "+")


_REPEATABLE: Final = frozenset({"state", "sandbox_ids"})


async def refuse_repeats(request: Request) -> None:
    """Raises `Invalid` for a parameter given twice: one of the two would be ignored."""
    names = [name for name, _ in request.query_params.multi_items() if name not in _REPEATABLE]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise Invalid(f"query parameter {twice[:40]!r} is given more than once")


class Query(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Page(Query):
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = MAX_PAGE
    next_token: str | None = Field(None, alias="nextToken", max_length=512, description="From `X-Next-Token`.")


# Also taken when the parameter is repeated.
CommaList: TypeAlias = Annotated[list[str], WithJsonSchema({"type": "string"})]
MetadataFilter: TypeAlias = Annotated[
    str | None,
    Field(
        max_length=65536,
        description="`key=value&key2=value2`, keys and values percent-encoded, then the whole; all must match.",
        examples=["team%3Dalpha"],
    ),
]


class RunningSandboxes(Query):
    metadata: MetadataFilter = None


class Sandboxes(Page):
    metadata: MetadataFilter = None
    state: CommaList = Field([], description="`running`, `paused` or both with a comma; both if left out.")
    order: Order = Field("desc", description="By start.")
    started_after: Annotated[AwareDatetime | None, BeforeValidator(_instant)] = Field(None, alias="startedAfter")
    template: str | None = Field(None, max_length=400, description="Id or name.")


class Snapshots(Page):
    sandbox_id: str | None = Field(None, alias="sandboxID", max_length=64, description="Of which it was taken.")
    name: str | None = Field(None, max_length=400, description="A namespace and a tag are ignored.")


class Team(Query):
    team_id: str | None = Field(None, alias="teamID", max_length=256, description="Ignored: there is one team.")


class Templates(Page):
    team_id: str | None = Field(None, alias="teamID", max_length=256, description="Ignored: there is one team.")


class Cluster(Query):
    cluster_id: str | None = Field(None, alias="clusterID", max_length=256)


class Period(Query):
    start: int | None = Field(None, ge=0, le=2**53, description="Unix time in seconds.")
    end: int | None = Field(None, ge=0, le=2**53, description="Unix time in seconds.")


class SandboxIds(Query):
    sandbox_ids: CommaList = Field(description=f"With commas between; {MAX_METRIC_IDS} at most.")

    def ids(self) -> list[str]:
        ids = list(dict.fromkeys(one for part in self.sandbox_ids for one in part.split(",") if one))
        if len(ids) > MAX_METRIC_IDS:
            raise Invalid(f"sandbox_ids: {len(ids)} are more than {MAX_METRIC_IDS}")
        return ids


class LogQuery(Query):
    start: int | None = Field(None, ge=0, le=2**53, description="Unix time in milliseconds.")
    limit: Annotated[int, Field(ge=0, le=MAX_LOG_LINES)] = MAX_LOG_LINES


class LogQueryV2(Query):
    cursor: int | None = Field(None, ge=0, le=2**53, description="Unix time in milliseconds.")
    limit: Annotated[int, Field(ge=0, le=MAX_LOG_LINES)] = MAX_LOG_LINES
    direction: Literal["forward", "backward"] = "forward"
    level: Literal["debug", "info", "warn", "error"] | None = Field(None, description="This one or worse.")
    search: str | None = Field(None, max_length=256, description="Text that the message contains.")


@dataclass(frozen=True, slots=True)
class SandboxFilter:
    """Chooses sandboxes; what is left at its default chooses all."""

    states: frozenset[PublicState] = frozenset(_STATES)
    metadata: tuple[tuple[str, str], ...] = ()
    started_after: datetime | None = None
    template: str | None = None
    template_id: str | None = None  # what `template` resolves to today, if it does

    @classmethod
    def running(cls, query: RunningSandboxes) -> Self:
        return cls(states=frozenset({"running"}), metadata=tuple(decode_metadata(query.metadata).items()))

    @classmethod
    def of(cls, query: Sandboxes, template_id: str | None) -> Self:
        return cls(
            states=parse_states(query.state),
            metadata=tuple(decode_metadata(query.metadata).items()),
            started_after=query.started_after,
            template=query.template,
            template_id=template_id,
        )

    def matches(self, sandbox: Sandbox) -> bool:
        return (
            public_state(sandbox.state) in self.states
            and all(sandbox.metadata.get(key) == value for key, value in self.metadata)
            and (self.started_after is None or sandbox.created_at > self.started_after)
            and (self.template is None or self._is_from(self.template, sandbox))
        )

    def _is_from(self, template: str, sandbox: Sandbox) -> bool:
        """By name too: the template may have been deleted since, or its name moved on."""
        return sandbox.template_id in (template, self.template_id) or sandbox.template_name == bare_name(template)


def parse_states(parts: list[str]) -> frozenset[PublicState]:
    """``["running,paused"]`` as states; all of them for nothing. Raises `Invalid`."""
    named = [name.strip() for part in parts for name in part.split(",") if name.strip()]
    for name in named:
        if name not in _STATES:
            raise Invalid(f"state: {name[:40]!r} is neither 'running' nor 'paused'")
    return frozenset(state for state in _STATES if state in named) or frozenset(_STATES)


def decode_metadata(text: str | None) -> Mapping[str, str]:
    """The pairs of a metadata filter. Raises `Invalid`.

    E2B's clients escape keys and values once more than a query string needs, others
    do not. Undoing it once too often changes nothing unless a value has a percent sign.
    """
    pairs: dict[str, str] = {}
    for part in (text or "").split("&"):
        if not part:
            continue
        key, _, value = part.partition("=")
        key, value = unquote(unquote_plus(key)), unquote(unquote_plus(value))
        if pairs.setdefault(key, value) != value:
            raise Invalid(f"metadata: {key[:40]!r} is asked to have two values")
        if len(pairs) > _MAX_PAIRS:
            raise Invalid(f"metadata: more than {_MAX_PAIRS} pairs")
    return pairs


def bare_name(reference: str) -> str:
    """Without the namespace before a slash and the tag after a colon."""
    match = REFERENCE.fullmatch(reference)
    return match["name"] if match is not None else reference
