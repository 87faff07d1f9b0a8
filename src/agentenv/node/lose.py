"""A VM that ended by itself: its sandbox becomes an error with a reason, and keeps its disk."""

from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import Event
from agentenv.node.host import Host, Live
from agentenv.node.launch import retire
from agentenv.vmm.contract import VmmExit


async def lose(host: Host, sandbox_id: SandboxId, live: Live) -> None:
    """Give back what the dead VM held. Does nothing if it is not the sandbox's VM any more."""
    if host.live.get(sandbox_id) is not live:
        return
    sandbox = host.registry.find(sandbox_id)
    ended = await live.instance.wait_exit()
    if sandbox is not None:
        await retire(host, sandbox)
        await host.registry.apply(
            sandbox_id, Event.LOST, reason=describe(ended), process=None, slot_index=None, ends_at=sandbox.ends_at
        )


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
    return f"{how}: {tail[-500:]}" if tail else how
