"""What a verb may ask of the network: a slot, with its policy, and nothing else.

A slot is everything a sandbox has of the host's network: a namespace with a tap
in it, a veth pair to the host, firewall rules and one host-side address. The
inner link is the same in every slot, because it is part of a guest's snapshot:
guest 169.254.0.21/30, gateway and resolver 169.254.0.22, fixed MAC addresses.
"""

from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final, Protocol

from agentenv.model.policy import EgressPolicy

GUEST_ADDRESS: Final = IPv4Address("169.254.0.21")
GATEWAY_ADDRESS: Final = IPv4Address("169.254.0.22")
LINK_PREFIX: Final = 30
GUEST_MAC: Final = "02:ae:00:00:00:21"
GATEWAY_MAC: Final = "02:ae:00:00:00:22"
TAP_NAME: Final = "tap0"


@dataclass(frozen=True, slots=True)
class Slot:
    """A network place, ready for a VMM to be started in."""

    index: int
    address: IPv4Address  # the host reaches every port of the guest here
    netns: Path  # bind mount of the namespace
    tap: str = TAP_NAME
    owner: str = ""  # who it was given to; nobody else can release it


class Slots(Protocol):
    """The slots of one node."""

    async def acquire(self, owner: str, policy: EgressPolicy) -> Slot:
        """Take a slot for *owner* (a sandbox id); *policy* is in force before this returns.

        Raises `Exhausted` when there is no free slot, `Conflict` when *owner* has one
        already, `Invalid` for a policy of too many ranges, `DeadlineExceeded` when no
        slot could be made in time. Cancelled, nothing is taken.
        """
        ...

    async def hand_over(self, slot: Slot, owner: str, policy: EgressPolicy) -> Slot:
        """Make *owner* the holder of a slot that another holds; *policy* is in force before this returns.

        What is in the slot stays. Raises `NotFound` when *slot* is not held by its owner or
        gone from the host, `Conflict` when *owner* has a slot, `Invalid` for a policy of too many ranges;
        failed or cancelled, the slot is its old owner's, under one policy or the other.
        """
        ...

    async def adopt(self, owner: str, index: int, policy: EgressPolicy) -> Slot:
        """Take back the slot *index* that *owner* held before this process started.

        Its namespace is left as it is (a VMM is running in it); rules are applied
        anew. Raises `NotFound` when its namespace is gone, `Conflict` when the slot or
        the owner is taken.
        """
        ...

    async def apply(self, slot: Slot, policy: EgressPolicy) -> None:
        """Replace the policy of a slot in one atomic step; established flows go on.

        Raises `NotFound` when the slot is not held; on any error the old policy stays.
        """
        ...

    async def release(self, slot: Slot) -> None:
        """Give a slot back. The caller has made sure that its VMM is dead. Idempotent.

        It is removed from the host soon after this returns (`settled` waits for that).
        Its address is not given out again before connection tracking has forgotten it.
        Never raises for a slot that is already gone or that another owner has by now.
        """
        ...

    async def reconcile(self, keep: Collection[int]) -> int:
        """Remove every slot of this node that is not in *keep*, return how many, and wait until they are gone.

        That is what earlier processes left and slots that are held (adopted for a VMM that turned out
        to be dead); slots made ahead stay. For the start of a server, before anything is acquired.
        """
        ...

    async def settled(self) -> None:
        """Return when every slot that was given back is gone from the host."""
        ...

    def held(self) -> dict[str, int]:
        """Owner to slot index, of all slots now taken."""
        ...
