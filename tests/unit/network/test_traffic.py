"""What gets through a slot, in both directions, with packets."""

import asyncio
import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from agentenv.model.policy import EgressPolicy
from agentenv.network import netns, rtnl, sysctl
from agentenv.network.contract import GATEWAY_ADDRESS, GATEWAY_MAC, Slot
from agentenv.network.nft import Nft
from agentenv.network.plan import network_plan
from agentenv.network.settings import NetworkSettings
from agentenv.network.slots import NetworkSlots
from tests.unit.network.lab import GATEWAY, HOST_UPLINK, PORT, PRIVATE, PUBLIC, UPLINK_MTU, Guest, Lab, Machine, within

pytestmark = [pytest.mark.needs("root", "netns", "nft", "tun"), pytest.mark.slow]

OPEN = EgressPolicy()
FLOWS = 16


def networks(*texts: str) -> tuple[IPv4Network, ...]:
    return tuple(IPv4Network(text) for text in texts)


@pytest.fixture
async def slot(slots: NetworkSlots) -> Slot:
    return await slots.acquire("one", OPEN)


@pytest.fixture
def guest(lab: Lab, slot: Slot) -> Guest:
    return lab.guest(slot)


@contextmanager
def sniffed(link: str, inside: int) -> Iterator[list[bytes]]:
    """All frames that arrive on *link* during the block, filled in at its end."""
    frames: list[bytes] = []
    everything = socket.htons(0x0003)

    def listen() -> socket.socket:
        listening = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, everything)
        listening.bind((link, 0x0003))
        listening.setblocking(False)
        return listening

    with within(inside, listen) as listening:
        yield frames
        while True:
            try:
                frames.append(listening.recv(4096))
            except BlockingIOError:
                break


def ether_types(frames: list[bytes]) -> set[int]:
    return {int.from_bytes(frame[12:14], "big") for frame in frames}


def ip_sources(frames: list[bytes]) -> set[str]:
    return {str(IPv4Address(frame[26:30])) for frame in frames if frame[12:14] == b"\x08\x00"}


# Through


async def test_the_internet_sees_the_host_and_never_the_sandbox(lab: Lab, guest: Guest) -> None:
    assert await guest.tcp("8.8.8.8") == str(HOST_UPLINK)
    assert await guest.udp("1.1.1.1") == str(HOST_UPLINK)


async def test_the_guest_is_reached_at_its_address_and_sees_its_gateway(lab: Lab, slot: Slot, guest: Guest) -> None:
    assert await lab.host.tcp(str(slot.address)) == str(GATEWAY_ADDRESS)
    assert await lab.host.udp(str(slot.address)) == str(GATEWAY_ADDRESS)


@pytest.mark.parametrize("port", [22, 53, 443, 10_053, 49_983, 65_535])
async def test_every_port_of_the_guest_is_reached(lab: Lab, slot: Slot, guest: Guest, port: int) -> None:
    server = type(guest.server)(guest.inside, port)
    try:
        assert await lab.host.tcp(str(slot.address), port) == str(GATEWAY_ADDRESS)
        assert await lab.host.udp(str(slot.address), port) == str(GATEWAY_ADDRESS)
    finally:
        server.close()


async def test_a_port_that_nobody_listens_on_is_refused_at_once(lab: Lab, slot: Slot, guest: Guest) -> None:
    assert await lab.host.tcp(str(slot.address), 81) == "refused"


async def test_a_guest_without_a_route_still_answers_the_host(lab: Lab, slot: Slot, guest: Guest) -> None:
    def cut() -> None:
        with rtnl.Netlink() as netlink:
            netlink.do(rtnl.delete_default_route())

    within(guest.inside, cut)

    assert await guest.tcp("8.8.8.8") == "no route"
    assert await lab.host.tcp(str(slot.address)) == str(GATEWAY_ADDRESS)


async def test_the_next_vmm_in_a_slot_finds_it_as_the_first_did(lab: Lab, slot: Slot, guest: Guest) -> None:
    assert await guest.tcp("8.8.8.8") == str(HOST_UPLINK)
    guest.close()

    successor = lab.guest(slot)

    assert await successor.tcp("8.8.8.8") == str(HOST_UPLINK)
    assert await lab.host.tcp(str(slot.address)) == str(GATEWAY_ADDRESS)


async def test_a_segment_fits_the_smallest_link_on_the_way(lab: Lab, guest: Guest) -> None:
    def segment_bytes() -> int:
        with guest.socket() as connection:
            connection.connect(("8.8.8.8", PORT))
            return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)

    assert 536 <= await asyncio.to_thread(segment_bytes) <= UPLINK_MTU - 40


async def test_both_sides_keep_to_the_mtu_that_the_operator_knows_of(
    lab: Lab, tmp_path: Path, settings: NetworkSettings
) -> None:
    slots = NetworkSlots(replace(settings, mtu=1280), tmp_path)
    await slots.start()
    try:
        slot = await slots.acquire("one", OPEN)
        guest = lab.guest(slot)
        listening = lab.internet.socket()
        listening.bind(("9.9.9.9", 8080))
        listening.listen(1)
        with listening, guest.socket() as of_guest:
            await asyncio.to_thread(of_guest.connect, ("9.9.9.9", 8080))
            of_internet, _ = listening.accept()
            with of_internet:
                for side in (of_guest, of_internet):
                    assert side.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= 1280 - 40
        await slots.release(slot)
    finally:
        await slots.close()


async def test_a_packet_that_is_too_large_is_reported_to_the_guest(guest: Guest) -> None:
    def send() -> int:
        with guest.socket(socket.SOCK_DGRAM) as sending:
            sending.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER: never fragment
            sending.connect(("8.8.8.8", PORT))
            sending.settimeout(5)
            sending.send(bytes(1450))  # sets off the report
            with pytest.raises(OSError, match="too long"):
                sending.recv(10)
            return sending.getsockopt(socket.IPPROTO_IP, 14)  # IP_MTU

    assert await asyncio.to_thread(send) == UPLINK_MTU


# Never


@pytest.mark.parametrize("address", [*PRIVATE, "10.0.0.1", "172.31.255.255", "0.1.2.3", "10.11.0.77", "10.12.0.77"])
async def test_what_is_not_public_is_refused(lab: Lab, guest: Guest, address: str) -> None:
    assert await guest.tcp(address) == "refused"
    assert await guest.udp(address) == "refused"
    assert lab.server.seen == []


@pytest.mark.parametrize("address", ["224.0.0.251", "239.255.255.250", "255.255.255.255", "240.0.0.1", "203.0.113.255"])
async def test_what_is_not_one_machine_is_not_reached(lab: Lab, guest: Guest, address: str) -> None:
    host = lab.serve_on_host(PORT)

    assert await guest.udp(address) in {"silence", "refused", "Network is unreachable", "Invalid argument", "no route"}

    assert lab.server.seen == host.seen == []


async def test_no_service_of_the_host_is_reached_at_any_of_its_addresses(lab: Lab, slot: Slot, guest: Guest) -> None:
    host = lab.serve_on_host(PORT, 53)
    plan = network_plan(NetworkSettings(), Path("/unused"))
    of_slot = plan.slot(slot.index)
    for address in (
        HOST_UPLINK,
        of_slot.host_end,
        of_slot.slot_end,
        of_slot.address,
        plan.dns_address,
        GATEWAY_ADDRESS,
    ):
        assert await guest.tcp(str(address)) == "refused", address
        assert await guest.udp(str(address)) == "refused", address
    assert await guest.tcp(str(plan.dns_address), plan.dns_port) == "refused"  # not past the gateway
    assert host.seen == []


async def test_no_other_sandbox_is_reached(lab: Lab, slots: NetworkSlots, guest: Guest) -> None:
    other = await slots.acquire("other", OPEN)
    victim = lab.guest(other)
    other_end = network_plan(NetworkSettings(), Path("/unused")).slot(other.index).slot_end
    for address in (str(other.address), str(other_end)):
        assert await guest.tcp(address) == "refused"
        assert await guest.udp(address) == "refused"
    assert victim.server.seen == []


async def test_a_port_that_the_host_publishes_for_others_is_refused(lab: Lab, guest: Guest) -> None:
    nft = Nft()
    nft.run(
        "table ip docker {\nchain a {\ntype nat hook prerouting priority dstnat\n"
        f"ip daddr {{ 8.8.4.4, {HOST_UPLINK} }} dnat to 1.1.1.1\n}}\n}}\n"
    )
    nft.close()

    assert await guest.tcp("8.8.4.4") == "refused"
    assert await guest.tcp(str(HOST_UPLINK)) == "refused"
    assert lab.server.seen == []


async def test_a_forged_source_address_goes_nowhere(lab: Lab, slot: Slot, guest: Guest) -> None:
    with sniffed(f"aenv-{slot.index}", lab.host.inside) as frames:
        for source in ("10.9.9.9", "8.8.4.4", "169.254.0.20", str(slot.address)):
            assert await guest.udp("8.8.8.8", source=source) == "silence"
        assert await guest.udp("8.8.8.8") == str(HOST_UPLINK)

    assert ip_sources(frames) == {str(slot.address), "8.8.8.8"}


async def test_ipv6_of_a_guest_goes_nowhere(lab: Lab, slot: Slot, guest: Guest) -> None:
    def send() -> None:
        with rtnl.Netlink() as netlink:
            netlink.do(*ipv6_of_its_own())
        for target in ("ff02::1", "fe80::1", "2001:db8::1"):
            with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sending:
                sending.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, socket.if_nametoindex("eth0"))
                sending.sendto(b"x", (target, PORT, 0, socket.if_nametoindex("eth0")))

    with sniffed("eth0", guest.inside) as of_guest, sniffed(f"aenv-{slot.index}", lab.host.inside) as on_host:
        within(guest.inside, send)
        assert await guest.udp("8.8.8.8") == str(HOST_UPLINK)  # sent after it, so it has had its chance

    assert 0x86DD in ether_types(of_guest)
    assert ether_types(on_host) == {0x0800}


def ipv6_of_its_own(name: str = "eth0") -> list[rtnl.Message]:
    """An address and a default route of the kind a guest could give itself."""
    link = socket.if_nametoindex(name)
    messages = []
    for kind, number, fields, attributes in (
        (
            ifaddrmsg,
            20,
            {"family": 10, "prefixlen": 64, "flags": 0x02, "index": link},
            [("IFA_ADDRESS", "2001:db8:1::2")],
        ),
        (
            ndmsg,
            28,
            {"family": 10, "ifindex": link, "state": 0x80},
            [("NDA_DST", "fe80::1"), ("NDA_LLADDR", GATEWAY_MAC)],
        ),
        (
            rtmsg,
            24,
            {"family": 10, "table": 254, "proto": 4, "type": 1},
            [("RTA_OIF", link), ("RTA_GATEWAY", "fe80::1")],
        ),
    ):
        message = kind()
        message["header"]["type"] = number
        message["header"]["flags"] = 0x400
        for field, value in fields.items():
            message[field] = value
        message["attrs"] = attributes
        messages.append(message)
    return messages


@pytest.mark.parametrize("who", ["guest", "escaped"])
async def test_forged_arp_does_not_fill_the_table_that_all_share(
    request: pytest.FixtureRequest, lab: Lab, slot: Slot, who: str
) -> None:
    machine: Machine = request.getfixturevalue(who)
    link = {"guest": "eth0", "escaped": "up0"}[who]
    plan = network_plan(NetworkSettings(), Path("/unused"))
    target = {"guest": GATEWAY_ADDRESS, "escaped": plan.slot(slot.index).host_end}[who]

    def flood() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x0806) as sending:
            sending.bind((link, 0x0806))
            for number in range(1, 200):
                mine = bytes([2, 0, 0, 0, 1, number])
                asking = struct.pack(
                    "!HHBBH6s4s6s4s", 1, 0x0800, 6, 4, 1, mine, bytes([10, 9, 8, number]), bytes(6), target.packed
                )
                sending.send(b"\xff" * 6 + mine + b"\x08\x06" + asking)

    within(machine.inside, flood)
    await machine.udp("8.8.8.8", source=str(slot.address) if who == "escaped" else None)  # later than those

    known = Path("/proc/thread-self/net/arp").read_text()
    with netns.inside(slot.netns):
        known += Path("/proc/thread-self/net/arp").read_text()
    assert "10.9.8." not in known


async def test_nobody_outside_reaches_a_sandbox_or_the_forwarder(lab: Lab, slot: Slot, guest: Guest) -> None:
    plan = network_plan(NetworkSettings(), Path("/unused"))

    def route_there() -> None:
        with rtnl.Netlink() as netlink:
            netlink.do(rtnl.route_via(plan.addresses, HOST_UPLINK), rtnl.route_via(plan.links, HOST_UPLINK))

    within(lab.internet_namespace, route_there)

    with sniffed(f"aenv-{slot.index}", lab.host.inside) as frames:
        assert await lab.internet.tcp(str(slot.address)) == "silence"
        assert await lab.internet.udp(str(plan.slot(slot.index).slot_end)) == "silence"
        assert await lab.internet.tcp(str(plan.dns_address), plan.dns_port) == "silence"

    assert guest.server.seen == []
    assert frames == []  # not even as far as the slot


async def test_nobody_outside_speaks_for_a_sandbox(lab: Lab, slot: Slot, guest: Guest) -> None:
    host = lab.serve_on_host(PORT)

    assert await lab.internet.udp(str(HOST_UPLINK), source=str(slot.address)) == "silence"

    assert host.seen == []
    assert await lab.internet.udp(str(HOST_UPLINK)) == str(GATEWAY)


async def test_what_is_meant_for_a_slot_that_does_not_exist_stays_on_the_host(lab: Lab, slots: NetworkSlots) -> None:
    assert await lab.host.tcp("10.11.9.9") in {"no route", "refused"}
    assert lab.server.seen == []


async def test_one_sandbox_cannot_have_more_connections_than_its_share(
    lab: Lab, tmp_path: Path, settings: NetworkSettings
) -> None:
    slots = NetworkSlots(replace(settings, flows_per_slot=FLOWS), tmp_path)
    await slots.start()
    try:
        slot = await slots.acquire("greedy", OPEN)
        guest = lab.guest(slot)
        held = [guest.socket(socket.SOCK_DGRAM) for _ in range(3 * FLOWS)]
        for sending in held:
            sending.sendto(b"x", ("8.8.8.8", PORT))
        answered = await asyncio.to_thread(count_answers, held)

        assert answered == FLOWS
        with netns.inside(slot.netns):
            assert Path("/proc/thread-self/net/nf_conntrack").read_text().count("udp") == FLOWS
        assert await guest.tcp("8.8.8.8") == "silence"
        assert await lab.host.tcp(str(slot.address)) == str(GATEWAY_ADDRESS)
        await slots.release(slot)
    finally:
        await slots.close()


def count_answers(sockets: list[socket.socket]) -> int:
    answered = 0
    for waiting in sockets:
        with waiting:
            waiting.settimeout(0.3 if answered < FLOWS else 0.02)
            try:
                waiting.recv(100)
                answered += 1
            except TimeoutError:
                pass
    return answered


# As the policy says


async def reached(guest: Guest, *addresses: str) -> set[str]:
    """Which of *addresses* answer, over TCP and UDP alike; the others must refuse."""
    found = set()
    for address in addresses:
        answers = {await guest.tcp(address), await guest.udp(address)}
        assert answers in ({str(HOST_UPLINK)}, {"refused"}), (address, answers)
        if answers == {str(HOST_UPLINK)}:
            found.add(address)
    return found


@pytest.mark.parametrize(
    ("policy", "open_to"),
    [
        (EgressPolicy(), PUBLIC),
        (EgressPolicy(allow_internet=True), PUBLIC),
        (EgressPolicy(allow_internet=False), ()),
        (EgressPolicy(allow_internet=False, allow_out=networks("8.8.8.8/32")), ("8.8.8.8",)),
        (EgressPolicy(allow_internet=False, allow_out=networks("8.8.0.0/16", "8.8.8.0/24")), ("8.8.8.8", "8.8.4.4")),
        (EgressPolicy(allow_internet=False, allow_out=networks("0.0.0.0/0")), PUBLIC),
        (EgressPolicy(deny_out=networks("8.8.8.0/24")), ("8.8.4.4", "1.1.1.1", "9.9.9.9")),
        (
            EgressPolicy(deny_out=networks("8.8.0.0/16"), allow_out=networks("8.8.8.8/32")),
            ("8.8.8.8", "1.1.1.1", "9.9.9.9"),
        ),
        (EgressPolicy(deny_out=networks("0.0.0.0/0")), ()),
        (EgressPolicy(deny_out=networks("0.0.0.0/1", "128.0.0.0/1")), ()),
        (EgressPolicy(deny_out=networks("0.0.0.0/0"), allow_out=networks("1.1.1.1/32")), ("1.1.1.1",)),
        (EgressPolicy(allow_out=networks("1.1.1.1/32")), PUBLIC),
        (EgressPolicy(deny_out=networks("255.255.255.255/32", "9.9.9.9/32")), ("8.8.8.8", "8.8.4.4", "1.1.1.1")),
        (EgressPolicy(deny_out=networks("9.0.0.0/8", "128.0.0.0/1")), ("8.8.8.8", "8.8.4.4", "1.1.1.1")),
        (EgressPolicy(allow_internet=False, allow_out=networks("10.0.0.0/8", "255.255.255.255/32")), ()),
    ],
)
async def test_a_policy_is_in_force_from_the_start(
    lab: Lab, slots: NetworkSlots, policy: EgressPolicy, open_to: tuple[str, ...]
) -> None:
    guest = lab.guest(await slots.acquire("one", policy))

    assert await reached(guest, *PUBLIC, "10.1.2.3") == set(open_to)


async def test_a_policy_replaces_the_one_before_it(lab: Lab, slots: NetworkSlots, slot: Slot, guest: Guest) -> None:
    for policy, open_to in (
        (EgressPolicy(allow_internet=False, allow_out=networks("8.8.8.8/32")), {"8.8.8.8"}),
        (EgressPolicy(allow_internet=False, allow_out=networks("1.1.1.1/32")), {"1.1.1.1"}),
        (EgressPolicy(deny_out=networks("1.1.1.1/32")), {"8.8.8.8"}),
        (EgressPolicy(), {"8.8.8.8", "1.1.1.1"}),
    ):
        await slots.apply(slot, policy)

        assert await reached(guest, "8.8.8.8", "1.1.1.1") == open_to


async def test_an_established_connection_outlives_a_policy_that_forbids_it(
    lab: Lab, slots: NetworkSlots, slot: Slot, guest: Guest
) -> None:
    listening = lab.internet.socket()
    listening.bind(("9.9.9.9", 8080))
    listening.listen(1)
    with listening, guest.socket() as of_guest:
        await asyncio.to_thread(of_guest.connect, ("9.9.9.9", 8080))
        of_internet, _ = listening.accept()
        with of_internet:
            await slots.apply(slot, EgressPolicy(allow_internet=False))
            assert await guest.tcp("9.9.9.9") == "refused"
            for sender, receiver in ((of_guest, of_internet), (of_internet, of_guest)):
                receiver.settimeout(5)
                sender.sendall(b"still here")
                assert await asyncio.to_thread(receiver.recv, 100) == b"still here"


async def test_the_host_reaches_a_sandbox_that_may_reach_nothing(lab: Lab, slots: NetworkSlots) -> None:
    slot = await slots.acquire("one", EgressPolicy(allow_internet=False))
    lab.guest(slot)

    assert await lab.host.tcp(str(slot.address)) == str(GATEWAY_ADDRESS)


async def test_a_private_range_that_the_operator_opens_is_reached_and_its_neighbours_are_not(
    lab: Lab, tmp_path: Path, settings: NetworkSettings
) -> None:
    slots = NetworkSlots(replace(settings, allow_private=networks("10.1.0.0/16")), tmp_path)
    await slots.start()
    try:
        slot = await slots.acquire("one", OPEN)
        guest = lab.guest(slot)
        assert await reached(guest, "10.1.2.3", "192.168.5.5", "8.8.8.8") == {"10.1.2.3", "8.8.8.8"}
        await slots.apply(slot, EgressPolicy(allow_internet=False))
        assert await reached(guest, "10.1.2.3") == set()
        await slots.release(slot)
    finally:
        await slots.close()


# A VMM that was broken out of: the slot's own rules are gone


@pytest.fixture
def escaped(slot: Slot) -> Iterator[Machine]:
    """Root in the slot's namespace, with no rules there, using the slot's own address."""
    nft = Nft()
    with netns.inside(slot.netns), rtnl.Netlink() as netlink:
        nft.run("flush ruleset\n")
        netlink.do(rtnl.address(1, slot.address, 32))
        inside = netns.own_namespace()
    nft.close()
    yield Machine(inside)
    os.close(inside)


@pytest.mark.parametrize("address", PRIVATE)
async def test_even_then_what_is_not_public_is_refused(lab: Lab, slot: Slot, escaped: Machine, address: str) -> None:
    own = str(slot.address)
    assert await escaped.tcp("8.8.8.8", source=own) == str(HOST_UPLINK)

    assert await escaped.tcp(address, source=own) == "refused"
    assert await escaped.udp(address, source=own) == "refused"


async def test_even_then_host_and_neighbours_are_out_of_reach(
    lab: Lab, slots: NetworkSlots, slot: Slot, escaped: Machine
) -> None:
    host = lab.serve_on_host(PORT)
    victim = lab.guest(await slots.acquire("victim", OPEN))
    plan = network_plan(NetworkSettings(), Path("/unused"))
    there = plan.slot(2)
    for address in (HOST_UPLINK, plan.slot(slot.index).host_end, plan.dns_address, there.address, there.slot_end):
        assert await escaped.tcp(str(address), source=str(slot.address)) == "refused", address
    assert host.seen == victim.server.seen == []


async def test_even_then_the_host_does_not_listen_to_ipv6(lab: Lab, slot: Slot, escaped: Machine) -> None:
    link = f"aenv-{slot.index}"
    sysctl.write_if_known(f"ipv6/conf/{link}/disable_ipv6", "0")  # as if the host's stack took part

    def prepare() -> None:
        sysctl.write_if_known("ipv6/conf/all/disable_ipv6", "0")
        with rtnl.Netlink() as netlink:
            netlink.do(*ipv6_of_its_own("up0"))

    def send() -> None:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sending:
            sending.sendto(b"x", ("ff02::1", PORT, 0, socket.if_nametoindex("up0")))

    within(escaped.inside, prepare)
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as host, sniffed(link, lab.host.inside) as frames:
        host.bind(("::", PORT))
        host.setblocking(False)
        heard = []
        for rules in (True, False):
            if not rules:
                nft = Nft()
                nft.run("flush ruleset\n")
                nft.close()
            within(escaped.inside, send)
            heard.append(await asyncio.to_thread(hears, host))

    assert heard == [False, True]  # it was the rules
    assert 0x86DD in ether_types(frames)


def hears(host: socket.socket) -> bool:
    readable, _, _ = select.select([host], [], [], 1)
    return bool(readable)


async def test_even_then_no_other_address_can_be_used(lab: Lab, slot: Slot, escaped: Machine) -> None:
    plan = network_plan(NetworkSettings(), Path("/unused"))

    for source in (plan.slot(2).address, plan.slot(slot.index).slot_end, IPv4Address("9.9.9.9")):
        assert await escaped.udp("8.8.8.8", source=str(source)) == "silence"

    assert lab.server.seen == []
