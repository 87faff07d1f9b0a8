"""Start a VM for a sandbox: the part that create, resume, fork and builds share.

The order is the safety of it. Until the journal entry is written no guest code of
a sandbox that anybody has seen has run, so a crash before it leaves only things that
are found by their names and removed; a crash after it finds the process and finishes
or ends it.
"""

import secrets
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from agentenv.aio.failpoints import failpoint
from agentenv.guest.contract import Identity
from agentenv.model.errors import Bug, Conflict, Exhausted, NotFound, Unavailable
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import State
from agentenv.model.sandbox import Sandbox
from agentenv.model.snapshot import Capture, Stack
from agentenv.network.contract import Slot
from agentenv.node.alive import GuestUnresponsive, VmEnded, while_alive
from agentenv.node.host import Host, Live
from agentenv.node.lose import lose
from agentenv.node.retire import remove_run_dir, retire
from agentenv.node.spares import Waiting
from agentenv.node.spares import end as end_spare
from agentenv.node.undo import undone_on_failure
from agentenv.vmm.contract import Instance, VmPlan


@dataclass(frozen=True, slots=True)
class Boot:
    """What a VM starts from that was never written down: zeroed memory, and a kernel that is told *init*.

    One that is restored later keeps the command line that it was booted with.
    """

    init: str | None = None


Origin: TypeAlias = Boot | Capture


@asynccontextmanager
async def launched(host: Host, sandbox: Sandbox, capture: Capture, *, verb: str) -> AsyncIterator[Live]:
    """A VM of *sandbox* that runs user code and serves, and everything it holds.

    As `answering`, and the caller says "running" inside the context. Leaving normally keeps
    the VM in ``host.live``, and so does leaving with an exception once the sandbox is
    running: that is durable, and takes a verb to undo.
    """
    async with answering(host, sandbox, capture, verb=verb) as (live, taken):
        # Held before the record says "running", so that whoever reads the record finds the VM.
        serve(host, sandbox.id, live)
        try:
            yield live
        except BaseException:
            if is_running(host, sandbox.id):
                taken.pop_all()
            raise


@asynccontextmanager
async def answering(
    host: Host, sandbox: Sandbox, origin: Origin, *, verb: str
) -> AsyncIterator[tuple[Live, AsyncExitStack]]:
    """A VM of *sandbox* whose agent answers, and what undoes it.

    The sandbox's disk exists already, and the caller holds a pin on a capture. Leaving
    normally keeps the VM in ``host.held``; any exception takes everything down again
    except the disk. Entering raises `GuestUnresponsive` or `VmEnded` if it is the guest
    that does not come up.
    """
    async with _starting(host, sandbox) as taken:
        with host.timings.stage(verb, "acquire"):
            slot, waiting = await _place(host, sandbox, taken, may_wait=isinstance(origin, Capture))
            # An attachment cut short may stand, or be left from an end that failed half-way.
            taken.push_async_callback(host.storage.detach, sandbox.id)
            await host.storage.detach(sandbox.id)
            memory = await host.storage.attach_memory(sandbox.id, _memory_of(origin, sandbox))
            disk = await host.storage.open_disk(sandbox.id)

        plan = host.plan(sandbox, slot, memory, disk)
        taken.push_async_callback(remove_run_dir, plan.run_dir)
        with host.timings.stage(verb, "restore" if isinstance(origin, Capture) else "boot"):
            try:
                instance = await _start(host, plan, origin, waiting)
            except NotFound as error:
                # Something of the host's has gone (a namespace, a state): no answer to who asked for a template.
                raise Unavailable(f"the virtual machine could not be started: {error}") from error
            if waiting is not None:
                host.spares.used(waiting, instance)
            # From here on a slot must not be given back before its VMM is gone, and `retire` knows how.
            taken.pop_all()
            agent = host.agents.agent(slot.address, secret=host.credentials.control_secret(sandbox.id))
            host.held[sandbox.id] = live = Live(instance, agent, slot)
            taken.push_async_callback(retire, host, sandbox.id)
        await failpoint(f"{verb}.restored")

        with host.timings.stage(verb, "journal"):
            await host.registry.change(sandbox.id, process=instance.process, slot_index=slot.index)
        await failpoint(f"{verb}.journalled")

        with host.timings.stage(verb, "agent"):
            await _let_answer(host, sandbox, live, origin)
        await failpoint(f"{verb}.ready")
        yield live, taken


@asynccontextmanager
async def _starting(host: Host, sandbox: Sandbox) -> AsyncIterator[AsyncExitStack]:
    async with undone_on_failure(f"start of {sandbox.id}") as taken:
        with host.spares.starting():
            yield taken


async def _place(host: Host, sandbox: Sandbox, taken: AsyncExitStack, *, may_wait: bool) -> tuple[Slot, Waiting | None]:
    """A slot for the sandbox; with *may_wait*, with a VMM that waits in it if there is one of its shape."""
    waiting = host.spares.take(sandbox.machine) if may_wait else None
    if waiting is not None:
        # Undone last first: its slot must not be given back before it is gone, whoever holds that by then.
        taken.push_async_callback(host.slots.release, replace(waiting.slot, owner=sandbox.id))
        taken.push_async_callback(end_spare, host.slots, waiting)
        try:
            return await host.slots.hand_over(waiting.slot, sandbox.id, sandbox.egress), waiting
        except NotFound:  # its slot was taken apart meanwhile
            await end_spare(host.slots, waiting)
    try:
        slot = await host.slots.acquire(sandbox.id, sandbox.egress)
    except Exhausted:
        if not await host.spares.give_way():
            raise
        slot = await host.slots.acquire(sandbox.id, sandbox.egress)
    taken.push_async_callback(host.slots.release, slot)
    return slot, None


def _memory_of(origin: Origin, sandbox: Sandbox) -> Stack:
    return origin.memory if isinstance(origin, Capture) else Stack((), sandbox.machine.memory_bytes)


async def _start(host: Host, plan: VmPlan, origin: Origin, waiting: Waiting | None) -> Instance:
    if isinstance(origin, Boot):
        return await host.vmm.boot(replace(plan, init=origin.init))

    async def fill(pid: int) -> None:
        await host.storage.fill_memory(plan.sandbox_id, pid)

    device_state = host.storage.blob_path(origin.device_state)
    return await host.vmm.restore(plan, device_state, fill, waiting.vmm if waiting is not None else None)


async def _let_answer(host: Host, sandbox: Sandbox, live: Live, origin: Origin) -> None:
    secret = None
    if isinstance(origin, Capture):
        secret = host.credentials.control_secret(origin.control_of)
        await live.instance.resume()
    await initialise(host, sandbox, live, secret=secret)


async def initialise(host: Host, sandbox: Sandbox, live: Live, *, secret: str | None) -> None:
    """Give the guest its identity and return when user code runs; *secret* is what its agent holds now.

    `VmEnded` at once, with its last words, if the VM ends meanwhile; `GuestUnresponsive` if it does not answer.
    """
    init = live.agent.init(identity_of(host, sandbox), secret=secret, timeout_s=host.settings.agent_timeout_s)
    try:
        await while_alive(live.instance, f"init {sandbox.id}", init, doing="the start of its guest")
    except VmEnded:
        raise
    except Unavailable as error:
        raise GuestUnresponsive(error.message, hint=error.hint) from error


def serve(host: Host, sandbox_id: SandboxId, live: Live) -> None:
    """Make *live* the sandbox's VM, and watch it: a VMM that ends by itself is noticed at once."""
    if sandbox_id in host.live:
        raise Bug(f"sandbox {sandbox_id} has a VM already")
    host.tasks.start(f"watch {sandbox_id}", _watch(host, sandbox_id, live))
    host.held[sandbox_id] = live
    host.live[sandbox_id] = live


def is_running(host: Host, sandbox_id: SandboxId) -> bool:
    sandbox = host.registry.find(sandbox_id)
    return sandbox is not None and sandbox.state is State.RUNNING


def identity_of(host: Host, sandbox: Sandbox) -> Identity:
    """A fresh identity: two guests from one capture share none of it."""
    return Identity(
        sandbox_id=sandbox.id,
        template_id=sandbox.template_id,
        access_token=host.credentials.envd_token(sandbox.id) if sandbox.secure else None,
        control_secret=host.credentials.control_secret(sandbox.id),
        timestamp=host.clock.now(),
        hostname=f"sandbox-{sandbox.id[:8]}",
        machine_id=uuid.UUID(sandbox.id).hex,
        entropy=secrets.token_bytes(64),
        env=sandbox.env,
        default_user=sandbox.default_user,
        default_workdir=sandbox.default_workdir,
        ca_bundle=host.settings.ca_bundle,
    )


async def _watch(host: Host, sandbox_id: SandboxId, live: Live) -> None:
    await live.instance.wait_exit()
    if host.live.get(sandbox_id) is live:
        with suppress(NotFound, Conflict):  # deleted meanwhile
            await host.operations.run(sandbox_id, "lose", partial(lose, host, sandbox_id, live))
