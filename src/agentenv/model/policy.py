"""What a sandbox may reach and who may reach it."""

from dataclasses import dataclass
from ipaddress import IPv4Network


@dataclass(frozen=True, slots=True)
class EgressPolicy:
    """What a sandbox may reach. *allow_out* wins over *deny_out*.

    ``allow_internet`` None means that the caller said nothing: the default
    (reach the internet, no private range) applies and is shown as null.
    """

    allow_internet: bool | None = None
    allow_out: tuple[IPv4Network, ...] = ()
    deny_out: tuple[IPv4Network, ...] = ()


@dataclass(frozen=True, slots=True)
class IngressPolicy:
    """Who may reach the ports of a sandbox through the proxy.

    With ``allow_public_traffic`` False a request to an application port must
    carry the sandbox's traffic token; the guest agent's port has its own token.
    """

    allow_public_traffic: bool = True
    mask_request_host: str | None = None  # Host header given to the guest; ${PORT} is replaced
