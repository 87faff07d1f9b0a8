"""Give up a guest that should have been paused at its end and does not stand still.

Nothing sound can be written down of it: its user processes run, so whatever started
from the capture would run user code with an old clock and with random numbers that
were used before, and would have to wait for the same silent agent again. What can be
kept is its disk.
"""

from contextlib import suppress
from datetime import datetime

import structlog

from agentenv.model.errors import AgentEnvError
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import Event
from agentenv.node.host import Host
from agentenv.node.retire import retire
from agentenv.node.still import live_of

log = structlog.get_logger(__name__)


async def give_up(host: Host, sandbox_id: SandboxId, ends_at: datetime, why: str) -> None:
    """End its VM; it is in error then, with *why*, and keeps its disk.

    Does nothing if its end is no longer *ends_at*. `Conflict` if it does not run.
    """
    live = live_of(host, sandbox_id)
    if host.registry.get(sandbox_id).ends_at != ends_at:
        return
    with suppress(AgentEnvError):
        await live.instance.pause()  # lets what the guest has written reach its disk, if the VMM still can
    try:
        await retire(host, sandbox_id)
    except AgentEnvError:
        log.exception("the VM of a sandbox that was given up could not be ended yet", sandbox=sandbox_id)
    reason = f"its time was over and it could not be paused ({why}): its memory is lost, its disk is kept"
    await host.registry.conclude(sandbox_id, Event.LOST, reason=reason, process=None, slot_index=None)
