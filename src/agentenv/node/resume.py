"""Resume: start a paused sandbox's VM again from its capture."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import structlog

from agentenv.aio.tasks import to_its_end
from agentenv.model.errors import AgentEnvError, Bug, Conflict, DeadlineExceeded
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import Event, State
from agentenv.model.machine import BlockTarget
from agentenv.model.sandbox import OnTimeout, Sandbox
from agentenv.model.snapshot import Capture, Stack
from agentenv.node.create import check_timeout
from agentenv.node.fits import check_fits
from agentenv.node.host import Host
from agentenv.node.launch import is_running, launched
from agentenv.node.put_back import put_back
from agentenv.node.retire import retire
from agentenv.node.still import KILL

log = structlog.get_logger(__name__)


async def resume(host: Host, sandbox_id: SandboxId, timeout_s: int, on_timeout: OnTimeout | None) -> Sandbox:
    """Return once the guest agent answers. `Conflict` unless it is paused.

    Failed, whenever and for whatever reason, it is paused as before.
    """
    check_timeout(host, timeout_s)
    before = host.registry.get(sandbox_id)
    if before.state is not State.PAUSED:
        raise Conflict(f"the sandbox is {before.state}" + (f": {before.reason}" if before.reason else ""))
    capture = before.capture
    if capture is None:
        raise Bug(f"sandbox {sandbox_id} is paused without a capture")
    hint = "start it where it was paused, or with that VMM again; it stays paused"
    check_fits(host, capture.fingerprint, "what was written down of the sandbox", hint=hint)
    if sandbox_id in host.held:
        await retire(host, before.id)  # its pause could not end the VM: never two on one disk
    lives_for = timedelta(seconds=timeout_s)
    async with _whole(host, sandbox_id, capture) as (capture, disk):
        sandbox = await host.registry.apply(
            sandbox_id,
            Event.RESUME,
            generation=before.generation + 1,
            on_timeout=on_timeout or before.on_timeout,
            ends_at=host.clock.now() + lives_for,  # for a server that finishes this after a crash
            capture=capture,
            fingerprint=capture.fingerprint or host.fingerprint,
        )
        try:
            async with asyncio.timeout(host.settings.operation_timeout_s):
                if sandbox_id not in host.storage.owners():  # a resume before this one failed
                    await host.storage.create_disk(sandbox_id, disk)
                async with launched(host, sandbox, capture, verb="resume"):
                    # Durable before anybody is told: what a record calls "resuming" nobody has seen running.
                    await host.registry.apply(
                        sandbox_id, Event.DONE, capture=None, ends_at=host.clock.now() + lives_for
                    )
        except BaseException as error:
            if not is_running(host, sandbox_id):
                await _undo(host, before)
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded("the sandbox could not be resumed in time and is paused") from error
                raise
            if not isinstance(error, TimeoutError):
                raise
    host.collector.nudge()
    return host.registry.get(sandbox_id)


async def _undo(host: Host, before: Sandbox) -> None:
    if host.operations.current(before.id) == KILL:
        return  # which removes it all
    try:
        await to_its_end(f"put {before.id} back", put_back(host, before.id, on_timeout=before.on_timeout))
    except AgentEnvError:
        log.exception("a resume could not be undone yet", sandbox=before.id)


@asynccontextmanager
async def _whole(host: Host, sandbox_id: SandboxId, capture: Capture) -> AsyncIterator[tuple[Capture, Stack]]:
    """*capture* with the disk that it fits, pinned: written by an older release it may lack that."""
    with host.catalogue.pinned(capture):
        if capture.disk is not None:
            yield capture, capture.disk
            return
        disk = await host.storage.seal_disk(sandbox_id, _nobody_has_it_open)
        try:
            yield dataclasses.replace(capture, disk=disk), disk
        finally:
            host.storage.unpin(disk.layers, ())


async def _nobody_has_it_open(_: BlockTarget) -> None:
    """No VM to switch to a new upper."""
