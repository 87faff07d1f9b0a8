"""What the operator may set about the control API; the fixed limits of the wire are in `fields`."""

import re
from dataclasses import dataclass, field
from typing import Final

from agentenv.config.fields import check
from agentenv.config.schema import API_KEY_PATTERN, Limits, Node
from agentenv.model.errors import Invalid

_API_KEY: Final = re.compile(API_KEY_PATTERN)
_LIMITS: Final = Limits()
_NODE: Final = Node()


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """One value per server, checked when it is made.

    Args:
        api_key: what ``X-API-Key`` must be; 32 to 256 characters of ``A-Za-z0-9._~-``.
        domain: told to clients, who reach ports at ``{port}-{sandbox id}.{domain}``; may carry a port. None: they
            keep their own.
        max_body_bytes: longer request bodies are refused with 413.
        body_timeout_s: a body that takes longer to arrive is refused with 408.
        cluster_id, service_instance_id, commit: shown by ``GET /nodes``.

    Raises `Invalid` for a key or a limit that cannot be right.
    """

    api_key: str = field(repr=False)
    domain: str | None = None
    max_body_bytes: int = _LIMITS.max_body_bytes
    body_timeout_s: float = _LIMITS.body_timeout_s
    cluster_id: str = _NODE.cluster_id
    service_instance_id: str = _NODE.cluster_id
    commit: str = ""

    def __post_init__(self) -> None:
        if not _API_KEY.fullmatch(self.api_key):
            raise Invalid("the API key must be 32 to 256 letters, digits, dots, underscores, tildes and hyphens")
        check("limits", {"max_body_bytes": self.max_body_bytes, "body_timeout_s": self.body_timeout_s})
