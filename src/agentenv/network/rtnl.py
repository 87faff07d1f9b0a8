"""Links, addresses, routes and neighbours of one network namespace, over netlink.

A socket belongs to the namespace its thread was in when it was opened, wherever
the thread goes later. Messages are encoded by pyroute2 and sent in one piece: the
kernel works through them in order, and a slot's dozen of changes cost one call.
(pyroute2's own sockets run an event loop each, and not under uvloop.)
"""

import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network
from types import TracebackType
from typing import Any, Final, Self

from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

# From linux/netlink.h and linux/rtnetlink.h
_NETLINK_ROUTE: Final = 0
_SOL_NETLINK: Final = 270
_NETLINK_CAP_ACK: Final = 10
_NETLINK_EXT_ACK: Final = 11
_NLMSG_ERROR: Final = 2
_NLMSG_DONE: Final = 3
_ERROR_TEXT: Final = 1
REQUEST: Final = 0x1
ACK: Final = 0x4
REPLACE: Final = 0x100
EXCLUSIVE: Final = 0x200
CREATE: Final = 0x400
DUMP: Final = 0x300
_DUMP_INTERRUPTED: Final = 0x10

_NEWLINK, _DELLINK, _GETLINK = 16, 17, 18
_NEWADDR, _GETADDR = 20, 22
_NEWROUTE, _DELROUTE, _GETROUTE = 24, 25, 26
_NEWNEIGH: Final = 28

_IFF_UP: Final = 0x1
_IFF_NOARP: Final = 0x80
_NUD_PERMANENT: Final = 0x80
_RTNH_ONLINK: Final = 0x4
_SCOPE_LINK: Final = 253
_SCOPE_UNIVERSE: Final = 0
_TABLE_MAIN: Final = 254
_UNICAST: Final = 1
UNREACHABLE: Final = 7

_ANSWER_TIMEOUT_S: Final = 5.0
_RECEIVE_BYTES: Final = 1 << 18
_DUMP_TRIES: Final = 8

# pyroute2 is not typed: its messages are dictionaries that can encode themselves.
Message = Any


class Netlink:
    """One netlink socket. Errors of the kernel are raised as `OSError`, with its words if it had any."""

    def __init__(self, family: int = _NETLINK_ROUTE) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, family)
        try:
            self._socket.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
            self._socket.setsockopt(_SOL_NETLINK, _NETLINK_EXT_ACK, 1)
            self._socket.settimeout(_ANSWER_TIMEOUT_S)
            self._socket.bind((0, 0))
        except BaseException:
            self._socket.close()
            raise
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def do(self, *messages: Message) -> None:
        """Let the kernel carry out *messages* in order.

        One that fails does not stop those after it; the first failure is raised when all have been tried.
        """
        waiting = {}
        packet = bytearray()
        for message in messages:
            packet += self._encode(message, ACK)
            waiting[self._sequence] = message
        self._socket.send(packet)
        failure: OSError | None = None
        while waiting:
            for kind, _, sequence, payload in self._receive():
                if kind == _NLMSG_ERROR and waiting.pop(sequence, None) is not None:
                    failure = failure or _failure(payload)
        if failure is not None:
            raise failure

    def dump(self, request: Message) -> list[Message]:
        """Everything of the kind that *request* asks for, decoded."""
        for _ in range(_DUMP_TRIES):
            found = self._dump_once(request)
            if found is not None:
                return found
        raise OSError(errno.EAGAIN, "the kernel's tables did not stand still long enough to be read")

    def _dump_once(self, request: Message) -> list[Message] | None:
        self._socket.send(self._encode(request, DUMP))
        found: list[Message] = []
        whole = True
        while True:
            for kind, flags, sequence, payload in self._receive():
                if sequence != self._sequence:
                    continue
                whole = whole and not flags & _DUMP_INTERRUPTED
                if kind == _NLMSG_ERROR and (failure := _failure(payload)) is not None:
                    raise failure
                if kind == _NLMSG_DONE:
                    return found if whole else None
                answer = type(request)(_packed(kind, flags, sequence, payload))
                answer.decode()
                found.append(answer)

    def _encode(self, message: Message, flags: int) -> bytes:
        self._sequence += 1
        message["header"]["flags"] |= REQUEST | flags
        message["header"]["sequence_number"] = self._sequence
        message.reset()
        message.encode()
        return bytes(message.data)

    def _receive(self) -> Iterator[tuple[int, int, int, bytes]]:
        """The parts of the next datagram: type, flags, sequence number, payload."""
        data = self._socket.recv(_RECEIVE_BYTES)
        offset = 0
        while offset + 16 <= len(data):
            length, kind, flags, sequence, _ = struct.unpack_from("=IHHII", data, offset)
            if length < 16:
                break
            yield kind, flags, sequence, data[offset + 16 : offset + length]
            offset += (length + 3) & ~3


def veth(name: str, mac: str, mtu: int, *, peer: str, peer_mac: str, peer_netns: int) -> Message:
    """A new veth pair: *name* here, *peer* in the namespace of the descriptor *peer_netns*."""
    other = [("IFLA_IFNAME", peer), ("IFLA_ADDRESS", peer_mac), ("IFLA_MTU", mtu), ("IFLA_NET_NS_FD", peer_netns)]
    info = [("IFLA_INFO_KIND", "veth"), ("IFLA_INFO_DATA", {"attrs": [("VETH_INFO_PEER", {"attrs": other})]})]
    attributes = [("IFLA_IFNAME", name), ("IFLA_ADDRESS", mac), ("IFLA_MTU", mtu), ("IFLA_LINKINFO", {"attrs": info})]
    return _message(ifinfmsg, _NEWLINK, CREATE | EXCLUSIVE, attributes)


def new_link(name: str, kind: str) -> Message:
    return _message(
        ifinfmsg,
        _NEWLINK,
        CREATE | EXCLUSIVE,
        [("IFLA_IFNAME", name), ("IFLA_LINKINFO", {"attrs": [("IFLA_INFO_KIND", kind)]})],
    )


def set_up(link: int, *, mac: str | None = None, arp: bool = True) -> Message:
    """Bring the link with index *link* up, with another address if *mac* is given.

    Without *arp* the link neither asks nor answers: both ends know each other by `neighbour`.
    """
    attributes = [("IFLA_ADDRESS", mac)] if mac else []
    flags = _IFF_UP if arp else _IFF_UP | _IFF_NOARP
    return _message(ifinfmsg, _NEWLINK, 0, attributes, index=link, flags=flags, change=_IFF_UP | _IFF_NOARP)


def delete_link(name: str) -> Message:
    return _message(ifinfmsg, _DELLINK, 0, [("IFLA_IFNAME", name)])


def address(link: int, own: IPv4Address, prefix_length: int) -> Message:
    """Give the link an address, unless it has it."""
    attributes = [("IFA_LOCAL", str(own)), ("IFA_ADDRESS", str(own))]
    fields = {"family": int(socket.AF_INET), "prefixlen": prefix_length, "index": link}
    return _message(ifaddrmsg, _NEWADDR, CREATE | REPLACE, attributes, **fields)


def neighbour(link: int, who: IPv4Address, mac: str) -> Message:
    """*who* has *mac*, for good: nobody has to be asked."""
    attributes = [("NDA_DST", str(who)), ("NDA_LLADDR", mac)]
    return _message(
        ndmsg, _NEWNEIGH, CREATE | REPLACE, attributes, family=socket.AF_INET, ifindex=link, state=_NUD_PERMANENT
    )


def default_route(link: int, gateway: IPv4Address) -> Message:
    return _route(_NEWROUTE, None, [("RTA_OIF", link), ("RTA_GATEWAY", str(gateway))], flags=_RTNH_ONLINK)


def delete_default_route() -> Message:
    return _route(_DELROUTE, None, [])


def route_via(destination: IPv4Network, gateway: IPv4Address) -> Message:
    return _route(_NEWROUTE, destination, [("RTA_GATEWAY", str(gateway))])


def host_route(link: int, destination: IPv4Address, source: IPv4Address) -> Message:
    """*destination* is on *link*; who goes there without an address of his own goes as *source*."""
    attributes = [("RTA_OIF", link), ("RTA_PREFSRC", str(source))]
    return _route(_NEWROUTE, IPv4Network(destination), attributes, scope=_SCOPE_LINK)


def unreachable_route(destination: IPv4Network, protocol: int) -> Message:
    return _route(_NEWROUTE, destination, [], type=UNREACHABLE, proto=protocol)


def delete_unreachable_route(destination: IPv4Network, protocol: int) -> Message:
    return _route(_DELROUTE, destination, [], type=UNREACHABLE, proto=protocol)


def all_links() -> Message:
    return _message(ifinfmsg, _GETLINK, 0, [])


def all_addresses() -> Message:
    return _message(ifaddrmsg, _GETADDR, 0, [], family=socket.AF_INET)


def all_routes() -> Message:
    return _message(rtmsg, _GETROUTE, 0, [], family=socket.AF_INET)


def link_index(name: str) -> int | None:
    """The index of a link in the namespace that the thread is in."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return None


def need_link(name: str) -> int:
    """The same; raises `OSError` where there is no such link."""
    return socket.if_nametoindex(name)


def _route(
    kind: int,
    destination: IPv4Network | None,
    attributes: list[tuple[str, object]],
    *,
    flags: int = 0,
    scope: int = _SCOPE_UNIVERSE,
    type: int = _UNICAST,  # noqa: A002 - the field's name
    proto: int = 4,  # static
) -> Message:
    length = 0
    if destination is not None:
        attributes = [("RTA_DST", str(destination.network_address)), *attributes]
        length = destination.prefixlen
    return _message(
        rtmsg,
        kind,
        CREATE | REPLACE if kind == _NEWROUTE else 0,
        attributes,
        family=socket.AF_INET,
        dst_len=length,
        table=_TABLE_MAIN,
        proto=proto,
        scope=scope,
        type=type,
        flags=flags,
    )


def _message(
    kind: type[Message], number: int, request_flags: int, attributes: Sequence[tuple[str, object]], /, **fields: int
) -> Message:
    message = kind()
    message["header"]["type"] = number
    message["header"]["flags"] = request_flags
    for name, value in fields.items():
        message[name] = value
    message["attrs"] = list(attributes)
    return message


def _packed(kind: int, flags: int, sequence: int, payload: bytes) -> bytes:
    return struct.pack("=IHHII", len(payload) + 16, kind, flags, sequence, 0) + payload


def _failure(payload: bytes) -> OSError | None:
    """What an acknowledgement says went wrong."""
    (code,) = struct.unpack_from("=i", payload)
    if code == 0:
        return None
    words = os.strerror(-code)
    offset = 20  # the code, and the header of the message that failed
    while offset + 4 <= len(payload):
        length, kind = struct.unpack_from("=HH", payload, offset)
        if length < 4:
            break
        if kind == _ERROR_TEXT:
            words = f"{words} ({payload[offset + 4 : offset + length].rstrip(bytes(1)).decode(errors='replace')})"
        offset += (length + 3) & ~3
    return OSError(-code, words)
