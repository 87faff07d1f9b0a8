"""Makes the kernel forget the connections of an address, so that its next holder inherits none.

A flow that outlives its slot would let packets of the old guest's peers through to
the new one.
"""

import errno
from ipaddress import IPv4Address
from typing import Final

from pyroute2.netlink.nfnetlink.nfctsocket import nfct_msg

from agentenv.network.rtnl import Message, Netlink

# From linux/netlink.h, linux/netfilter/nfnetlink.h and nfnetlink_conntrack.h
_NETLINK_NETFILTER: Final = 12
_CTNETLINK: Final = 1 << 8
_NEW, _GET, _DELETE = _CTNETLINK | 0, _CTNETLINK | 1, _CTNETLINK | 2
_IPV4: Final = 2
_MATCH_SOURCE: Final = 1 << 0
_MATCH_DESTINATION: Final = 1 << 1

_BATCH: Final = 128
# What kernels answer that cannot delete by a pattern (before 6.8), or have no tracking loaded.
_NO_PATTERNS: Final = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT}


class Conntrack:
    """The connection tracking of the namespace that the opening thread was in."""

    def __init__(self) -> None:
        self._netlink = Netlink(_NETLINK_NETFILTER)
        self._patterns = True

    def close(self) -> None:
        self._netlink.close()

    def forget(self, address: IPv4Address) -> None:
        """Drop every flow that *address* began or was the target of. Raises `OSError`."""
        for attribute, flag in (("CTA_IP_V4_SRC", _MATCH_SOURCE), ("CTA_IP_V4_DST", _MATCH_DESTINATION)):
            if self._patterns:
                try:
                    self._netlink.do(_pattern(_DELETE, address, attribute, flag))
                    continue
                except OSError as error:
                    if error.errno not in _NO_PATTERNS:
                        raise
                    self._patterns = False
            self.forget_one_by_one(address, attribute, flag)

    def forget_one_by_one(self, address: IPv4Address, attribute: str, flag: int) -> None:
        """The same for kernels that list by a pattern, but do not delete by one."""
        flows = [flow for flow in self._netlink.dump(_pattern(_GET, address, attribute, flag)) if _is_of(flow, address)]
        for start in range(0, len(flows), _BATCH):
            try:
                self._netlink.do(*(_delete(flow) for flow in flows[start : start + _BATCH]))
            except OSError as error:
                if error.errno != errno.ENOENT:  # ended by itself meanwhile
                    raise


def _pattern(kind: int, address: IPv4Address, attribute: str, flag: int) -> Message:
    where = {"attrs": [("CTA_TUPLE_IP", {"attrs": [(attribute, str(address))]})]}
    matching = {"attrs": [("CTA_FILTER_ORIG_FLAGS", flag)]}
    return _message(kind, [("CTA_TUPLE_ORIG", where), ("CTA_FILTER", matching)])


def _delete(flow: Message) -> Message:
    return _message(_DELETE, [(name, flow.get_attr(name)) for name in ("CTA_TUPLE_ORIG", "CTA_ID")])


def _is_of(flow: Message, address: IPv4Address) -> bool:
    ends = flow.get_attr("CTA_TUPLE_ORIG").get_attr("CTA_TUPLE_IP")
    return str(address) in {ends.get_attr("CTA_IP_V4_SRC"), ends.get_attr("CTA_IP_V4_DST")}


def _message(kind: int, attributes: list[tuple[str, object]]) -> Message:
    message: Message = nfct_msg()  # type: ignore[no-untyped-call]
    message["header"]["type"] = kind
    message["header"]["flags"] = 0
    message["nfgen_family"] = _IPV4
    message["attrs"] = attributes
    return message
