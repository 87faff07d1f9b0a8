"""What an operator decides about the network, checked once when it is made."""

from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Final

from agentenv.config.fields import check
from agentenv.config.schema import Network
from agentenv.model.errors import Invalid

_NETWORK: Final = Network()

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

    name_prefix: str = _NETWORK.name_prefix
    address_cidr: IPv4Network = _NETWORK.address_cidr
    veth_cidr: IPv4Network = _NETWORK.veth_cidr
    warm_low: int = _NETWORK.warm_low
    warm_high: int = _NETWORK.warm_high
    max_slots: int | None = _NETWORK.max_slots
    always_denied: tuple[IPv4Network, ...] = ALWAYS_DENIED
    allow_private: tuple[IPv4Network, ...] = _NETWORK.allow_private
    dns_upstreams: tuple[str, ...] = _NETWORK.dns_upstreams
    dns_port: int = _NETWORK.dns_port
    dns_timeout_s: float = _NETWORK.dns_timeout_s
    dns_in_flight: int = _NETWORK.dns_in_flight
    dns_in_flight_per_slot: int = _NETWORK.dns_in_flight_per_slot
    flows_per_slot: int = _NETWORK.flows_per_slot
    mtu: int | None = _NETWORK.mtu

    def __post_init__(self) -> None:
        check("network", {name: getattr(self, name) for name in Network.model_fields})
        if self.address_cidr.overlaps(self.veth_cidr):
            raise Invalid(f"network address_cidr {self.address_cidr} and veth_cidr {self.veth_cidr} overlap")
        for name, cidr, shortest in (("address_cidr", self.address_cidr, 29), ("veth_cidr", self.veth_cidr, 29)):
            if cidr.prefixlen > shortest:
                raise Invalid(f"network {name} {cidr} is too small", hint=f"use a prefix of /{shortest} or shorter")
        if self.warm_low > self.warm_high:
            raise Invalid(f"network warm_low {self.warm_low} and warm_high {self.warm_high} are not low <= high")
