"""Connections of one address are forgotten, those of others kept, on new kernels and old ones."""

import socket
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from agentenv.network import rtnl
from agentenv.network.conntrack import Conntrack
from agentenv.network.nft import Nft
from tests.unit.network.lab import Lab

pytestmark = pytest.mark.needs("root", "netns", "nft", "tun")

MINE, OTHER = IPv4Address("10.11.0.5"), IPv4Address("10.11.0.6")
FLOWS = 150  # more than one batch


def tracked(address: IPv4Address) -> int:
    return Path("/proc/thread-self/net/nf_conntrack").read_text().count(f"src={address} ")


def talk() -> None:
    for address in (MINE, OTHER):
        for port in range(FLOWS):
            for source, target in ((str(address), "127.0.0.1"), ("127.0.0.1", str(address))):
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
                    sending.bind((source, 0))
                    sending.sendto(b"x", (target, 3000 + port))


@pytest.mark.parametrize("patterns", [True, False])
def test_all_connections_of_an_address_are_forgotten_and_no_others(lab: Lab, patterns: bool) -> None:
    firewall = Nft()
    firewall.run("table inet x {\nchain a {\ntype filter hook output priority 0\nct state new accept\n}\n}\n")
    firewall.close()
    with rtnl.Netlink() as netlink:
        netlink.do(rtnl.address(1, MINE, 32), rtnl.address(1, OTHER, 32))
    talk()
    before = tracked(OTHER)
    assert tracked(MINE) == before >= 2 * FLOWS

    conntrack = Conntrack()
    conntrack._patterns = patterns and conntrack._patterns
    conntrack.forget(MINE)
    conntrack.forget(MINE)  # there is nothing left, and that is no error
    conntrack.close()

    assert (tracked(MINE), tracked(OTHER)) == (0, before)
