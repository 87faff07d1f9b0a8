"""Names from inside a sandbox: the guest asks its gateway, a resolver on the host's side answers."""

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from agentenv.model.policy import EgressPolicy
from agentenv.network.contract import GATEWAY_ADDRESS
from agentenv.network.settings import NetworkSettings
from agentenv.network.slots import NetworkSlots
from tests.unit.network.lab import Guest, Lab, within
from tests.unit.network.names import address_in, answer, question

pytestmark = [pytest.mark.needs("root", "netns", "nft", "tun"), pytest.mark.slow]

RESOLVER = "10.1.2.3"  # a private address, as the resolvers of most networks are
OPEN = EgressPolicy()
CLOSED = EgressPolicy(allow_internet=False)


@pytest.fixture
def resolver(lab: Lab) -> Iterator[None]:
    """A name server in the internet, at an address that no sandbox can reach."""

    def listen() -> tuple[socket.socket, socket.socket]:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind((RESOLVER, 53))
        tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.bind((RESOLVER, 53))
        tcp.listen()
        return udp, tcp

    udp, tcp = within(lab.internet_namespace, listen)

    def serve_udp() -> None:
        while data_source := udp.recvfrom(4096):
            data, source = data_source
            if not data:
                return
            udp.sendto(answer(data), source)

    def serve_tcp() -> None:
        while True:
            connection, _ = tcp.accept()
            with connection:
                if not (head := connection.recv(2)):
                    return
                data = connection.recv(struct.unpack("!H", head)[0])
                reply = answer(data, padding=2000)
                connection.sendall(struct.pack("!H", len(reply)) + reply)

    threads = [threading.Thread(target=serve, daemon=True) for serve in (serve_udp, serve_tcp)]
    for thread in threads:
        thread.start()
    yield

    def stop() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", (RESOLVER, 53))
        socket.create_connection((RESOLVER, 53)).close()

    within(lab.internet_namespace, stop)
    for thread in threads:
        thread.join()
    udp.close()
    tcp.close()


@pytest.fixture
async def slots(lab: Lab, resolver: None, tmp_path: Path, settings: NetworkSettings) -> AsyncIterator[NetworkSlots]:
    network = NetworkSlots(replace(settings, dns_upstreams=(RESOLVER,)), tmp_path)
    await network.start()
    yield network
    await network.close()


async def resolve(guest: Guest, address: str = str(GATEWAY_ADDRESS)) -> set[str]:
    """What the guest learns over UDP and over TCP, or how that fails."""

    def over_udp() -> str:
        with guest.socket(socket.SOCK_DGRAM) as asking:
            asking.settimeout(5)  # nobody here is to meet silence: a refusal comes at once
            asking.connect((address, 53))
            asking.send(question())
            return address_in(asking.recv(4096))

    def over_tcp() -> str:
        with guest.socket() as asking:
            asking.settimeout(5)
            asking.connect((address, 53))
            asking.sendall(struct.pack("!H", len(question())) + question())
            reply = b""
            while data := asking.recv(4096):
                reply += data
                if len(reply) > 2000:
                    return address_in(reply[2:])
            raise ConnectionResetError

    outcomes = set()
    for way in (over_udp, over_tcp):
        try:
            outcomes.add(await asyncio.to_thread(way))
        except TimeoutError:
            outcomes.add("silence")
        except OSError:
            outcomes.add("refused")
    return outcomes


async def test_a_sandbox_resolves_names_through_a_resolver_it_cannot_reach(lab: Lab, slots: NetworkSlots) -> None:
    guest = lab.guest(await slots.acquire("one", OPEN))

    assert await resolve(guest) == {"192.0.2.7"}
    assert await resolve(guest, RESOLVER) == {"refused"}


@pytest.mark.parametrize(
    ("policy", "resolves"),
    [
        (CLOSED, False),
        (EgressPolicy(deny_out=(IPv4Network("0.0.0.0/0"),)), False),
        (EgressPolicy(allow_internet=False, allow_out=(IPv4Network("8.8.8.8"),)), True),
        (EgressPolicy(deny_out=(IPv4Network("8.8.8.8"),)), True),
        (EgressPolicy(deny_out=(IPv4Network("10.0.0.0/8"),)), True),
    ],
)
async def test_who_reaches_nothing_resolves_nothing(
    lab: Lab, slots: NetworkSlots, policy: EgressPolicy, resolves: bool
) -> None:
    guest = lab.guest(await slots.acquire("one", policy))

    assert await resolve(guest) == {"192.0.2.7" if resolves else "refused"}


async def test_the_right_to_resolve_comes_and_goes_with_the_policy(lab: Lab, slots: NetworkSlots) -> None:
    slot = await slots.acquire("one", OPEN)
    guest = lab.guest(slot)
    for policy, outcome in ((OPEN, "192.0.2.7"), (CLOSED, "refused"), (OPEN, "192.0.2.7")):
        await slots.apply(slot, policy)

        assert await resolve(guest) == {outcome}


async def test_an_adopted_sandbox_resolves_names_again(
    lab: Lab, slots: NetworkSlots, tmp_path: Path, settings: NetworkSettings
) -> None:
    slot = await slots.acquire("one", OPEN)
    guest = lab.guest(slot)
    await slots.close()
    assert await resolve(guest) == {"refused"}

    successor = NetworkSlots(replace(settings, dns_upstreams=(RESOLVER,)), tmp_path)
    await successor.start()
    try:
        assert "192.0.2.7" not in await resolve(guest)
        await successor.adopt("one", slot.index, OPEN)
        assert await resolve(guest) == {"192.0.2.7"}
    finally:
        await successor.close()
