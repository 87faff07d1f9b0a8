"""Resume: start a paused sandbox's VM again from its capture."""

import asyncio
from datetime import timedelta

from agentenv.model.errors import Bug, Conflict, DeadlineExceeded
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import Event, State
from agentenv.model.sandbox import OnTimeout, Sandbox
from agentenv.node.create import check_timeout
from agentenv.node.host import Host
from agentenv.node.launch import launched


async def resume(host: Host, sandbox_id: SandboxId, timeout_s: int, on_timeout: OnTimeout | None) -> Sandbox:
    """Return once the guest agent answers. `Conflict` unless it is paused.

    Failed before the guest could run, the sandbox is paused as before. Failed after
    that, it is in error: its disk has moved on, and the old memory no longer fits it.
    """
    check_timeout(host, timeout_s)
    sandbox = host.registry.get(sandbox_id)
    if sandbox.state is not State.PAUSED:
        raise Conflict(f"the sandbox is {sandbox.state}" + (f": {sandbox.reason}" if sandbox.reason else ""))
    capture = sandbox.capture
    if capture is None:
        raise Bug(f"sandbox {sandbox_id} is paused without a capture")
    with host.catalogue.pinned(capture):
        sandbox = await host.registry.apply(sandbox_id, Event.RESUME, generation=sandbox.generation + 1)
        try:
            async with asyncio.timeout(host.settings.operation_timeout_s):
                async with launched(host, sandbox, capture, verb="resume"):
                    running = await host.registry.apply(
                        sandbox_id,
                        Event.DONE,
                        capture=None,
                        ends_at=host.clock.now() + timedelta(seconds=timeout_s),
                        on_timeout=on_timeout or sandbox.on_timeout,
                    )
        except BaseException as error:
            await _undo(host, sandbox_id, error)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("the sandbox could not be resumed in time") from error
            raise
    host.collector.nudge()
    return running


async def _undo(host: Host, sandbox_id: SandboxId, error: BaseException) -> None:
    sandbox = host.registry.get(sandbox_id)
    if sandbox.process is None:
        await host.registry.apply(sandbox_id, Event.ROLLED_BACK)
    else:
        await host.registry.apply(
            sandbox_id, Event.LOST, reason=f"resume failed: {error}", process=None, slot_index=None, capture=None
        )
