"""Finish what failed half-way while the server runs: deletes, undone resumes, and VMs that did not end.

A crash is repaired at the next start (`reconcile`); what goes wrong in between, such as
a process that waits in the kernel for a disk, is tried again here until it is done.
"""

from collections.abc import Coroutine
from functools import partial

import structlog

from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import State
from agentenv.node.destroy import delete
from agentenv.node.host import Host
from agentenv.node.put_back import put_back
from agentenv.node.retire import retire
from agentenv.node.still import KILL

EVERY_S = 30.0
log = structlog.get_logger(__name__)


async def sweep_for_ever(host: Host) -> None:
    while True:
        await host.clock.sleep(EVERY_S)
        await sweep(host)


async def sweep(host: Host) -> None:
    """One pass over what nobody is working on."""
    for sandbox in host.registry.all():
        if sandbox.state is State.KILLING and host.operations.current(sandbox.id) is None:
            await _again(sandbox.id, host.operations.cut(sandbox.id, KILL, partial(delete, host, sandbox.id)))
        if sandbox.state is State.RESUMING and host.operations.current(sandbox.id) is None:
            await _again(sandbox.id, host.operations.run(sandbox.id, "put back", partial(put_back, host, sandbox.id)))
    for sandbox_id in tuple(host.unended):
        if host.operations.current(sandbox_id) is None:
            await _again(sandbox_id, host.operations.run(sandbox_id, "retire", partial(retire, host, sandbox_id)))


async def _again(sandbox_id: SandboxId, work: Coroutine[object, object, None]) -> None:
    try:
        await work
    except Exception:  # the others have their turn all the same, and this one again
        log.exception("what failed half-way is still not finished", sandbox=sandbox_id)
    else:
        log.info("what had failed half-way is finished", sandbox=sandbox_id)
