"""Settings that cannot work are refused when they are made."""

from ipaddress import IPv4Network

import pytest

from agentenv.model.errors import Invalid
from agentenv.network.settings import NetworkSettings


def test_the_defaults_work() -> None:
    NetworkSettings()


@pytest.mark.parametrize(
    "change",
    [
        {"name_prefix": ""},
        {"name_prefix": "Aenv"},
        {"name_prefix": "a-b"},  # "a-b-1" would also match the pattern of prefix "a"
        {"name_prefix": "1a"},
        {"name_prefix": "abcdefghij"},  # with "-12345", longer than a link's name may be
        {"name_prefix": 'a" drop'},
        {"address_cidr": IPv4Network("10.12.0.0/24")},
        {"veth_cidr": IPv4Network("10.0.0.0/8")},
        {"address_cidr": IPv4Network("10.11.0.0/30")},
        {"veth_cidr": IPv4Network("10.12.0.0/30")},
        {"warm_low": -1},
        {"warm_low": 17},
        {"warm_high": 3},
        {"max_slots": 0},
        {"dns_port": 0},
        {"dns_port": 65_536},
        {"dns_timeout_s": 0.0},
        {"dns_timeout_s": 61.0},
        {"dns_timeout_s": float("nan")},
        {"dns_in_flight": 0},
        {"dns_in_flight_per_slot": 0},
        {"flows_per_slot": 1},
        {"mtu": 575},
        {"mtu": 65_536},
    ],
    ids=str,
)
def test_what_cannot_work_is_invalid(change: dict[str, object]) -> None:
    with pytest.raises(Invalid, match=next(iter(change))):
        NetworkSettings(**change)  # type: ignore[arg-type]
