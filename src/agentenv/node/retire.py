"""End a sandbox's VM and give back what it held. Its disk stays."""

import asyncio
import shutil
from pathlib import Path

from agentenv.aio.tasks import to_its_end
from agentenv.model.ids import SandboxId
from agentenv.node.host import Host, Live


async def retire(host: Host, sandbox_id: SandboxId) -> None:
    """End the VM of a sandbox, if it has one. Idempotent; not cut short by cancelling, and bounded in time.

    It stops serving first, so that the watcher knows that this end was asked for, and
    its slot is given back only after the process is gone. When that fails
    (`Unavailable`: the process waits in the kernel) it stays in ``host.held``, and
    calling again goes on where this ended.
    """
    host.live.pop(sandbox_id, None)
    await to_its_end(f"retire {sandbox_id}", _retire(host, sandbox_id))


async def _retire(host: Host, sandbox_id: SandboxId) -> None:
    held = host.held.get(sandbox_id)
    if held is not None:
        host.unended.add(sandbox_id)  # until it has
        await _end(host, held)
    await host.storage.detach(sandbox_id)
    if held is not None and host.held.get(sandbox_id) is held:
        del host.held[sandbox_id]
    host.unended.discard(sandbox_id)


async def _end(host: Host, held: Live) -> None:
    await held.agent.close()
    await held.instance.stop()
    await host.slots.release(held.slot)
    await remove_run_dir(held.instance.plan.run_dir)


async def remove_run_dir(run_dir: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, run_dir, ignore_errors=True)
