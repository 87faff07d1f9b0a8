"""From the index of a slot to every name and address it has, and back.

Nothing here touches the host. Two servers whose prefixes and ranges differ never
share a name or an address, so they can live side by side.
"""

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Final

from agentenv.model.errors import NotFound
from agentenv.network.contract import Slot
from agentenv.network.settings import NetworkSettings

UPLINK_NAME: Final = "up0"  # the slot's end of its link to the host
_MOST_DIGITS: Final = 5


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Everything that belongs to one slot."""

    index: int
    link: str  # host end of the veth pair
    netns: Path
    address: IPv4Address  # stands for the guest, on the host
    host_end: IPv4Address  # the host as seen from the slot
    slot_end: IPv4Address
    host_mac: str
    slot_mac: str

    def held_by(self, owner: str) -> Slot:
        """What the contract tells of it while *owner* holds it."""
        return Slot(index=self.index, address=self.address, netns=self.netns, owner=owner)


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """Everything that belongs to one server's network. Indexes go from 1 to *capacity*."""

    prefix: str
    addresses: IPv4Network
    links: IPv4Network
    capacity: int
    dns_address: IPv4Address
    dns_port: int
    dns_link: str
    netns_dir: Path

    @property
    def table(self) -> str:
        """Name of the nftables table on the host."""
        return self.prefix

    @property
    def link_pattern(self) -> str:
        """What nftables matches the host ends of all slots with."""
        return f"{self.prefix}-*"

    def slot(self, index: int) -> SlotPlan:
        """Raises `NotFound` for an index that this server cannot have."""
        if not 1 <= index <= self.capacity:
            raise NotFound(f"there is no network slot {index}", hint=f"indexes go from 1 to {self.capacity}")
        name = f"{self.prefix}-{index}"
        tail = ":".join(f"{byte:02x}" for byte in index.to_bytes(3, "big"))
        return SlotPlan(
            index=index,
            link=name,
            netns=self.netns_dir / name,
            address=self.addresses.network_address + index,
            host_end=self.links.network_address + 2 * index,
            slot_end=self.links.network_address + 2 * index + 1,
            host_mac=f"02:ae:01:{tail}",
            slot_mac=f"02:ae:02:{tail}",
        )

    def index_of_address(self, address: IPv4Address) -> int | None:
        """The slot whose guest *address* stands for."""
        index = int(address) - int(self.addresses.network_address)
        return index if 1 <= index <= self.capacity else None

    def index_of_name(self, name: str) -> int | None:
        """The slot that a link or a namespace called *name* belongs to, if it is one of ours.

        Also for an index beyond the capacity: a server that had wider ranges may have left it.
        """
        match = re.fullmatch(rf"{re.escape(self.prefix)}-([1-9][0-9]{{0,{_MOST_DIGITS - 1}}})", name)
        return int(match[1]) if match else None


def network_plan(settings: NetworkSettings, runtime_dir: Path) -> NetworkPlan:
    """Lay out the ranges of *settings*; namespaces are kept under ``runtime_dir/netns``."""
    most_addresses = settings.address_cidr.num_addresses - 3  # network, forwarder, broadcast
    most_links = settings.veth_cidr.num_addresses // 2 - 1  # index 0 is not used
    capacity = min(most_addresses, most_links, 10**_MOST_DIGITS - 1)
    return NetworkPlan(
        prefix=settings.name_prefix,
        addresses=settings.address_cidr,
        links=settings.veth_cidr,
        capacity=capacity,
        dns_address=settings.address_cidr.broadcast_address - 1,
        dns_port=settings.dns_port,
        dns_link=f"{settings.name_prefix}-dns",
        netns_dir=runtime_dir / "netns",
    )
