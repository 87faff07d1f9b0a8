"""What a policy means, checked against a judge that looks at one address at a time."""

from ipaddress import IPv4Address, IPv4Network
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.model.errors import Invalid
from agentenv.model.policy import EgressPolicy
from agentenv.network.egress import EVERYTHING, MOST_RANGES, compile_policy, denied_to_all
from agentenv.network.settings import ALWAYS_DENIED

# Ranges near each other and near the ends, so that they overlap and touch often.
bases = st.sampled_from([0, 0x0A000000, 0x0AFFFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFF00, 0xFFFFFFFF])
ranges = st.builds(
    lambda base, offset, length: IPv4Network((min(base + offset, 0xFFFFFFFF), length), strict=False),
    bases,
    st.integers(0, 64),
    st.integers(0, 32),
)
lists = st.lists(ranges, max_size=6).map(tuple)
addresses = st.builds(lambda base, offset: IPv4Address(min(base + offset, 0xFFFFFFFF)), bases, st.integers(0, 96))
policies = st.builds(EgressPolicy, st.sampled_from([None, True, False]), lists, lists)


def among(address: IPv4Address, networks: tuple[IPv4Network, ...]) -> bool:
    return any(address in network for network in networks)


@given(policies, addresses)
def test_a_compiled_policy_decides_as_the_policy_reads(policy: EgressPolicy, address: IPv4Address) -> None:
    if among(address, policy.allow_out):
        expected = True
    elif among(address, policy.deny_out):
        expected = False
    else:
        expected = policy.allow_internet is not False

    egress = compile_policy(policy)
    decided = among(address, egress.allow) or not (egress.closed or among(address, egress.deny))

    assert decided == expected


@given(policies)
def test_ranges_for_the_firewall_never_overlap(policy: EgressPolicy) -> None:
    egress = compile_policy(policy)
    for networks in (egress.allow, egress.deny):
        for one, two in pairwise(networks):
            assert int(one.broadcast_address) < int(two.network_address)


@pytest.mark.parametrize(
    ("policy", "dns"),
    [
        (EgressPolicy(), True),
        (EgressPolicy(allow_internet=True), True),
        (EgressPolicy(allow_internet=False), False),
        (EgressPolicy(allow_internet=False, allow_out=(IPv4Network("1.1.1.1"),)), True),
        (EgressPolicy(deny_out=(EVERYTHING,)), False),
        (EgressPolicy(deny_out=(IPv4Network("0.0.0.0/1"), IPv4Network("128.0.0.0/1"))), False),
        (EgressPolicy(deny_out=(EVERYTHING,), allow_out=(IPv4Network("1.1.1.1"),)), True),
        (EgressPolicy(deny_out=(IPv4Network("0.0.0.0/1"),)), True),
    ],
)
def test_names_are_resolved_for_those_who_may_reach_anything(policy: EgressPolicy, dns: bool) -> None:
    assert compile_policy(policy).dns == dns


def test_a_policy_has_a_greatest_length() -> None:
    half = tuple(IPv4Network((index << 8, 32)) for index in range(MOST_RANGES // 2))
    compile_policy(EgressPolicy(allow_out=half, deny_out=half))

    with pytest.raises(Invalid):
        compile_policy(EgressPolicy(allow_out=half, deny_out=(*half, EVERYTHING)))


@given(lists, lists, lists, addresses)
def test_what_is_denied_to_all(
    denied: tuple[IPv4Network, ...], opened: tuple[IPv4Network, ...], own: tuple[IPv4Network, ...], address: IPv4Address
) -> None:
    expected = (
        among(address, own) or int(address) >= 0xE0000000 or (among(address, denied) and not among(address, opened))
    )

    assert among(address, denied_to_all(denied, opened, own)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "10.255.255.255",
        "100.127.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "172.31.0.1",
        "192.168.0.1",
        "0.0.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "168.63.129.16",
    ],
)
def test_by_default_nothing_but_the_internet_is_reached(text: str) -> None:
    assert among(IPv4Address(text), denied_to_all(ALWAYS_DENIED, (), ()))


@pytest.mark.parametrize(
    "text", ["1.1.1.1", "9.255.255.255", "11.0.0.0", "172.15.0.1", "172.32.0.0", "192.167.9.9", "223.255.255.255"]
)
def test_the_internet_is_not_denied(text: str) -> None:
    assert not among(IPv4Address(text), denied_to_all(ALWAYS_DENIED, (), ()))
