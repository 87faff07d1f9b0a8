"""A VM that ended by itself: its sandbox becomes an error with a reason, and keeps its disk."""

import structlog

from agentenv.model.errors import AgentEnvError
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import Event
from agentenv.node.alive import describe
from agentenv.node.host import Host, Live
from agentenv.node.retire import retire

log = structlog.get_logger(__name__)


async def lose(host: Host, sandbox_id: SandboxId, live: Live) -> None:
    """Give back what the dead VM held. Does nothing if it is not the sandbox's VM any more."""
    if host.live.get(sandbox_id) is not live:
        return
    host.timings.vm_lost()
    ended = await live.instance.wait_exit()
    try:
        await retire(host, sandbox_id)
    except AgentEnvError:
        log.exception("what a dead VM held is not given back yet", sandbox=sandbox_id)
    await host.registry.conclude(sandbox_id, Event.LOST, reason=describe(ended), process=None, slot_index=None)
