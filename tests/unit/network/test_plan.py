"""Every slot has names and addresses of its own, and they lead back to it."""

from ipaddress import IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.model.errors import NotFound
from agentenv.network.plan import NetworkPlan, network_plan
from agentenv.network.settings import NetworkSettings

RUNTIME = Path("/run/aenv")
LONGEST_LINK_NAME = 15


def plan_of(**change: object) -> NetworkPlan:
    return network_plan(NetworkSettings(**change), RUNTIME)  # type: ignore[arg-type]


def test_the_first_slot() -> None:
    slot = plan_of().slot(1)

    assert (slot.link, str(slot.netns)) == ("aenv-1", "/run/aenv/netns/aenv-1")
    assert [str(a) for a in (slot.address, slot.host_end, slot.slot_end)] == ["10.11.0.1", "10.12.0.2", "10.12.0.3"]


def test_the_default_ranges_hold_32767_slots_and_the_forwarder() -> None:
    plan = plan_of()
    last = plan.slot(plan.capacity)

    assert plan.capacity == 32_767
    assert str(last.slot_end) == "10.12.255.255"
    assert str(plan.dns_address) == "10.11.255.254"
    assert len(plan_of(name_prefix="abcdefghi").slot(plan.capacity).link) <= LONGEST_LINK_NAME


cidrs = st.builds(
    lambda base, length: IPv4Network((base << 16, length), strict=False),
    st.integers(0x0A00, 0x0AFF),
    st.integers(8, 29),
)


@given(cidrs, cidrs, st.data())
def test_no_two_slots_of_any_servers_share_anything(
    addresses: IPv4Network, links: IPv4Network, data: st.DataObject
) -> None:
    if addresses.overlaps(links):
        return
    plan = plan_of(address_cidr=addresses, veth_cidr=links)
    indexes = st.integers(1, plan.capacity)
    one, two = plan.slot(data.draw(indexes)), plan.slot(data.draw(indexes))

    for slot in (one, two):
        assert slot.address in addresses
        assert slot.host_end in links
        assert slot.slot_end in links
        assert int(slot.host_end) + 1 == int(slot.slot_end)
        assert slot.address not in {addresses.network_address, addresses.broadcast_address, plan.dns_address}
        assert slot.host_mac != slot.slot_mac
        assert len(slot.link) <= LONGEST_LINK_NAME
        assert plan.index_of_address(slot.address) == plan.index_of_name(slot.link) == slot.index
    if one.index != two.index:
        things = [(s.link, s.netns, s.address, s.host_end, s.slot_end, s.host_mac, s.slot_mac) for s in (one, two)]
        assert not set(things[0]) & set(things[1])


@pytest.mark.parametrize("index", [-1, 0, 32_768, 10**9])
def test_an_index_out_of_range_has_no_slot(index: int) -> None:
    with pytest.raises(NotFound):
        plan_of().slot(index)


@pytest.mark.parametrize(
    "text", ["10.11.0.0", "10.11.255.254", "10.11.255.255", "10.12.0.1", "10.10.255.255", "8.8.8.8"]
)
def test_an_address_of_no_slot_leads_to_none(text: str) -> None:
    plan = plan_of()

    assert plan.index_of_address(plan.dns_address.__class__(text)) is None


@pytest.mark.parametrize(
    "name",
    [
        "aenv",
        "aenv-",
        "aenv-0",
        "aenv-01",
        "aenv--1",
        "aenv-1a",
        "aenv-dns",
        "aenvb-1",
        "xaenv-1",
        "aenv-123456",
        "aenv-1\n",
    ],
)
def test_a_name_of_no_slot_leads_to_none(name: str) -> None:
    assert plan_of().index_of_name(name) is None


def test_a_slot_of_wider_ranges_is_recognised_by_its_name() -> None:
    assert plan_of(veth_cidr=IPv4Network("10.12.0.0/24")).index_of_name("aenv-30000") == 30_000
