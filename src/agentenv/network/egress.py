"""What an egress policy means, as sets of addresses. The rules in `rules.py` follow from this.

Order, first match decides: what is denied to all, what the policy allows, what it
denies, and then the internet or nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network, collapse_addresses
from typing import Final

from agentenv.model.errors import Invalid
from agentenv.model.policy import EgressPolicy

EVERYTHING: Final = IPv4Network("0.0.0.0/0")
MOST_RANGES: Final = 1024  # of one policy: every thousand take the kernel and the library some 10 ms

# Not an operator's choice: groups, reserved addresses and the broadcast address are never one machine.
_NEVER_UNICAST: Final = IPv4Network("224.0.0.0/3")


@dataclass(frozen=True, slots=True)
class Egress:
    """A policy with everything decided: disjoint, sorted ranges; ``deny`` does not matter when ``closed``."""

    allow: tuple[IPv4Network, ...]
    deny: tuple[IPv4Network, ...]
    closed: bool  # nothing but `allow`
    dns: bool


def compile_policy(policy: EgressPolicy) -> Egress:
    """Decide *policy*. A closed sandbox resolves no names either: a question can carry data out.

    Raises `Invalid` for a policy with more ranges than the firewall is given.
    """
    if (count := len(policy.allow_out) + len(policy.deny_out)) > MOST_RANGES:
        raise Invalid(f"an egress policy of {count} ranges is too long", hint=f"{MOST_RANGES} are allowed")
    allow = tuple(collapse_addresses(policy.allow_out))
    deny = tuple(collapse_addresses(policy.deny_out))
    closed = policy.allow_internet is False or deny == (EVERYTHING,)
    return Egress(allow=allow, deny=deny, closed=closed, dns=not closed or bool(allow))


def denied_to_all(
    always_denied: Iterable[IPv4Network], allow_private: Iterable[IPv4Network], own: Iterable[IPv4Network]
) -> tuple[IPv4Network, ...]:
    """*always_denied* without *allow_private*, with *own* and what is never one machine's address."""
    denied = list(collapse_addresses(always_denied))
    for opening in allow_private:
        denied = [rest for network in denied for rest in _without(network, opening)]
    return tuple(collapse_addresses([*denied, *own, _NEVER_UNICAST]))


def _without(network: IPv4Network, opening: IPv4Network) -> Iterable[IPv4Network]:
    if network.subnet_of(opening):
        return ()
    if opening.subnet_of(network):
        return network.address_exclude(opening)
    return (network,)
