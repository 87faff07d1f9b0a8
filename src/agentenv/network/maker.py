"""Makes, repairs and removes one slot on the host. Blocking: for a `NamespaceThread`.

Everything a slot has hangs on its namespace: when that goes, the kernel takes the
tap, both ends of the link to the host, the routes over it and the rules with it.
So undoing a slot that failed half-way is leaving its namespace.
"""

import errno
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Network
from typing import Final

from agentenv.aio.failpoints import failpoint_nowait
from agentenv.aio.failures import USED_UP
from agentenv.model.errors import Exhausted, NotFound, Unavailable, Unsupported
from agentenv.model.policy import EgressPolicy
from agentenv.network import netns, rtnl, rules, sysctl
from agentenv.network.contract import GATEWAY_ADDRESS, GATEWAY_MAC, GUEST_ADDRESS, GUEST_MAC, LINK_PREFIX, TAP_NAME
from agentenv.network.nft import Nft
from agentenv.network.plan import UPLINK_NAME, NetworkPlan, SlotPlan
from agentenv.network.tap import make_tap

STEPS: Final = ("namespace", "kept", "sysctl", "tap", "uplink", "addresses", "rules", "host")

_UPLINK_PREFIX: Final = 31
_LOOPBACK: Final = 1
# Days by default: too long for connections whose ends may have been paused or killed.
_ESTABLISHED_TIMEOUT_S: Final = 86_400
_SENDS_AFTER_S: Final = 5.0
_LOOK_AGAIN_S: Final = 0.001
_STRICT: Final = "1"  # nothing from an address that is not routed to where it comes from
_OUT_OF: Final = USED_UP | {errno.ENOSPC}  # the kernel's tables, not a disk


class SlotMaker:
    """Knows how slots are made; remembers none of them.

    Args:
        denied: from `egress.denied_to_all`.
        flows_per_slot: most tracked connections of one slot.
        mtu: of the links to the host, in bytes.
    """

    def __init__(
        self, plan: NetworkPlan, nft: Nft, *, denied: Sequence[IPv4Network], flows_per_slot: int, mtu: int
    ) -> None:
        self._plan = plan
        self._nft = nft
        self._denied = denied
        self._flows_per_slot = flows_per_slot
        self._mtu = mtu

    def make(self, slot: SlotPlan, policy: EgressPolicy) -> None:
        """Make *slot* with *policy* in force before it can send. Raises an error kind; nothing is left then."""
        with explained(f"network slot {slot.index} cannot be made"), ExitStack() as undo:
            home = netns.own_namespace()
            undo.callback(os.close, home)
            undo.callback(netns.enter, home)
            netns.unshare()
            failpoint_nowait("slot.namespace")
            netns.keep(slot.netns)
            unkeep = ExitStack()
            undo.push(unkeep)
            unkeep.callback(netns.remove, slot.netns)
            failpoint_nowait("slot.kept")
            self._isolate()
            failpoint_nowait("slot.sysctl")
            make_tap(TAP_NAME)
            failpoint_nowait("slot.tap")
            inner = undo.enter_context(rtnl.Netlink())
            self._connect(inner, slot, home)
            failpoint_nowait("slot.uplink")
            _address_tap(inner)
            _address_uplink(inner, slot)
            failpoint_nowait("slot.addresses")
            self._nft.run(self._rules(slot, policy))
            failpoint_nowait("slot.rules")
            netns.enter(home)
            _attach(slot)
            _wait_until_it_sends(inner, UPLINK_NAME)
            failpoint_nowait("slot.host")
            unkeep.pop_all()

    def repair(self, slot: SlotPlan, policy: EgressPolicy) -> None:
        """Apply all rules of a slot anew, and whatever is missing of its link to the host.

        The link to the guest is left alone. Raises `NotFound` if the namespace is gone.
        """
        if not netns.is_kept(slot.netns):
            raise NotFound(f"network slot {slot.index} is gone")
        with explained(f"network slot {slot.index} cannot be taken back"), ExitStack() as undo:
            home = netns.own_namespace()
            undo.callback(os.close, home)
            attached = rtnl.link_index(slot.link) is not None
            with netns.inside(slot.netns), rtnl.Netlink() as inner:
                self._nft.run(self._rules(slot, policy))
                if not (attached and _uplink_is_of(inner, slot)):
                    if rtnl.link_index(UPLINK_NAME) is not None:
                        inner.do(rtnl.delete_link(UPLINK_NAME))
                    self._connect(inner, slot, home)
                    _address_uplink(inner, slot)
            _attach(slot)

    def replace_policy(self, slot: SlotPlan, policy: EgressPolicy) -> None:
        """Make *policy* that of a slot with rules, in one step. Raises an error kind; the old one stays then."""
        text = rules.policy_rules(self._plan, policy)
        with explained(f"the policy of network slot {slot.index} cannot be replaced"), netns.inside(slot.netns):
            self._nft.run(text)

    def _rules(self, slot: SlotPlan, policy: EgressPolicy) -> str:
        return rules.slot_rules(self._plan, slot, policy, denied=self._denied, flows_per_slot=self._flows_per_slot)

    def _isolate(self) -> None:
        for which in ("all", "default"):
            sysctl.write_if_known(f"ipv6/conf/{which}/disable_ipv6", "1")
        sysctl.write("ipv4/ip_forward", "1")
        # Also for ARP: all namespaces share one table of neighbours, and a guest must not fill it with strangers.
        for which in ("all", "default"):
            sysctl.write(f"ipv4/conf/{which}/rp_filter", _STRICT)
        sysctl.write_if_known("netfilter/nf_conntrack_tcp_timeout_established", str(_ESTABLISHED_TIMEOUT_S))

    def _connect(self, inner: rtnl.Netlink, slot: SlotPlan, host: int) -> None:
        inner.do(
            rtnl.veth(
                UPLINK_NAME,
                slot.slot_mac,
                self._mtu,
                peer=slot.link,
                peer_mac=slot.host_mac,
                peer_netns=host,
            )
        )


def unkeep(slots: Iterable[SlotPlan]) -> None:
    """Let the kernel begin to take the slots away. Raises `OSError`."""
    for slot in slots:
        netns.remove(slot.netns)


def still_attached(slots: Iterable[SlotPlan]) -> list[SlotPlan]:
    """Those whose link to the host exists. The kernel removes it some time after the namespace."""
    return [slot for slot in slots if rtnl.link_index(slot.link) is not None]


def is_whole(slot: SlotPlan) -> bool:
    return netns.is_kept(slot.netns) and rtnl.link_index(slot.link) is not None


def detach(links: Iterable[str]) -> None:
    """Remove links to the host whose namespace does not go, because something still runs in it. Raises `OSError`."""
    with rtnl.Netlink() as host:
        for link in links:
            try:
                host.do(rtnl.delete_link(link))
            except OSError as error:
                if error.errno != errno.ENODEV:
                    raise


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what the kernel says inside the block into an error kind that begins with *what*."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EROFS:
            raise Unsupported(
                f"{what}: {reason}", hint="/proc/sys must be writable (a container's may not be)"
            ) from error
        if error.errno in {errno.EPERM, errno.EACCES}:
            raise Unsupported(f"{what}: {reason}", hint="the server needs root's capabilities") from error
        kind = Exhausted if error.errno in _OUT_OF else Unavailable
        raise kind(f"{what}: {reason}") from error


def _address_tap(inner: rtnl.Netlink) -> None:
    tap = rtnl.need_link(TAP_NAME)
    inner.do(
        rtnl.set_up(_LOOPBACK),
        rtnl.set_up(tap, mac=GATEWAY_MAC),
        rtnl.address(tap, GATEWAY_ADDRESS, LINK_PREFIX),
        # A guest that was just restored is reached without asking for its address first.
        rtnl.neighbour(tap, GUEST_ADDRESS, GUEST_MAC),
    )


def _address_uplink(inner: rtnl.Netlink, slot: SlotPlan) -> None:
    uplink = rtnl.need_link(UPLINK_NAME)
    inner.do(
        rtnl.set_up(uplink, arp=False),
        rtnl.address(uplink, slot.slot_end, _UPLINK_PREFIX),
        rtnl.neighbour(uplink, slot.host_end, slot.host_mac),
        rtnl.default_route(uplink, slot.host_end),
    )


def _wait_until_it_sends(netlink: rtnl.Netlink, name: str) -> None:
    """A link whose other end has just come up drops what it is given until a kernel thread has noticed.

    On a busy host that takes long enough to lose the first packets, and a second until they are sent again.
    """
    give_up = time.monotonic() + _SENDS_AFTER_S
    while not any(
        link.get_attr("IFLA_IFNAME") == name and link.get_attr("IFLA_QDISC") != "noop"
        for link in netlink.dump(rtnl.all_links())
    ):
        if time.monotonic() > give_up:
            raise Unavailable(f"link {name} of a network slot did not come up in {_SENDS_AFTER_S:g} s")
        time.sleep(_LOOK_AGAIN_S)


def _uplink_is_of(inner: rtnl.Netlink, slot: SlotPlan) -> bool:
    uplink = rtnl.link_index(UPLINK_NAME)
    return any(
        address["index"] == uplink and address.get_attr("IFA_LOCAL") == str(slot.slot_end)
        for address in inner.dump(rtnl.all_addresses())
    )


def _attach(slot: SlotPlan) -> None:
    """The host's side: from here on packets flow."""
    sysctl.write_if_known(f"ipv6/conf/{slot.link}/disable_ipv6", "1")
    link = rtnl.need_link(slot.link)
    with rtnl.Netlink() as host:
        host.do(
            rtnl.set_up(link, arp=False),
            rtnl.address(link, slot.host_end, _UPLINK_PREFIX),
            rtnl.neighbour(link, slot.slot_end, slot.slot_mac),
            rtnl.neighbour(link, slot.address, slot.slot_mac),
            rtnl.host_route(link, slot.address, slot.host_end),
        )
