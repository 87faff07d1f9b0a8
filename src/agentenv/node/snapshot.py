"""Snapshot: keep the live state of a sandbox, which runs on."""

import dataclasses

from agentenv.aio.failpoints import failpoint
from agentenv.model.ids import SandboxId, new_snapshot_id, parse_name
from agentenv.model.lifecycle import Event
from agentenv.model.sandbox import Sandbox
from agentenv.model.snapshot import Capture, Snapshot, Source
from agentenv.node.copy import copy_in_turn, unpin
from agentenv.node.create import admit
from agentenv.node.host import Host


async def snapshot(host: Host, sandbox_id: SandboxId, name: str | None) -> Snapshot:
    """Keep the live state of a sandbox; return once it is durable and can be started from.

    Raises `AlreadyExists` if *name* is a template's; another snapshot's moves here.
    """
    if name is not None:
        name = parse_name(name)
        host.catalogue.check_free((name,), Source.SANDBOX)
    await admit(host, 0)
    source, capture = await copy_in_turn(host, sandbox_id, Event.SNAPSHOT, "snapshot")
    try:
        made = await _keep(host, source, capture, name)
    finally:
        unpin(host, capture)
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
