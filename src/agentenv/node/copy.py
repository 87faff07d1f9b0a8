"""Copy a running sandbox: write the guest down and let it go on. What fork and snapshot have in common.

The guest stands still for as long as the capture takes and no longer.
"""

import asyncio
import uuid

from agentenv.aio.failpoints import failpoint
from agentenv.model.errors import DeadlineExceeded
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import Event
from agentenv.model.sandbox import Sandbox
from agentenv.model.snapshot import Capture
from agentenv.node.catalogue import parts_of
from agentenv.node.fits import check_fits
from agentenv.node.host import Host
from agentenv.node.still import captured, go_on, live_of, roll_back


async def copy_in_turn(host: Host, sandbox_id: SandboxId, event: Event, verb: str) -> tuple[Sandbox, Capture]:
    """A pinned capture of the sandbox, taken when its turn comes.

    The turn ends with the capture: what is made of it no longer concerns the source.
    Two forks at once are two captures, so they never join.
    """
    made_on = host.registry.get(sandbox_id).fingerprint
    hint = "its virtual machine is older than this server's VMM; it runs on, and a new sandbox has the new one"
    check_fits(host, made_on, "the sandbox", hint=hint)  # else nothing could be started from it
    return await host.operations.run(sandbox_id, f"{verb} {uuid.uuid4()}", lambda: _copy(host, sandbox_id, event, verb))


async def _copy(host: Host, sandbox_id: SandboxId, event: Event, verb: str) -> tuple[Sandbox, Capture]:
    live = live_of(host, sandbox_id)
    sandbox = await host.registry.apply(sandbox_id, event)
    kept: Capture | None = None
    try:
        async with asyncio.timeout(host.settings.operation_timeout_s):
            with host.timings.guest_stopped(verb):
                async with captured(host, sandbox, live, verb=verb) as capture:
                    await go_on(host, live)
                    kept = _pin(host, capture)
            await failpoint(f"{verb}.source_runs")
            # A store that is full now changes nothing: a restart finds the guest running, too.
            return await host.registry.conclude(sandbox_id, Event.DONE), capture
    except BaseException as error:
        if kept is not None:
            unpin(host, kept)
        await roll_back(host, sandbox_id, live)
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded(f"{verb} took too long and was undone; the sandbox runs on") from error
        raise


def _pin(host: Host, capture: Capture) -> Capture:
    layers, blobs = parts_of(capture)
    host.storage.pin(layers, blobs)
    return capture


def unpin(host: Host, capture: Capture) -> None:
    layers, blobs = parts_of(capture)
    host.storage.unpin(layers, blobs)
