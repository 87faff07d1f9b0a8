"""Put a sandbox whose resume did not succeed back to paused: as it was, whatever its guest did meanwhile.

Nobody was told that it runs. What the guest's kernel or agent wrote in the meantime lies in
an upper of its own above the disk of the capture; that is thrown away, and the capture
and its disk fit each other as before.
"""

from typing import Any

from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import Event
from agentenv.node.host import Host


async def put_back(host: Host, sandbox_id: SandboxId, **changes: Any) -> None:
    """Called when its VM is gone, or is only to be ended. The next resume makes the upper anew.

    When the upper cannot be removed, the sandbox stays in "resuming" and the sweeper calls again: a
    capture must never meet a disk that has moved on.
    """
    sandbox = host.registry.get(sandbox_id)
    ran = sandbox.process is not None
    if ran and (sandbox.capture is None or sandbox.capture.disk is None):
        # Begun by an older release, which did not keep the disk of the capture apart.
        reason = "it could not be resumed, and its disk has moved on since its memory was written down"
        await host.registry.conclude(sandbox_id, Event.LOST, reason=reason, process=None, slot_index=None, capture=None)
        return
    if ran:
        await host.storage.remove(sandbox_id)
    changes |= {"process": None, "slot_index": None, "ends_at": None}
    await host.registry.conclude(sandbox_id, Event.ROLLED_BACK, **changes)
