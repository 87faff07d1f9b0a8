"""Whether our ranges are free on this host, and which would be. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Final

from agentenv.model.errors import Conflict
from agentenv.network.egress import EVERYTHING

_PRIVATE: Final = tuple(
    IPv4Network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "100.64.0.0/10", "192.168.0.0/16", "198.18.0.0/15")
)
_SHORTEST_ROUTE: Final = 2  # 0.0.0.0/1 and 128.0.0.0/1 are how a VPN says "everything"


@dataclass(frozen=True, slots=True)
class InUse:
    """A range that something else on the host uses."""

    network: IPv4Network
    by: str  # "address of eth0", "route over wg0"


def check_free(wanted: Sequence[tuple[str, IPv4Network]], used: Sequence[InUse]) -> None:
    """Raise `Conflict` if a range of *wanted* (setting and value) is in use, with ranges that are not."""
    taken = [entry for entry in used if entry.network.prefixlen >= _SHORTEST_ROUTE]
    for setting, network in wanted:
        for entry in taken:
            if network.overlaps(entry.network):
                free = free_ranges([network for _, network in wanted], [entry.network for entry in taken])
                advice = " and ".join(f"{name} {choice}" for (name, _), choice in zip(wanted, free, strict=False))
                raise Conflict(
                    f"network {setting} {network} overlaps {entry.network}, {entry.by} of this host",
                    hint=f"these are free here: {advice}" if len(free) == len(wanted) else "choose other ranges",
                )


def free_ranges(wanted: Sequence[IPv4Network], used: Iterable[IPv4Network]) -> list[IPv4Network]:
    """As many private ranges of the wanted sizes as there are, none overlapping another or *used*."""
    taken = [network for network in used if network != EVERYTHING]
    found: list[IPv4Network] = []
    for size in wanted:
        choices = (_first_free(private, size.prefixlen, [*taken, *found]) for private in _PRIVATE)
        if (choice := next((choice for choice in choices if choice is not None), None)) is not None:
            found.append(choice)
    return found


def _first_free(private: IPv4Network, prefix_length: int, taken: Sequence[IPv4Network]) -> IPv4Network | None:
    """The first range of that size in *private* that overlaps none of *taken*."""
    if prefix_length < private.prefixlen:
        return None
    step = 1 << 32 - prefix_length
    start = int(private.network_address)
    while start <= int(private.broadcast_address):
        choice = IPv4Network((start, prefix_length))
        in_the_way = [int(network.broadcast_address) for network in taken if network.overlaps(choice)]
        if not in_the_way:
            return choice
        start = max(max(in_the_way) // step * step, start) + step
    return None
