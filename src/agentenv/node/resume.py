"""Resume: start a paused sandbox's VM again from its capture."""

import asyncio
from datetime import timedelta

from agentenv.model.errors import Bug, Conflict, DeadlineExceeded
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import Event, State
from agentenv.model.sandbox import OnTimeout, Sandbox
from agentenv.node.create import check_timeout
from agentenv.node.host import Host
from agentenv.node.launch import is_running, launched
from agentenv.node.retire import retire


async def resume(host: Host, sandbox_id: SandboxId, timeout_s: int, on_timeout: OnTimeout | None) -> Sandbox:
    """Return once the guest agent answers. `Conflict` unless it is paused.

    Failed before the guest could run, the sandbox is paused as before. Failed after
    that, it is in error: its disk has moved on, and the old memory no longer fits it.
    """
    check_timeout(host, timeout_s)
    before = host.registry.get(sandbox_id)
    if before.state is not State.PAUSED:
        raise Conflict(f"the sandbox is {before.state}" + (f": {before.reason}" if before.reason else ""))
    capture = before.capture
    if capture is None:
        raise Bug(f"sandbox {sandbox_id} is paused without a capture")
    if sandbox_id in host.held:
        await retire(host, before.id)  # its pause could not end the VM: never two on one disk
    lives_for = timedelta(seconds=timeout_s)
    with host.catalogue.pinned(capture):
        sandbox = await host.registry.apply(
            sandbox_id,
            Event.RESUME,
            generation=before.generation + 1,
            on_timeout=on_timeout or before.on_timeout,
            ends_at=host.clock.now() + lives_for,  # for a server that finishes this after a crash
        )
        try:
            async with asyncio.timeout(host.settings.operation_timeout_s):
                async with launched(host, sandbox, capture, verb="resume"):
                    # A store that cannot write this is no reason to lose a guest that runs: a restart
                    # finds the process in the journal and comes to the same.
                    await host.registry.conclude(
                        sandbox_id, Event.DONE, capture=None, ends_at=host.clock.now() + lives_for
                    )
        except BaseException as error:
            if not is_running(host, sandbox_id):
                await _undo(host, before, error)
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded("the sandbox could not be resumed in time") from error
                raise
            if not isinstance(error, TimeoutError):
                raise
    host.collector.nudge()
    return host.registry.get(sandbox_id)


async def _undo(host: Host, before: Sandbox, error: BaseException) -> None:
    if host.registry.get(before.id).process is None:
        await host.registry.conclude(before.id, Event.ROLLED_BACK, ends_at=None, on_timeout=before.on_timeout)
    else:
        reason = f"resume failed: {error}" if str(error) else "resume was cut short"
        await host.registry.conclude(before.id, Event.LOST, reason=reason, process=None, slot_index=None, capture=None)
