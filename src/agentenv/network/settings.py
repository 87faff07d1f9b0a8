"""What an operator decides about the network, checked once when it is made."""

import re
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Final

from agentenv.model.errors import Invalid

# Linux allows 15 characters in a link's name, and ours end in a dash and up to five digits.
_PREFIX: Final = re.compile(r"[a-z][a-z0-9]{0,8}")
_SMALLEST_MTU: Final = 576
_LARGEST_MTU: Final = 65_535
_LEAST_SLOTS: Final = 1

_ADDRESSES: Final = IPv4Network("10.11.0.0/16")
_LINKS: Final = IPv4Network("10.12.0.0/16")

# Everything that is not the public internet, and where one cloud keeps a service of its hosts.
ALWAYS_DENIED: Final = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's host agent answers on this public address
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
    )
)


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """How the slots of one server are made. Two servers on one host differ in prefix and both ranges.

    Args:
        name_prefix: begins the name of every link, table and file of this server.
        address_cidr: where slots have the address the host reaches their guest at.
        veth_cidr: where the two ends of each slot's link to the host have theirs.
        warm_low: fewer free slots than this and more are made, ahead of need.
        warm_high: how many free slots there are once more have been made.
        max_slots: most slots at a time, free ones too; None for all that the ranges hold.
        always_denied: what no sandbox reaches whatever its policy says. Multicast,
            broadcast and this server's own ranges are denied in any case.
        allow_private: parts of *always_denied* that sandboxes may reach all the same,
            as they may reach the internet (say, a package mirror in a private range).
        dns_upstreams: resolvers to ask, ``address`` or ``address:port``; empty for
            those of the host's resolv.conf, read again when it changes.
        dns_port: where the forwarder listens, on an address of *address_cidr*. Not 53,
            which resolvers that listen on every address would have taken.
        dns_timeout_s: how long one question may take in all, in seconds.
        dns_in_flight: most unanswered questions at a time.
        dns_in_flight_per_slot: the same for one sandbox.
        flows_per_slot: most connections of one sandbox that the host keeps track of.
        mtu: of the links to the host, in bytes; None for that of the host's default route.

    Raises `Invalid` when a value cannot work.
    """

    name_prefix: str = "aenv"
    address_cidr: IPv4Network = _ADDRESSES
    veth_cidr: IPv4Network = _LINKS
    warm_low: int = 4
    warm_high: int = 16
    max_slots: int | None = None
    always_denied: tuple[IPv4Network, ...] = ALWAYS_DENIED
    allow_private: tuple[IPv4Network, ...] = ()
    dns_upstreams: tuple[str, ...] = ()
    dns_port: int = 10_053
    dns_timeout_s: float = 5.0
    dns_in_flight: int = 2048
    dns_in_flight_per_slot: int = 128
    flows_per_slot: int = 8192
    mtu: int | None = None

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.name_prefix):
            raise Invalid(
                f"network name_prefix {self.name_prefix!r} cannot begin the name of a link",
                hint="use a letter and up to eight more letters or digits, all lower case",
            )
        if self.address_cidr.overlaps(self.veth_cidr):
            raise Invalid(f"network address_cidr {self.address_cidr} and veth_cidr {self.veth_cidr} overlap")
        for name, cidr, shortest in (("address_cidr", self.address_cidr, 29), ("veth_cidr", self.veth_cidr, 29)):
            if cidr.prefixlen > shortest:
                raise Invalid(f"network {name} {cidr} is too small", hint=f"use a prefix of /{shortest} or shorter")
        if not 0 <= self.warm_low <= self.warm_high:
            raise Invalid(f"network warm_low {self.warm_low} and warm_high {self.warm_high} are not 0 <= low <= high")
        for name, value, least, most in (
            ("max_slots", self.max_slots, _LEAST_SLOTS, None),
            ("dns_port", self.dns_port, 1, 65_535),
            ("dns_in_flight", self.dns_in_flight, 1, None),
            ("dns_in_flight_per_slot", self.dns_in_flight_per_slot, 1, None),
            ("flows_per_slot", self.flows_per_slot, 16, None),
            ("mtu", self.mtu, _SMALLEST_MTU, _LARGEST_MTU),
        ):
            if value is not None and (value < least or (most is not None and value > most)):
                raise Invalid(f"network {name} is {value}, outside {least} to {'any' if most is None else most}")
        if not 0 < self.dns_timeout_s <= 60:
            raise Invalid(f"network dns_timeout_s is {self.dns_timeout_s}, outside 0 to 60 s")
