"""Pause: write the guest down and end its VM."""

import asyncio

import structlog

from agentenv.aio.failpoints import failpoint
from agentenv.model.errors import AgentEnvError, DeadlineExceeded
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import Event, State
from agentenv.model.sandbox import Sandbox
from agentenv.node.host import Host
from agentenv.node.retire import retire
from agentenv.node.still import captured, live_of, roll_back

log = structlog.get_logger(__name__)


async def pause(host: Host, sandbox_id: SandboxId) -> Sandbox:
    """Return once capture and record are durable and the VM is gone.

    The record is the point of no return: a failure before it puts the sandbox back
    to running, and after it the sandbox is paused, whatever happens. A VM that would
    not end then is ended later: by the sweeper, by a resume, or at the next start.
    """
    live = live_of(host, sandbox_id)
    sandbox = await host.registry.apply(sandbox_id, Event.PAUSE)
    try:
        async with asyncio.timeout(host.settings.operation_timeout_s):
            with host.timings.guest_stopped("pause"):
                async with captured(host, sandbox, live, verb="pause") as capture:
                    with host.timings.stage("pause", "record"):
                        await host.registry.apply(
                            sandbox_id, Event.DONE, capture=capture, process=None, slot_index=None, ends_at=None
                        )
        await failpoint("pause.recorded")
    except BaseException as error:
        if not is_paused(host, sandbox_id):
            await roll_back(host, sandbox_id, live)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("the sandbox could not be paused in time and runs on") from error
            raise
        if not isinstance(error, TimeoutError):  # a deadline that came a moment too late is none
            raise
    finally:
        if is_paused(host, sandbox_id):
            await _end(host, sandbox_id)
    return host.registry.get(sandbox_id)


async def _end(host: Host, sandbox_id: SandboxId) -> None:
    try:
        with host.timings.stage("pause", "retire"):
            await retire(host, sandbox_id)
    except AgentEnvError:
        log.exception("the VM of a paused sandbox could not be ended yet", sandbox=sandbox_id)


def is_paused(host: Host, sandbox_id: SandboxId) -> bool:
    sandbox = host.registry.find(sandbox_id)
    return sandbox is not None and sandbox.state is State.PAUSED
