"""Ranges that something else uses are refused, and free ones proposed."""

from ipaddress import IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.model.errors import Conflict
from agentenv.network.ranges import InUse, check_free, free_ranges

WANTED = (("address_cidr", IPv4Network("10.11.0.0/16")), ("veth_cidr", IPv4Network("10.12.0.0/16")))


def used(text: str) -> InUse:
    return InUse(IPv4Network(text), "a route over wg0")


@pytest.mark.parametrize(
    "text", ["0.0.0.0/0", "0.0.0.0/1", "128.0.0.0/1", "10.10.0.0/16", "10.13.0.0/16", "192.168.1.0/24"]
)
def test_routes_to_everywhere_and_to_elsewhere_do_no_harm(text: str) -> None:
    check_free(WANTED, [used(text)])


@pytest.mark.parametrize(
    ("text", "setting"),
    [("10.11.3.4/32", "address_cidr"), ("10.12.0.0/15", "veth_cidr"), ("10.0.0.0/8", "address_cidr")],
)
def test_an_overlap_is_a_conflict_that_names_both_sides(text: str, setting: str) -> None:
    with pytest.raises(Conflict, match=rf"{setting} .* overlaps {text}, a route over wg0"):
        check_free(WANTED, [used(text)])


def test_the_advice_can_be_followed() -> None:
    taken = [used("10.0.0.0/8"), used("172.16.0.0/13")]
    with pytest.raises(Conflict) as refused:
        check_free(WANTED, taken)

    words = (refused.value.hint or "").split()
    advised = tuple((name, IPv4Network(words[words.index(name) + 1])) for name, _ in WANTED)
    check_free(advised, taken)


@given(
    st.lists(st.integers(12, 30).map(lambda length: IPv4Network((0, length))), min_size=1, max_size=3),
    st.lists(
        st.builds(
            lambda a, n: IPv4Network((a, n), strict=False), st.integers(0x0A000000, 0x0AFFFFFF), st.integers(8, 32)
        ),
        max_size=5,
    ),
)
def test_proposed_ranges_are_free_private_and_apart(sizes: list[IPv4Network], taken: list[IPv4Network]) -> None:
    found = free_ranges(sizes, taken)

    assert [network.prefixlen for network in found] == [size.prefixlen for size in sizes]
    everything = [*found, *taken]
    for index, network in enumerate(found):
        assert network.is_private or network.subnet_of(IPv4Network("100.64.0.0/10"))
        assert not any(network.overlaps(other) for other in everything[index + 1 :])


def test_where_nothing_is_free_nothing_is_proposed() -> None:
    everything = [
        IPv4Network(text)
        for text in ("10.0.0.0/8", "172.16.0.0/12", "100.64.0.0/10", "192.168.0.0/16", "198.18.0.0/15")
    ]

    assert free_ranges([IPv4Network("0.0.0.0/16")], everything) == []
