"""Fork: children with the live state of a running sandbox, all from one capture, which is then forgotten."""

import asyncio
import dataclasses

from agentenv.model.errors import Invalid
from agentenv.model.ids import SandboxId, new_sandbox_id
from agentenv.model.lifecycle import Event, State
from agentenv.model.sandbox import Forked, Sandbox
from agentenv.model.snapshot import Capture
from agentenv.node.copy import copy_in_turn, unpin
from agentenv.node.create import admit, check_timeout, start
from agentenv.node.host import Host


async def fork(host: Host, sandbox_id: SandboxId, count: int, timeout_s: int) -> list[Forked]:
    """Start *count* children from one capture; each has its own outcome, in order."""
    check_timeout(host, timeout_s)
    if not 1 <= count <= host.settings.fork_max:
        raise Invalid(f"count must be 1 to {host.settings.fork_max}, not {count}")
    await admit(host, count)
    source, capture = await copy_in_turn(host, sandbox_id, Event.FORK, "fork")
    try:
        return await asyncio.gather(*(_child(host, source, capture, timeout_s) for _ in range(count)))
    finally:
        unpin(host, capture)
        host.collector.nudge()


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
        fingerprint=capture.fingerprint or host.fingerprint,
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
