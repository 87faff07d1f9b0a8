"""Pause: write the guest down and end its VM."""

import asyncio

from agentenv.aio.failpoints import failpoint
from agentenv.model.errors import DeadlineExceeded
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import Event, State
from agentenv.model.sandbox import Sandbox
from agentenv.node.host import Host
from agentenv.node.launch import retire
from agentenv.node.still import captured, live_of, roll_back


async def pause(host: Host, sandbox_id: SandboxId) -> Sandbox:
    """Return once capture and record are durable and the VM is gone.

    The record is the point of no return: a failure before it puts the sandbox back
    to running, and one after it only leaves the VM to be ended, here or at the next start.
    """
    live = live_of(host, sandbox_id)
    sandbox = await host.registry.apply(sandbox_id, Event.PAUSE)
    try:
        async with asyncio.timeout(host.settings.operation_timeout_s):
            async with captured(host, sandbox, live, verb="pause", seal=False) as capture:
                with host.timings.stage("pause", "record"):
                    await host.registry.apply(
                        sandbox_id, Event.DONE, capture=capture, process=None, slot_index=None, ends_at=None
                    )
        await failpoint("pause.recorded")
    except BaseException as error:
        await roll_back(host, sandbox_id, live)
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded("the sandbox could not be paused in time and runs on") from error
        raise
    finally:
        if (now := host.registry.find(sandbox_id)) is not None and now.state is State.PAUSED:
            with host.timings.stage("pause", "retire"):
                await retire(host, sandbox)
    return now if now is not None else sandbox
