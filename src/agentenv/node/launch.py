"""Start a VM for a sandbox from a capture: the part that create, resume and fork share.

The order is the safety of it. Until the journal entry is written no guest code has
run, so a crash before it leaves only things that are found by their names and
removed; a crash after it finds the process and finishes or ends it.
"""

import secrets
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

from agentenv.aio.failpoints import failpoint
from agentenv.guest.contract import Agent, Identity
from agentenv.model.errors import Bug, Conflict, Exhausted, NotFound, Unavailable
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import State
from agentenv.model.sandbox import Sandbox
from agentenv.model.snapshot import Capture
from agentenv.network.contract import Slot
from agentenv.node.alive import while_alive
from agentenv.node.host import Host, Live
from agentenv.node.lose import lose
from agentenv.node.retire import remove_run_dir, retire
from agentenv.node.spares import Waiting
from agentenv.node.spares import end as end_spare
from agentenv.node.undo import undone_on_failure
from agentenv.vmm.contract import Instance


@asynccontextmanager
async def launched(host: Host, sandbox: Sandbox, capture: Capture, *, verb: str) -> AsyncIterator[Live]:
    """A VM of *sandbox* that runs user code, and everything it holds.

    The sandbox's disk exists already. The caller says "running" inside the context, and
    holds a pin on *capture*. Leaving normally keeps the VM in ``host.live``, and so does
    leaving with an exception once the sandbox is running: that is durable, and takes a
    verb to undo. Any other exception takes everything down again except the disk.
    """
    async with _starting(host, sandbox) as taken:
        with host.timings.stage(verb, "acquire"):
            slot, waiting = await _place(host, sandbox, taken)
            # An attachment cut short may stand, or be left from an end that failed half-way.
            taken.push_async_callback(host.storage.detach, sandbox.id)
            await host.storage.detach(sandbox.id)
            memory = await host.storage.attach_memory(sandbox.id, capture.memory)
            disk = await host.storage.open_disk(sandbox.id)

        plan = host.plan(sandbox, slot, memory, disk)
        taken.push_async_callback(remove_run_dir, plan.run_dir)

        async def fill(pid: int) -> None:
            await host.storage.fill_memory(sandbox.id, pid)

        with host.timings.stage(verb, "restore"):
            device_state = host.storage.blob_path(capture.device_state)
            spare = waiting.vmm if waiting is not None else None
            try:
                instance = await host.vmm.restore(plan, device_state, fill, spare)
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
            await instance.resume()
            await answering(host, sandbox, instance, agent, secret=host.credentials.control_secret(capture.control_of))
        await failpoint(f"{verb}.ready")

        # Held before the record says "running", so that whoever reads the record finds the VM.
        serve(host, sandbox.id, live)
        try:
            yield live
        except BaseException:
            if is_running(host, sandbox.id):
                taken.pop_all()
            raise


@asynccontextmanager
async def _starting(host: Host, sandbox: Sandbox) -> AsyncIterator[AsyncExitStack]:
    async with undone_on_failure(f"start of {sandbox.id}") as taken:
        with host.spares.starting():
            yield taken


async def _place(host: Host, sandbox: Sandbox, taken: AsyncExitStack) -> tuple[Slot, Waiting | None]:
    """A slot for the sandbox, with a VMM that waits in it if there is one of its shape."""
    waiting = host.spares.take(sandbox.machine)
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


async def answering(host: Host, sandbox: Sandbox, instance: Instance, agent: Agent, *, secret: str | None) -> None:
    """Give the guest its identity and return when user code runs; *secret* is what its agent holds now.

    `Unavailable` at once, with its last words, if the VM ends meanwhile.
    """
    init = agent.init(identity_of(host, sandbox), secret=secret, timeout_s=host.settings.agent_timeout_s)
    await while_alive(instance, f"init {sandbox.id}", init, doing="the start of its guest")


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
