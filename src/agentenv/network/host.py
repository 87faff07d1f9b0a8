"""The host's side of the network: what all slots share. Blocking: for a `NamespaceThread`.

A table of rules, the address of the name forwarder, forwarding between links, and
a route that makes addresses of slots that do not exist unreachable, so that nothing
meant for a sandbox ever leaves by the host's default route.
"""

import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final

import structlog

from agentenv.model.errors import Unsupported
from agentenv.network import netns, rtnl, rules, sysctl
from agentenv.network.maker import detach, explained
from agentenv.network.neighbours import OtherFirewalls
from agentenv.network.nft import Nft
from agentenv.network.plan import NetworkPlan
from agentenv.network.ranges import InUse, check_free
from agentenv.network.tap import check_tap_device

ROUTE_PROTOCOL: Final = 174  # marks our routes; assigned to nobody
STATUS: Final = Path("/proc/thread-self/status")
_LOCAL_TABLE: Final = 255
_ETHERNET_MTU: Final = 1500
_CAPABILITIES: Final = {12: "CAP_NET_ADMIN", 21: "CAP_SYS_ADMIN"}
# A bridge without ports is a link that only has an address. The dummy driver is missing from more kernels,
# and makes a link of its own when it is loaded.
_LINK_KINDS: Final = ("bridge", "dummy")

_log = structlog.get_logger(__name__)


class HostNetwork:
    """Sets up, checks and clears what slots share.

    Args:
        denied: from `egress.denied_to_all`.
        flows_per_slot: most tracked connections of one slot.
    """

    def __init__(self, plan: NetworkPlan, nft: Nft, *, denied: Sequence[IPv4Network], flows_per_slot: int) -> None:
        self._plan = plan
        self._nft = nft
        self._rules = rules.host_rules(plan, denied, flows_per_slot)
        self._others = OtherFirewalls(nft, plan.link_pattern)

    def prepare(self) -> None:
        """Make everything that is missing. Running slots notice nothing.

        Raises `Unsupported` where the host cannot do it, `Conflict` where something
        else uses the ranges.
        """
        _check_capabilities()
        check_tap_device()
        plan = self._plan
        wanted = (("address_cidr", plan.addresses), ("veth_cidr", plan.links))
        with explained("the host's network cannot be set up"), rtnl.Netlink() as netlink:
            check_free(wanted, list(_in_use(netlink, plan)))
            plan.netns_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            _forward()
            self._nft.run(self._rules)
            self._others.open()
            _drop_stale_routes(netlink, plan)
            self._route_and_address(netlink)

    def converge(self) -> bool:
        """Put back what others have taken away (a firewall that was restarted); tell whether rules were missing."""
        with explained("the host's network cannot be checked"), rtnl.Netlink() as netlink:
            listing = json.loads(self._nft.read("list tables"))["nftables"]
            tables = {(entry["table"]["family"], entry["table"]["name"]) for entry in listing if "table" in entry}
            missing = ("inet", self._plan.table) not in tables
            if missing:
                self._nft.run(self._rules)
                _log.warning("firewall table %s was gone and is back: something flushed all rules", self._plan.table)
            self._others.open()
            _forward()
            self._route_and_address(netlink)
        return missing

    def flows(self) -> "HostFlows":
        """How full the host's connection tracking is."""
        return HostFlows(
            int(sysctl.read("netfilter/nf_conntrack_count") or 0), int(sysctl.read("netfilter/nf_conntrack_max") or 0)
        )

    def clear(self) -> None:
        """Remove all that `prepare` made, but for forwarding, which others may rely on by now."""
        plan = self._plan
        with explained("the host's network cannot be cleared"), rtnl.Netlink() as netlink:
            if rtnl.link_index(plan.dns_link) is not None:
                netlink.do(rtnl.delete_link(plan.dns_link))
            ours = {plan.addresses, plan.links}
            for network in _our_routes(netlink) & ours:
                netlink.do(rtnl.delete_unreachable_route(network, ROUTE_PROTOCOL))
            self._nft.run(rules.remove_table(plan.table))
            self._others.close()

    def _route_and_address(self, netlink: rtnl.Netlink) -> None:
        for network in (self._plan.addresses, self._plan.links):
            netlink.do(rtnl.unreachable_route(network, ROUTE_PROTOCOL))
        _make_forwarder_link(netlink, self._plan)

    def mtu(self) -> int:
        """The least MTU of the host's default routes, in bytes; that of Ethernet at most."""
        with rtnl.Netlink() as netlink:
            links = {link["index"]: int(link.get_attr("IFLA_MTU")) for link in netlink.dump(rtnl.all_links())}
            routes = netlink.dump(rtnl.all_routes())
        uplinks = {route.get_attr("RTA_OIF") for route in routes if route["dst_len"] == 0}
        return min([_ETHERNET_MTU, *(links[uplink] for uplink in uplinks if uplink in links)])

    def leftovers(self) -> "Leftovers":
        """What there is on the host under our prefix and in our folder of namespaces."""
        with rtnl.Netlink() as netlink:
            names = [str(link.get_attr("IFLA_IFNAME")) for link in netlink.dump(rtnl.all_links())]
        indexes: set[int] = set()
        links, files = [], []
        for name in names:
            if (index := self._plan.index_of_name(name)) is not None:
                indexes.add(index)
                if index > self._plan.capacity:
                    links.append(name)
        for path in self._plan.netns_dir.iterdir() if self._plan.netns_dir.exists() else ():
            index = self._plan.index_of_name(path.name)
            if index is not None and index <= self._plan.capacity:
                indexes.add(index)
            else:
                files.append(path)
        slots = frozenset(index for index in indexes if index <= self._plan.capacity)
        return Leftovers(slots, tuple(files), tuple(links))


@dataclass(frozen=True, slots=True)
class HostFlows:
    """Connections that the host keeps track of, of everybody, and the most it can. Full, it drops new ones."""

    tracked: int
    most: int


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Slots by index, and what no index leads to: a server with another prefix or wider ranges left it here."""

    slots: frozenset[int]
    files: tuple[Path, ...]
    links: tuple[str, ...]

    def remove_strangers(self) -> int:
        """Remove `files` and `links`; return how many files there were. Raises an error kind."""
        with explained("the leftovers of an earlier server cannot be removed"):
            for path in self.files:
                if netns.is_kept(path) or stat.S_ISREG(path.lstat().st_mode):
                    netns.remove(path)
            detach(self.links)
        return len(self.files)


def _check_capabilities() -> None:
    text = STATUS.read_text()
    effective = next(int(line.split()[1], 16) for line in text.splitlines() if line.startswith("CapEff:"))
    if missing := [name for bit, name in _CAPABILITIES.items() if not effective >> bit & 1]:
        raise Unsupported(
            f"sandbox networks cannot be made without {' and '.join(missing)}",
            hint=f"run the server as root, or give it these capabilities (it runs as user {os.geteuid()})",
        )


def _forward() -> None:
    if sysctl.read("ipv4/ip_forward") == "1":
        return
    try:
        sysctl.write("ipv4/ip_forward", "1")
    except OSError as error:
        raise Unsupported(
            f"this host does not forward packets, and that cannot be changed: {error.strerror}",
            hint="set net.ipv4.ip_forward=1 on the host (a container has to be given it)",
        ) from error
    _log.warning("net.ipv4.ip_forward was off and is on now: sandboxes reach the internet through this host")


def _make_forwarder_link(netlink: rtnl.Netlink, plan: NetworkPlan) -> None:
    failure: OSError | None = None
    for kind in _LINK_KINDS:
        if rtnl.link_index(plan.dns_link) is not None:
            break
        try:
            netlink.do(rtnl.new_link(plan.dns_link, kind))
        except OSError as error:
            failure = error
    if (link := rtnl.link_index(plan.dns_link)) is None:
        raise Unsupported(
            f"no link for the name forwarder can be made: {failure}", hint="load the kernel module bridge or dummy"
        )
    sysctl.write_if_known(f"ipv6/conf/{plan.dns_link}/disable_ipv6", "1")
    netlink.do(rtnl.set_up(link), rtnl.address(link, plan.dns_address, 32))


def _in_use(netlink: rtnl.Netlink, plan: NetworkPlan) -> Iterator[InUse]:
    names = {link["index"]: str(link.get_attr("IFLA_IFNAME")) for link in netlink.dump(rtnl.all_links())}
    ours = {index for index, name in names.items() if name == plan.dns_link or plan.index_of_name(name) is not None}
    for address in netlink.dump(rtnl.all_addresses()):
        if address["index"] not in ours:
            network = IPv4Network((address.get_attr("IFA_ADDRESS"), address["prefixlen"]), strict=False)
            yield InUse(network, f"an address of {names.get(address['index'], '?')}")
    for route in netlink.dump(rtnl.all_routes()):
        link = route.get_attr("RTA_OIF")
        if _table(route) != _LOCAL_TABLE and link not in ours and route["proto"] != ROUTE_PROTOCOL:
            yield InUse(_destination(route), f"a route over {names.get(link, 'no link')}")


def _drop_stale_routes(netlink: rtnl.Netlink, plan: NetworkPlan) -> None:
    """Of a server that had other ranges and was killed: the lock says that none alive has what overlaps ours."""
    ours = {plan.addresses, plan.links}
    for network in _our_routes(netlink) - ours:
        if any(network.overlaps(own) for own in ours):
            netlink.do(rtnl.delete_unreachable_route(network, ROUTE_PROTOCOL))


def _our_routes(netlink: rtnl.Netlink) -> set[IPv4Network]:
    return {
        _destination(route)
        for route in netlink.dump(rtnl.all_routes())
        if route["proto"] == ROUTE_PROTOCOL and route["type"] == rtnl.UNREACHABLE
    }


def _destination(route: rtnl.Message) -> IPv4Network:
    return IPv4Network((route.get_attr("RTA_DST") or 0, route["dst_len"]), strict=False)


def _table(route: rtnl.Message) -> int:
    return int(route.get_attr("RTA_TABLE") or route["table"])
