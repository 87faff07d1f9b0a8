"""Fork and snapshot: write the guest down and let it go on.

Both stop the guest for as long as the capture takes and no longer. A fork starts
its children from the capture, which is then forgotten; a snapshot keeps it.
"""

import asyncio
import dataclasses
import uuid

from agentenv.aio.failpoints import failpoint
from agentenv.model.errors import DeadlineExceeded, Invalid
from agentenv.model.ids import SandboxId, new_sandbox_id, new_snapshot_id, parse_name
from agentenv.model.lifecycle import Event, State
from agentenv.model.sandbox import Forked, Sandbox
from agentenv.model.snapshot import Capture, Snapshot, Source
from agentenv.node.catalogue import parts_of
from agentenv.node.create import admit, check_timeout, start
from agentenv.node.fits import check_fits
from agentenv.node.host import Host
from agentenv.node.still import captured, go_on, live_of, roll_back


async def fork(host: Host, sandbox_id: SandboxId, count: int, timeout_s: int) -> list[Forked]:
    """Start *count* children from one capture; each has its own outcome, in order."""
    check_timeout(host, timeout_s)
    if not 1 <= count <= host.settings.fork_max:
        raise Invalid(f"count must be 1 to {host.settings.fork_max}, not {count}")
    await admit(host, count)
    source, capture = await _in_turn(host, sandbox_id, Event.FORK, "fork")
    try:
        return await asyncio.gather(*(_child(host, source, capture, timeout_s) for _ in range(count)))
    finally:
        _unpin(host, capture)
        host.collector.nudge()


async def snapshot(host: Host, sandbox_id: SandboxId, name: str | None) -> Snapshot:
    """Keep the live state of a sandbox; return once it is durable and can be started from.

    Raises `AlreadyExists` if *name* is a template's; another snapshot's moves here.
    """
    if name is not None:
        name = parse_name(name)
        host.catalogue.check_free((name,), Source.SANDBOX)
    await admit(host, 0)
    source, capture = await _in_turn(host, sandbox_id, Event.SNAPSHOT, "snapshot")
    try:
        made = await _keep(host, source, capture, name)
    finally:
        _unpin(host, capture)
        host.collector.nudge()
    await failpoint("snapshot.recorded")
    return made


async def _keep(host: Host, source: Sandbox, capture: Capture, name: str | None) -> Snapshot:
    with host.timings.stage("snapshot", "flatten"):
        memory = await host.storage.flatten_memory(capture.memory)
    try:
        made = Snapshot(
            id=new_snapshot_id(),
            names=(name,) if name is not None else (),
            source=Source.SANDBOX,
            sandbox_id=source.id,
            machine=source.machine,
            fingerprint=capture.fingerprint or host.fingerprint,
            capture=dataclasses.replace(capture, memory=memory),
            created_at=host.clock.now(),
            envd_version=source.envd_version,
            env=source.env,
            default_user=source.default_user,
            default_workdir=source.default_workdir,
        )
        await host.catalogue.add(made)
        return made
    finally:
        host.storage.unpin(memory.layers, ())


async def _in_turn(host: Host, sandbox_id: SandboxId, event: Event, verb: str) -> tuple[Sandbox, Capture]:
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
            _unpin(host, kept)
        await roll_back(host, sandbox_id, live)
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded(f"{verb} took too long and was undone; the sandbox runs on") from error
        raise


async def _child(host: Host, source: Sandbox, capture: Capture, timeout_s: int) -> Forked:
    """One child, as an operation of its own, so that it can be deleted while it starts."""
    now = host.clock.now()
    child = dataclasses.replace(
        source,
        id=new_sandbox_id(),
        state=State.CREATING,
        generation=1,
        created_at=now,
        started_at=now,
        ends_at=None,
        slot_index=None,
        process=None,
        fingerprint=host.fingerprint,
        capture=None,
        reason=None,
    )
    try:
        started = await host.operations.run(
            child.id, "create", lambda: start(host, child, capture, timeout_s, verb="fork_child")
        )
    except Exception as error:  # noqa: BLE001 - the outcome of this child, for the caller to look at
        return Forked(error=error)
    return Forked(sandbox=started)


def _pin(host: Host, capture: Capture) -> Capture:
    layers, blobs = parts_of(capture)
    host.storage.pin(layers, blobs)
    return capture


def _unpin(host: Host, capture: Capture) -> None:
    layers, blobs = parts_of(capture)
    host.storage.unpin(layers, blobs)
