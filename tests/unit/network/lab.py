"""A host, an internet and guests made of network namespaces, for tests of the real slots.

The test's own thread *is* the host: it moves into a namespace of its own, and every
thread it starts begins there. Nothing reaches the machine's real network.
"""

import asyncio
import errno
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import ioctl
from functools import partial
from ipaddress import IPv4Address
from typing import TypeVar

from agentenv.network import netns, rtnl, sysctl
from agentenv.network.contract import GATEWAY_ADDRESS, GUEST_ADDRESS, GUEST_MAC, TAP_NAME, Slot

T = TypeVar("T")

HOST_UPLINK = IPv4Address("203.0.113.2")
GATEWAY = IPv4Address("203.0.113.1")
UPLINK_MTU = 1400
PUBLIC = ("8.8.8.8", "8.8.4.4", "1.1.1.1", "9.9.9.9")
PRIVATE = ("10.1.2.3", "100.64.3.3", "172.16.9.9", "192.168.5.5", "169.254.169.254", "198.18.0.9", "168.63.129.16")
PORT = 7777

_TUNSETIFF = 0x4004_54CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_IFF_RUNNING = 0x40
_FRAME_BYTES = 4096
_ANSWER_S = 5.0
_SILENCE_S = 1.0  # longer than any answer takes in here: the packet was dropped
_TCP_SILENCE_S = 2.5  # two more tries
_REFUSALS = {errno.EHOSTUNREACH: "refused", errno.ECONNREFUSED: "refused", errno.ENETUNREACH: "no route"}


def within(namespace: int, function: Callable[[], T]) -> T:
    """What *function* returns on a thread of its own inside *namespace*."""
    outcome: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            netns.enter(namespace)
            outcome.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return outcome[0]


@contextmanager
def namespace() -> Iterator[int]:
    """A descriptor of a new namespace; it is gone after the block, if nothing is left in it."""
    home = netns.own_namespace()

    def make() -> int:
        netns.unshare()
        return netns.own_namespace()

    try:
        made = within(home, make)
    finally:
        os.close(home)
    try:
        yield made
    finally:
        os.close(made)


class Server:
    """Answers on `PORT` over UDP and TCP, and on *dns_port* as a name server might, on every address of a namespace.

    The answer is the address that the question came from. `seen` keeps (protocol, target, source).
    """

    def __init__(self, inside: int, *ports: int) -> None:
        self.seen: list[tuple[str, str, str]] = []
        self._selector = selectors.DefaultSelector()
        self._stop, self._stopped = os.pipe()
        self._selector.register(self._stop, selectors.EVENT_READ, None)
        for port in ports or (PORT,):
            udp = within(inside, partial(_udp_server, port))
            tcp = within(inside, partial(_tcp_server, port))
            self._selector.register(udp, selectors.EVENT_READ, self._answer_udp)
            self._selector.register(tcp, selectors.EVENT_READ, self._answer_tcp)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.write(self._stopped, b"x")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._stop)
        os.close(self._stopped)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                with suppress(OSError):
                    key.data(key.fileobj)

    def _answer_udp(self, server: socket.socket) -> None:
        data, ancillary, _, source = server.recvmsg(2048, 256)
        target = next(IPv4Address(info[8:12]) for _, _, info in ancillary)
        self.seen.append(("udp", str(target), source[0]))
        # From the address that was asked, as a connected asker wants it.
        where = struct.pack("=I4s4s", 0, target.packed, bytes(4))
        server.sendmsg([source[0].encode() + b" " + data], [(socket.IPPROTO_IP, 8, where)], 0, source)

    def _answer_tcp(self, server: socket.socket) -> None:
        connection, source = server.accept()
        with connection:
            self.seen.append(("tcp", connection.getsockname()[0], source[0]))
            connection.sendall(source[0].encode())


def _udp_server(port: int) -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.setsockopt(socket.IPPROTO_IP, 8, 1)  # IP_PKTINFO
    server.bind(("0.0.0.0", port))
    return server


def _tcp_server(port: int) -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("0.0.0.0", port))
    server.listen(64)
    return server


class Machine:
    """Whoever can ask: a guest, the internet, or the host."""

    def __init__(self, inside: int) -> None:
        self.inside = inside

    async def udp(self, address: str, port: int = PORT, *, source: str | None = None) -> str:
        """The address that the other side saw, or "refused", "no route" or "silence"."""
        return await asyncio.to_thread(self._ask, socket.SOCK_DGRAM, address, port, source)

    async def tcp(self, address: str, port: int = PORT, *, source: str | None = None) -> str:
        return await asyncio.to_thread(self._ask, socket.SOCK_STREAM, address, port, source)

    def socket(self, kind: int = socket.SOCK_STREAM) -> socket.socket:
        return within(self.inside, lambda: socket.socket(socket.AF_INET, kind))

    def _ask(self, kind: int, address: str, port: int, source: str | None) -> str:
        with self.socket(kind) as asking:
            asking.settimeout(_SILENCE_S if kind == socket.SOCK_DGRAM else _TCP_SILENCE_S)
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            try:
                if source is not None:
                    asking.setsockopt(socket.IPPROTO_IP, 19, 1)  # IP_TRANSPARENT: any source, ours or not
                    asking.bind((source, 0))
                asking.connect((address, port))
                asking.settimeout(_ANSWER_S if kind == socket.SOCK_STREAM else _SILENCE_S)
                if kind == socket.SOCK_DGRAM:
                    asking.send(b"hello")
                return asking.recv(2048).decode().partition(" ")[0]
            except TimeoutError:
                return "silence"
            except OSError as error:
                return _REFUSALS.get(error.errno or 0) or os.strerror(error.errno or 0)


class Guest(Machine):
    """A machine behind a slot's tap: what a VMM is to the network. Answers on `PORT`."""

    def __init__(self, slot: Slot, inside: int) -> None:
        super().__init__(inside)
        with netns.inside(slot.netns):
            self._outer = _open_tap(TAP_NAME)
        self._inner = within(inside, _guest_link)
        self._stop, self._stopped = os.pipe()
        self._pump = threading.Thread(target=self._run, daemon=True)
        self._pump.start()
        with netns.inside(slot.netns):
            wait_for_carrier(TAP_NAME)
        within(inside, lambda: wait_for_carrier("eth0"))
        self.server = Server(inside)

    def close(self) -> None:
        """As when a VMM is killed. Idempotent."""
        if not self._pump.is_alive():
            return
        self.server.close()
        os.write(self._stopped, b"x")
        self._pump.join()
        for descriptor in (self._outer, self._inner, self._stop, self._stopped):
            os.close(descriptor)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._outer, selectors.EVENT_READ, self._inner)
            selector.register(self._inner, selectors.EVENT_READ, self._outer)
            selector.register(self._stop, selectors.EVENT_READ, None)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    with suppress(OSError):
                        os.write(key.data, os.read(key.fd, _FRAME_BYTES))


def _open_tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return tap


def wait_for_carrier(name: str) -> None:
    """A link that has just come up drops what it is given until the kernel has noticed."""
    index = rtnl.need_link(name)
    give_up = time.monotonic() + _ANSWER_S
    with rtnl.Netlink() as netlink:
        while time.monotonic() < give_up:
            links = {link["index"]: link for link in netlink.dump(rtnl.all_links())}
            if links[index]["flags"] & _IFF_RUNNING and links[index].get_attr("IFLA_QDISC") != "noop":
                return
    raise TimeoutError(f"{name} has no carrier")


def _guest_link() -> int:
    """A guest's eth0, configured as the guest's kernel would: it finds its gateway by ARP."""
    tap = _open_tap("eth0")
    with rtnl.Netlink() as netlink:
        link = rtnl.need_link("eth0")
        netlink.do(
            rtnl.set_up(1),
            rtnl.set_up(link, mac=GUEST_MAC),
            rtnl.address(link, GUEST_ADDRESS, 30),
            rtnl.default_route(link, GATEWAY_ADDRESS),
        )
    return tap


class Lab:
    """The host (this thread), and an internet with public and private addresses in it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.internet_namespace = stack.enter_context(namespace())
        self.host = Machine(stack.enter_context(_moved()))
        self.internet = Machine(self.internet_namespace)
        self._cable()
        self.server = Server(self.internet_namespace)
        stack.callback(self.server.close)

    def guest(self, slot: Slot) -> Guest:
        guest = Guest(slot, self._stack.enter_context(namespace()))
        self._stack.callback(guest.close)
        return guest

    def serve_on_host(self, *ports: int) -> Server:
        server = Server(self.host.inside, *ports)
        self._stack.callback(server.close)
        return server

    def host_sees(self) -> dict[str, list[str]]:
        """Everything on the host that slots could leave behind, by kind."""
        with rtnl.Netlink() as netlink:
            links = netlink.dump(rtnl.all_links())
            routes = netlink.dump(rtnl.all_routes())
            addresses = netlink.dump(rtnl.all_addresses())
        return {
            "links": sorted(str(link.get_attr("IFLA_IFNAME")) for link in links),
            "routes": sorted(f"{route.get_attr('RTA_DST')}/{route['dst_len']}" for route in routes),
            "addresses": sorted(str(address.get_attr("IFA_LOCAL")) for address in addresses),
        }

    def _cable(self) -> None:
        with rtnl.Netlink() as host:
            host.do(
                rtnl.set_up(1),
                rtnl.veth(
                    "eth0",
                    "02:00:00:00:00:02",
                    UPLINK_MTU,
                    peer="net0",
                    peer_mac="02:00:00:00:00:01",
                    peer_netns=self.internet_namespace,
                ),
            )
            within(self.internet_namespace, _set_up_internet)
            link = rtnl.need_link("eth0")
            host.do(rtnl.set_up(link), rtnl.address(link, HOST_UPLINK, 24), rtnl.default_route(link, GATEWAY))


@contextmanager
def _moved() -> Iterator[int]:
    """This thread is in a new namespace for the length of the block."""
    home = netns.own_namespace()
    netns.unshare()
    try:
        there = netns.own_namespace()
        try:
            yield there
        finally:
            os.close(there)
    finally:
        netns.enter(home)
        os.close(home)


def _set_up_internet() -> None:
    sysctl.write("ipv4/ip_forward", "1")
    with rtnl.Netlink() as netlink:
        link = rtnl.need_link("net0")
        everywhere = [rtnl.address(1, IPv4Address(address), 32) for address in (*PUBLIC, *PRIVATE)]
        netlink.do(rtnl.set_up(1), rtnl.set_up(link), rtnl.address(link, GATEWAY, 24), *everywhere)


@contextmanager
def laid_out() -> Iterator[Lab]:
    with ExitStack() as stack:
        yield Lab(stack)
