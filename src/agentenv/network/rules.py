"""From plans and policies to nftables text. Each text is one transaction: all of it or none.

Two places enforce, and each alone keeps sandboxes apart. The slot's own namespace
knows its policy; the host's table, the same for all slots, keeps them from each
other, from the host and from private ranges even if a VMM was broken out of.

Links are matched by name, never by index, so rules hold whichever link comes later.
"""

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network
from typing import Final

from agentenv.model.policy import EgressPolicy
from agentenv.network.contract import GATEWAY_ADDRESS, GUEST_ADDRESS, TAP_NAME
from agentenv.network.egress import EVERYTHING, Egress, compile_policy
from agentenv.network.plan import UPLINK_NAME, NetworkPlan, SlotPlan

SLOT_TABLE: Final = "slot"

# To the narrower of the links that both directions leave the host by.
_FIT_SEGMENTS: Final = "tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu"
# A refused guest is told so at once; a dropped packet would make it wait for its own time-out.
_REFUSAL: Final = ("meta l4proto tcp reject with tcp reset", "reject with icmpx type admin-prohibited")


def host_rules(plan: NetworkPlan, denied: Sequence[IPv4Network], flows_per_slot: int) -> str:
    """The host's table, replaced if it is there. *denied* is as from `egress.denied_to_all`.

    Nobody but the host may reach a slot, and nobody but a slot may send from its address.
    """
    from_slots = f'iifname "{plan.link_pattern}"'
    to_slots = f'oifname "{plan.link_pattern}"'
    own = _set((plan.addresses, plan.links))
    to_forwarder = f"ip saddr {plan.addresses} ip daddr {plan.dns_address}"
    return _table(
        plan.table,
        _named_set("denied", "flags interval", denied),
        f"set flows {{\n\ttype ipv4_addr\n\tsize {plan.capacity}\n\tflags dynamic\n}}",
        _chain(
            "arriving",
            "type filter hook prerouting priority raw; policy accept;",
            f"{from_slots} goto arriving_from_slot",
            'iifname "lo" accept',
            f"ip saddr {own} drop",
        ),
        _chain(
            "arriving_from_slot",
            "meta nfproto != ipv4 drop",
            "fib saddr . iif oif missing drop",  # the address is not routed to where the packet came from
        ),
        _chain(
            "to_host",
            "type filter hook input priority filter - 10; policy accept;",
            f"{from_slots} goto to_host_from_slot",
            f'iifname != "lo" ip daddr {own} drop',
        ),
        _chain(
            "to_host_from_slot",
            "ct state established,related accept",
            f"{to_forwarder} udp dport {plan.dns_port} accept",
            f"{to_forwarder} tcp dport {plan.dns_port} accept",
            *_REFUSAL,
        ),
        _chain(
            "through_host",
            "type filter hook forward priority filter - 10; policy accept;",
            f"{from_slots} goto from_slot",
            f"{to_slots} goto to_slot",
        ),
        _chain(
            "from_slot",
            _FIT_SEGMENTS,
            "ct state established,related accept",
            "ct state invalid drop",
            f"ip saddr != {plan.addresses} drop",
            f"{to_slots} goto refuse",
            # The host sent it elsewhere than the guest asked for: a published port, a service address.
            "ct status dnat goto refuse",
            "ip daddr @denied goto refuse",
            f"add @flows {{ ip saddr ct count over {flows_per_slot} }} drop",
            "accept",
        ),
        _chain(
            "to_slot",
            _FIT_SEGMENTS,
            "ct state established,related accept",
            "drop",
        ),
        _chain(
            "translate_leaving",
            "type nat hook postrouting priority srcnat; policy accept;",
            f'ip saddr {plan.addresses} oifname != "lo" oifname != "{plan.link_pattern}" masquerade',
        ),
        _chain("refuse", *_REFUSAL),
    )


def slot_rules(
    plan: NetworkPlan,
    slot: SlotPlan,
    policy: EgressPolicy,
    *,
    denied: Sequence[IPv4Network],
    flows_per_slot: int,
) -> str:
    """All rules of a slot's namespace with *policy* in them, replaced if they are there.

    *denied* is as from `egress.denied_to_all`.
    """
    tap, up = f'iifname "{TAP_NAME}"', f'iifname "{UPLINK_NAME}"'
    to_tap, to_up = f'oifname "{TAP_NAME}"', f'oifname "{UPLINK_NAME}"'
    egress = compile_policy(policy)
    return _table(
        SLOT_TABLE,
        _named_set("denied", "flags interval", denied),
        _chain(
            "arriving",
            "type filter hook prerouting priority raw; policy drop;",
            f"{tap} ip saddr {GUEST_ADDRESS} accept",
            f"{up} meta nfproto ipv4 accept",
            'iifname "lo" accept',
        ),
        _chain(
            "translate_arriving",
            "type nat hook prerouting priority dstnat; policy accept;",
            f"{tap} ip daddr {GATEWAY_ADDRESS} goto names",
            f"{up} ip saddr {slot.host_end} ip daddr {slot.address} dnat ip to {GUEST_ADDRESS}",
        ),
        _chain("names", *_name_rules(plan, egress)),
        _chain(
            "to_slot",
            "type filter hook input priority filter; policy drop;",
            'iifname "lo" accept',
            "ct state established,related accept",
            f"{tap} icmp type echo-request limit rate 10/second accept",
            *(f"{tap} {refusal}" for refusal in _REFUSAL),
        ),
        _chain(
            "through_slot",
            "type filter hook forward priority filter; policy drop;",
            "ct state established,related accept",
            "ct state invalid drop",
            f"{tap} {to_up} goto outbound",
            # Not counted: a guest that has used up its connections can still be reached, and managed.
            f"{up} {to_tap} ct status dnat accept",
        ),
        _chain("outbound", *_egress_rules(plan, egress)),
        _chain("admit", f"ct count over {flows_per_slot} drop", "accept"),
        _chain("refuse", *_REFUSAL),
        _chain(
            "translate_leaving",
            "type nat hook postrouting priority srcnat; policy accept;",
            f"{to_up} snat ip to {slot.address}",
            # The guest can answer its gateway whatever its other routes are.
            f"{to_tap} snat ip to {GATEWAY_ADDRESS}",
        ),
    )


def policy_rules(plan: NetworkPlan, policy: EgressPolicy) -> str:
    """What makes *policy* the policy of a slot that has its rules already; established flows go on."""
    egress = compile_policy(policy)
    lines: list[str] = []
    for chain, rules in (("names", _name_rules(plan, egress)), ("outbound", _egress_rules(plan, egress))):
        lines.append(f"flush chain inet {SLOT_TABLE} {chain}")
        lines += [f"add rule inet {SLOT_TABLE} {chain} {rule}" for rule in rules]
    return "\n".join(lines) + "\n"


def remove_table(name: str) -> str:
    """Remove a table, whether it is there or not."""
    return f"add table inet {name}\ndelete table inet {name}\n"


def _name_rules(plan: NetworkPlan, egress: Egress) -> list[str]:
    if not egress.dns:
        return []
    return [f"{protocol} dport 53 dnat ip to {plan.dns_address}:{plan.dns_port}" for protocol in ("udp", "tcp")]


def _egress_rules(plan: NetworkPlan, egress: Egress) -> list[str]:
    rules = []
    if egress.dns:
        rules.append(f"ct status dnat ip daddr {plan.dns_address} goto admit")
    rules.append("ip daddr @denied goto refuse")
    rules += _matching(egress.allow, "admit")
    if not egress.closed:
        rules += _matching(egress.deny, "refuse")
    rules.append("goto refuse" if egress.closed else "goto admit")
    return rules


def _matching(networks: Sequence[IPv4Network], chain: str) -> list[str]:
    if not networks:
        return []
    if EVERYTHING in networks:
        return [f"goto {chain}"]
    return [f"ip daddr {_set(networks)} goto {chain}"]


def _set(networks: Iterable[IPv4Network]) -> str:
    return f"{{ {', '.join(str(network) for network in networks)} }}"


def _named_set(name: str, flags: str, networks: Sequence[IPv4Network]) -> str:
    return f"set {name} {{\n\ttype ipv4_addr\n\t{flags}\n\telements = {_set(networks)}\n}}"


def _chain(name: str, *lines: str) -> str:
    return f"chain {name} {{\n" + "".join(f"\t{line}\n" for line in lines) + "}"


def _table(name: str, *blocks: str) -> str:
    body = "\n".join(blocks)
    return f"{remove_table(name)}table inet {name} {{\n{body}\n}}\n"
