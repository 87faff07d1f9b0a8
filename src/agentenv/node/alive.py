"""Do something with a VM for as long as it lives: when it ends, nobody waits for its answer any more.

Both errors here are `Unavailable` to clients; the verbs tell them apart.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentenv.aio.tasks import spawn, to_its_end
from agentenv.model.errors import Unavailable
from agentenv.vmm.contract import Instance, VmmExit

T = TypeVar("T")
_WORDS_CHARS = 500


class VmEnded(Unavailable):
    """The VM ended in the middle of something."""


class GuestUnresponsive(Unavailable):
    """What runs in the VM, or the VM itself, does not do as it is told. A class of its own
    because a time to live ends on it: no other host and no free disk would help."""


async def while_alive(instance: Instance, name: str, work: Coroutine[Any, Any, T], *, doing: str) -> T:
    """Return the result of *work*, run as a task called *name*.

    When the VM ends meanwhile, *work* is cut short, and `VmEnded` says what it was
    *doing*, how it ended and its last words.
    """
    working = spawn(name, work)
    died = spawn(f"watch: {name}", instance.wait_exit())
    try:
        await asyncio.wait((working, died), return_when=asyncio.FIRST_COMPLETED)
        succeeded = working.done() and not working.cancelled() and working.exception() is None
        if died.done() and not succeeded:
            raise VmEnded(f"{doing} failed: {describe(died.result())}")
        return await working
    finally:
        working.cancel()
        died.cancel()
        # What it was doing has unwound before anybody looks at what it left.
        await to_its_end(f"end: {name}", asyncio.wait((working, died)))
        if not working.cancelled():
            working.exception()  # looked at, even if it came together with something worse


def describe(ended: VmmExit) -> str:
    """One sentence for the person who finds the sandbox in error."""
    match ended.code:
        case None:
            how = "its virtual machine ended"
        case 0:
            how = "its virtual machine was shut down or its kernel panicked"
        case code if code < 0:
            how = f"its virtual machine was ended by signal {-code}"
        case code:
            how = f"its virtual machine failed with status {code}"
    tail = ended.log_tail.strip()
    return f"{how}: {tail[-_WORDS_CHARS:]}" if tail else how
