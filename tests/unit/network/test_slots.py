"""Slots on this host: they leave nothing behind, survive a restart, and say what a host lacks."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Coroutine
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from agentenv.aio.failpoints import REGISTRY, Raise
from agentenv.model.errors import Conflict, NotFound, Unavailable, Unsupported
from agentenv.model.policy import EgressPolicy
from agentenv.network import host, maker, netns, nft, rtnl, sysctl, tap
from agentenv.network.contract import GATEWAY_ADDRESS, GATEWAY_MAC, GUEST_ADDRESS, GUEST_MAC, TAP_NAME
from agentenv.network.nft import Nft
from agentenv.network.settings import NetworkSettings
from agentenv.network.slots import NetworkSlots
from agentenv.testing.clock import JumpingClock
from tests.unit.network.lab import HOST_UPLINK, Lab, wait_for_carrier

pytestmark = [pytest.mark.needs("root", "netns", "nft", "tun"), pytest.mark.slow]

OPEN = EgressPolicy()
CLOSED = EgressPolicy(allow_internet=False)
CYCLES = 200
IFF_NOARP = 0x80


def tables() -> set[str]:
    firewall = Nft()
    try:
        listing = json.loads(firewall.read("list tables"))["nftables"]
    finally:
        firewall.close()
    return {entry["table"]["name"] for entry in listing if "table" in entry}


def tracked(address: IPv4Address) -> int:
    return Path("/proc/thread-self/net/nf_conntrack").read_text().count(f"={address} ")


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def kept(runtime: Path) -> list[str]:
    return sorted(path.name for path in (runtime / "netns").iterdir())


async def as_time_passes(clock: JumpingClock, work: Coroutine[object, object, None]) -> None:
    working = asyncio.create_task(work)
    async with asyncio.timeout(20):
        while not working.done():
            await clock.advance(0.1)
            await asyncio.sleep(0.001)
    await working


async def clean(lab: Lab, before: dict[str, list[str]], runtime: Path) -> None:
    """Fails unless the host is as it was. A kernel may take a moment to remove a link."""
    async with asyncio.timeout(10):
        while lab.host_sees() != before:
            await asyncio.sleep(0.01)
    assert kept(runtime) == []
    assert tables() == set()


# Nothing stays


async def test_two_hundred_slots_leave_nothing(lab: Lab, tmp_path: Path) -> None:
    before, descriptors = lab.host_sees(), open_descriptors()
    slots = NetworkSlots(NetworkSettings(warm_low=4, warm_high=8), tmp_path)
    await slots.start()
    for cycle in range(CYCLES // 4):
        batch = await asyncio.gather(*(slots.acquire(f"{cycle}-{n}", CLOSED if n % 2 else OPEN) for n in range(4)))
        for slot in batch:
            await slots.release(slot)
    await slots.settled()
    assert slots.statistics().slots.removed == CYCLES
    await slots.close()

    await clean(lab, before, tmp_path)
    assert open_descriptors() == descriptors


async def test_a_released_slot_is_gone_with_its_connections(lab: Lab, slots: NetworkSlots, tmp_path: Path) -> None:
    slot = await slots.acquire("one", OPEN)
    guest = lab.guest(slot)
    assert await guest.tcp("8.8.8.8") == str(HOST_UPLINK)
    assert await guest.udp("1.1.1.1") == str(HOST_UPLINK)
    assert await lab.host.tcp(str(slot.address)) == str(GATEWAY_ADDRESS)
    assert tracked(slot.address) >= 3
    guest.close()

    await slots.release(slot)
    await slots.settled()

    assert tracked(slot.address) == 0
    assert f"aenv-{slot.index}" not in lab.host_sees()["links"] + kept(tmp_path)


async def test_a_slot_goes_even_if_something_still_runs_in_it(
    lab: Lab, tmp_path: Path, settings: NetworkSettings
) -> None:
    clock = JumpingClock()
    slots = NetworkSlots(settings, tmp_path, clock=clock)
    await slots.start()
    slot = await slots.acquire("one", OPEN)
    lab.guest(slot)  # holds the tap, and with it the namespace
    with netns.inside(slot.netns):
        holder = netns.own_namespace()

    await slots.release(slot)
    await as_time_passes(clock, slots.settled())

    assert f"aenv-{slot.index}" not in lab.host_sees()["links"]
    os.close(holder)
    await as_time_passes(clock, slots.close())


@pytest.mark.parametrize("step", maker.STEPS)
async def test_a_slot_that_fails_half_way_leaves_nothing_and_the_next_is_made(
    lab: Lab, slots: NetworkSlots, tmp_path: Path, step: str
) -> None:
    first, second = [await slots.acquire(name, OPEN) for name in ("one", "two")]
    async with asyncio.timeout(10):
        while slots.statistics().pool.warm < 2:
            await asyncio.sleep(0.001)
        before, files = lab.host_sees(), kept(tmp_path)
        with REGISTRY.armed(f"slot.{step}", Raise(OSError(28, "injected"))):
            third, fourth = [await slots.acquire(name, OPEN) for name in ("three", "four")]
            while slots.statistics().slots.failures == 0 or slots.statistics().pool.warm < 2:
                await asyncio.sleep(0.001)
    for slot in (first, second, third, fourth):
        await slots.release(slot)
    await slots.settled()
    await slots.reconcile([])

    assert len(kept(tmp_path)) == slots.statistics().pool.warm
    assert len(lab.host_sees()["links"]) == len(before["links"]) - len(files) + slots.statistics().pool.warm


@pytest.mark.parametrize("step", maker.STEPS)
async def test_a_host_on_which_no_slot_can_be_made_is_reported_at_start_and_left_as_it_was(
    lab: Lab, tmp_path: Path, settings: NetworkSettings, step: str
) -> None:
    before = lab.host_sees()
    slots = NetworkSlots(settings, tmp_path)
    with REGISTRY.armed(f"slot.{step}", Raise(OSError(1, "injected"))), pytest.raises(Unsupported, match="injected"):
        await slots.start()

    await clean(lab, before, tmp_path)
    await slots.start()  # the lock is free, and so is all else
    await slots.close()


async def test_a_policy_that_cannot_be_applied_gives_the_slot_back(
    lab: Lab, slots: NetworkSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Nft, text: str) -> None:
        raise Unavailable("injected")

    await slots.acquire("one", OPEN)
    with monkeypatch.context() as patched:
        patched.setattr(Nft, "run", refuse)
        with pytest.raises(Unavailable, match="injected"):
            await slots.acquire("two", CLOSED)

    assert set(slots.held()) == {"one"}
    assert (await slots.acquire("two", CLOSED)).owner == "two"


# What it looks like


async def test_a_guest_finds_the_link_that_is_in_its_snapshot(lab: Lab, slots: NetworkSlots) -> None:
    slot = await slots.acquire("one", OPEN)
    with netns.inside(slot.netns), rtnl.Netlink() as netlink:
        links = {link.get_attr("IFLA_IFNAME"): link for link in netlink.dump(rtnl.all_links())}
        index = links[TAP_NAME]["index"]
        addresses = {
            (address.get_attr("IFA_LOCAL"), address["prefixlen"])
            for address in netlink.dump(rtnl.all_addresses())
            if address["index"] == index
        }
        neighbours = Path("/proc/thread-self/net/arp").read_text()
        ipv6 = sysctl.read("ipv6/conf/all/disable_ipv6")

    assert set(links) == {"lo", "tap0", "up0"}
    assert not links[TAP_NAME]["flags"] & IFF_NOARP
    assert links["up0"]["flags"] & IFF_NOARP
    assert links[TAP_NAME].get_attr("IFLA_ADDRESS") == GATEWAY_MAC
    assert addresses == {(str(GATEWAY_ADDRESS), 30)}
    known = next(line.split() for line in neighbours.splitlines() if line.startswith(f"{GUEST_ADDRESS} "))
    assert (known[2], known[3], known[5]) == ("0x6", GUEST_MAC, TAP_NAME)  # complete and permanent: never asked for
    assert ipv6 in ("1", None)


# A restart of the server


async def test_connections_of_an_adopted_sandbox_go_on(
    lab: Lab, slots: NetworkSlots, tmp_path: Path, settings: NetworkSettings
) -> None:
    slot = await slots.acquire("one", OPEN)
    guest = lab.guest(slot)
    listening = lab.internet.socket()
    listening.bind(("9.9.9.9", 8080))
    listening.listen(1)
    with listening, guest.socket() as of_guest:
        await asyncio.to_thread(of_guest.connect, ("9.9.9.9", 8080))
        of_internet, _ = listening.accept()
        with of_internet:
            await slots.close()
            assert await guest.tcp("10.1.2.3") == "refused"  # no server, but its rules
            assert await guest.tcp("8.8.8.8") == str(HOST_UPLINK)

            successor = NetworkSlots(settings, tmp_path)
            await successor.start()
            adopted = await successor.adopt("one", slot.index, CLOSED)
            assert adopted == slot

            assert await guest.tcp("8.8.8.8") == "refused"
            assert await lab.host.tcp(str(slot.address)) == str(GATEWAY_ADDRESS)
            of_internet.settimeout(5)
            of_guest.sendall(b"still here")
            assert await asyncio.to_thread(of_internet.recv, 100) == b"still here"
    guest.close()
    await successor.release(adopted)
    await successor.close()
    assert kept(tmp_path) == []


async def test_a_link_that_was_lost_is_made_again_at_adoption(
    lab: Lab, slots: NetworkSlots, tmp_path: Path, settings: NetworkSettings
) -> None:
    slot = await slots.acquire("one", OPEN)
    guest = lab.guest(slot)
    await slots.close()
    maker.detach([f"aenv-{slot.index}"])

    successor = NetworkSlots(settings, tmp_path)
    await successor.start()
    await successor.adopt("one", slot.index, OPEN)
    with netns.inside(slot.netns):
        wait_for_carrier("up0")

    assert await guest.tcp("8.8.8.8") == str(HOST_UPLINK)
    assert await lab.host.tcp(str(slot.address)) == str(GATEWAY_ADDRESS)
    await successor.close()


async def test_a_namespace_that_is_gone_cannot_be_adopted_and_its_remains_go(
    lab: Lab, slots: NetworkSlots, tmp_path: Path, settings: NetworkSettings
) -> None:
    slot = await slots.acquire("one", OPEN)
    await slots.close()
    netns.remove(slot.netns)
    slot.netns.touch()  # as after a reboot: the file, and nothing mounted on it

    successor = NetworkSlots(settings, tmp_path)
    await successor.start()
    with pytest.raises(NotFound):
        await successor.adopt("one", slot.index, OPEN)
    await successor.settled()

    assert slot.netns.name not in kept(tmp_path)
    assert successor.held() == {}
    await successor.close()


VICTIM = """
import asyncio, sys
from pathlib import Path
from agentenv.logs import only_problems
from agentenv.model.policy import EgressPolicy
from agentenv.network.settings import NetworkSettings
from agentenv.network.slots import NetworkSlots

async def main():
    only_problems()  # its standard output is what the test reads
    slots = NetworkSlots(NetworkSettings(warm_low=2, warm_high=2), Path(sys.argv[1]))
    await slots.start()
    for name in ("one", "two"):
        print((await slots.acquire(name, EgressPolicy())).index, flush=True)
    while True:  # on and on, to be killed at whatever moment
        slot = await slots.acquire("three", EgressPolicy())
        await slots.release(slot)
        print("more", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("lines", [2, 3, 7, 20])
async def test_what_a_killed_server_left_is_removed_by_the_next(
    lab: Lab, tmp_path: Path, settings: NetworkSettings, lines: int
) -> None:
    before = lab.host_sees()
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", VICTIM, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert killed.stdout is not None
    said = [await killed.stdout.readline() for _ in range(lines)]
    killed.kill()
    await killed.communicate()
    (tmp_path / "netns" / "aenv-99999").touch()  # of wider ranges
    (tmp_path / "netns" / "other-7").touch()  # of another prefix

    successor = NetworkSlots(settings, tmp_path)
    await successor.start()
    adopted = await successor.adopt("one", int(said[0]), OPEN)
    left = len([name for name in kept(tmp_path) if name != adopted.netns.name])
    removed = await successor.reconcile([adopted.index])

    assert removed >= left - successor.statistics().pool.warm
    assert set(kept(tmp_path)) - {adopted.netns.name} == {
        f"aenv-{index}"
        for index in successor._parts.slots._pool.own() - {adopted.index}  # type: ignore[union-attr]
    }
    await successor.release(adopted)
    await successor.close()
    await clean(lab, before, tmp_path)


# Two servers, and other users of the host


async def test_two_servers_live_side_by_side(lab: Lab, slots: NetworkSlots, tmp_path: Path) -> None:
    settings = NetworkSettings(
        name_prefix="aenvb", address_cidr=IPv4Network("10.21.0.0/16"), veth_cidr=IPv4Network("10.22.0.0/16"), warm_low=1
    )
    other = NetworkSlots(settings, tmp_path / "other")
    await other.start()
    mine, theirs = await slots.acquire("one", OPEN), await other.acquire("one", OPEN)
    my_guest, their_guest = lab.guest(mine), lab.guest(theirs)

    assert await my_guest.tcp("8.8.8.8") == await their_guest.tcp("8.8.8.8") == str(HOST_UPLINK)
    assert await my_guest.tcp(str(theirs.address)) == await their_guest.tcp(str(mine.address)) == "refused"

    assert await other.reconcile([theirs.index]) == 0
    their_guest.close()
    await other.release(theirs)
    await other.close()
    assert await my_guest.tcp("8.8.8.8") == str(HOST_UPLINK)
    assert tables() == {"aenv"}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, "prefix aenv"),
        ({"address_cidr": IPv4Network("10.21.0.0/16"), "veth_cidr": IPv4Network("10.22.0.0/16")}, "prefix aenv"),
        ({"name_prefix": "other"}, "10.11.0.0/16"),
        (
            {
                "name_prefix": "other",
                "address_cidr": IPv4Network("10.12.128.0/20"),
                "veth_cidr": IPv4Network("10.22.0.0/16"),
            },
            "10.12",
        ),
    ],
)
async def test_a_second_server_with_the_same_names_or_ranges_is_told_who_has_them(
    lab: Lab, slots: NetworkSlots, tmp_path: Path, settings: NetworkSettings, change: dict[str, object], names: str
) -> None:
    async with asyncio.timeout(10):
        while slots.statistics().pool.warm < settings.warm_high:
            await asyncio.sleep(0.001)
    before = lab.host_sees()
    second = NetworkSlots(replace(settings, **change), tmp_path / "second")  # type: ignore[arg-type]

    with pytest.raises(Conflict, match=names) as refused:
        await second.start()

    assert str(os.getpid()) in refused.value.message
    assert lab.host_sees() == before
    assert tables() == {"aenv"}


@pytest.mark.parametrize("by", ["address", "route"])
async def test_a_range_that_the_host_uses_is_refused_with_one_that_is_free(
    lab: Lab, tmp_path: Path, settings: NetworkSettings, by: str
) -> None:
    link = rtnl.need_link("eth0")
    with rtnl.Netlink() as netlink:
        if by == "address":
            netlink.do(rtnl.address(link, IPv4Address("10.11.7.1"), 24))
        else:
            netlink.do(rtnl.route_via(IPv4Network("10.0.0.0/8"), IPv4Address("203.0.113.1")))
    before = lab.host_sees()

    with pytest.raises(Conflict, match="eth0") as refused:
        await NetworkSlots(settings, tmp_path).start()

    assert refused.value.hint is not None
    free = [IPv4Network(word) for word in refused.value.hint.split() if "/" in word]
    assert len(free) == 2
    assert lab.host_sees() == before
    again = NetworkSlots(replace(settings, address_cidr=free[0], veth_cidr=free[1]), tmp_path)
    await again.start()
    await again.close()


async def test_rules_that_someone_flushed_are_put_back(lab: Lab, tmp_path: Path, settings: NetworkSettings) -> None:
    clock = JumpingClock()
    slots = NetworkSlots(settings, tmp_path, clock=clock)
    await slots.start()
    guest = lab.guest(await slots.acquire("one", OPEN))
    firewall = Nft()
    firewall.run("flush ruleset\n")
    firewall.close()
    sysctl.write("ipv4/ip_forward", "0")

    async with asyncio.timeout(10):
        while slots.statistics().repairs == 0:
            await clock.advance(30)
            await asyncio.sleep(0.001)

    assert await guest.tcp("8.8.8.8") == str(HOST_UPLINK)
    assert await guest.tcp("10.1.2.3") == "refused"
    await as_time_passes(clock, slots.close())


@pytest.mark.parametrize("docker", [False, True])
async def test_a_firewall_that_drops_by_default_lets_sandboxes_through_and_is_left_as_it_was(
    lab: Lab, tmp_path: Path, settings: NetworkSettings, docker: bool
) -> None:
    firewall = Nft()
    room = "chain DOCKER-USER {\nreturn\n}\n" if docker else ""
    jump = "jump DOCKER-USER\n" if docker else ""
    firewall.run(
        f"table ip filter {{\n{room}"
        "chain INPUT {\ntype filter hook input priority filter; policy drop\n}\n"
        f"chain FORWARD {{\ntype filter hook forward priority filter; policy drop\n{jump}}}\n}}\n"
    )
    before = firewall.read("list table ip filter")
    slots = NetworkSlots(settings, tmp_path)
    await slots.start()
    slot = await slots.acquire("one", OPEN)
    guest = lab.guest(slot)
    with_ours = firewall.read("list table ip filter")

    assert await guest.tcp("8.8.8.8") == str(HOST_UPLINK)
    assert await guest.tcp("10.1.2.3") == "refused"
    assert await guest.tcp(str(HOST_UPLINK)) == "refused"
    assert (with_ours.count('"aenv-*"'), with_ours.count('"accept"')) == (3, 3)

    guest.close()
    await slots.release(slot)
    await slots.close()
    assert without_handles(firewall.read("list table ip filter")) == without_handles(before)
    firewall.close()


def without_handles(listing: str) -> object:
    return [
        {kind: {key: value for key, value in thing.items() if key != "handle"} for kind, thing in entry.items()}
        for entry in json.loads(listing)["nftables"]
    ]


# What a host may lack


async def test_a_host_without_nftables_says_so(
    lab: Lab, tmp_path: Path, settings: NetworkSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = lab.host_sees()
    monkeypatch.setattr(nft, "LIBRARY", "libnosuchthing.so.1")

    with pytest.raises(Unsupported, match="libnosuchthing") as refused:
        await NetworkSlots(settings, tmp_path).start()

    assert refused.value.hint is not None
    assert lab.host_sees() == before


@pytest.mark.parametrize(("device", "hint"), [("/nonexistent/tun", "modprobe tun"), ("/", "access to the device")])
async def test_a_host_without_taps_says_so(
    lab: Lab, tmp_path: Path, settings: NetworkSettings, monkeypatch: pytest.MonkeyPatch, device: str, hint: str
) -> None:
    before = lab.host_sees()
    monkeypatch.setattr(tap, "DEVICE", device)

    with pytest.raises(Unsupported, match=device) as refused:
        await NetworkSlots(settings, tmp_path).start()

    assert hint in str(refused.value.hint)
    assert lab.host_sees() == before


async def test_a_server_without_capabilities_says_which_it_lacks(
    lab: Lab, tmp_path: Path, settings: NetworkSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = lab.host_sees()
    monkeypatch.setattr(host, "STATUS", tmp_path / "status")
    (tmp_path / "status").write_text("Name:\tpython\nCapEff:\t0000000000001000\n")

    with pytest.raises(Unsupported, match=r"without CAP_SYS_ADMIN$") as refused:
        await NetworkSlots(settings, tmp_path).start()

    assert "root" in str(refused.value.hint)
    assert lab.host_sees() == before


async def test_forwarding_that_cannot_be_turned_on_is_said(
    lab: Lab, tmp_path: Path, settings: NetworkSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, value: str) -> None:
        raise OSError(30, "Read-only file system")

    sysctl.write("ipv4/ip_forward", "0")
    before = lab.host_sees()
    monkeypatch.setattr(sysctl, "write", refuse)

    with pytest.raises(Unsupported, match="forward") as refused:
        await NetworkSlots(settings, tmp_path).start()

    assert "ip_forward=1" in str(refused.value.hint)
    await clean(lab, before, tmp_path)


async def test_a_taken_port_of_the_forwarder_is_said_and_nothing_stays(
    lab: Lab, tmp_path: Path, settings: NetworkSettings
) -> None:
    before = lab.host_sees()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("0.0.0.0", settings.dns_port))

        with pytest.raises(Conflict, match=str(settings.dns_port)):
            await NetworkSlots(settings, tmp_path).start()

    await clean(lab, before, tmp_path)
