"""Start a VM for a sandbox from a capture: the part that create, resume and fork share.

The order is the safety of it. Until the journal entry is written no guest code has
run, so a crash before it leaves only things that are found by their names and
removed; a crash after it finds the process and finishes or ends it.
"""

import asyncio
import secrets
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from agentenv.aio.failpoints import failpoint
from agentenv.guest.contract import Identity
from agentenv.model.errors import Bug
from agentenv.model.ids import SandboxId
from agentenv.model.sandbox import Sandbox
from agentenv.model.snapshot import Capture
from agentenv.node.host import Host, Live


@asynccontextmanager
async def launched(host: Host, sandbox: Sandbox, capture: Capture, *, verb: str) -> AsyncIterator[Live]:
    """A VM of *sandbox* that runs user code, and everything it holds.

    The sandbox's disk exists already. Leaving with an exception takes everything
    down again except the disk; leaving normally keeps it in ``host.live``. The
    caller says "running" inside the context, and holds a pin on *capture*.
    """
    async with AsyncExitStack() as taken:
        with host.timings.stage(verb, "acquire"):
            slot = await host.slots.acquire(sandbox.id, sandbox.egress)
            taken.push_async_callback(host.slots.release, slot)
            memory = await host.storage.attach_memory(sandbox.id, capture.memory)
            taken.push_async_callback(host.storage.detach, sandbox.id)
            disk = await host.storage.open_disk(sandbox.id)

        plan = host.plan(sandbox, slot, memory, disk)
        taken.push_async_callback(remove_run_dir, host, sandbox)

        async def fill(pid: int) -> None:
            await host.storage.fill_memory(sandbox.id, pid)

        with host.timings.stage(verb, "restore"):
            instance = await host.vmm.restore(plan, host.storage.blob_path(capture.device_state), fill)
            taken.push_async_callback(instance.stop)
        await failpoint(f"{verb}.restored")

        with host.timings.stage(verb, "journal"):
            await host.registry.change(sandbox.id, process=instance.process, slot_index=slot.index)
        await failpoint(f"{verb}.journalled")

        with host.timings.stage(verb, "agent"):
            agent = host.agents.agent(slot.address, secret=host.credentials.control_secret(sandbox.id))
            taken.push_async_callback(agent.close)
            await instance.resume()
            secret = host.credentials.control_secret(capture.control_of)
            await agent.init(identity_of(host, sandbox), secret=secret, timeout_s=host.settings.agent_timeout_s)
        await failpoint(f"{verb}.ready")

        # Held before the record says "running", so that whoever reads the record finds the VM.
        live = Live(instance, agent, slot)
        hold(host, sandbox.id, live)
        taken.callback(host.live.pop, sandbox.id, None)
        yield live
        taken.pop_all()


def hold(host: Host, sandbox_id: SandboxId, live: Live) -> None:
    """Make *live* the sandbox's VM, and watch it: a VMM that ends by itself is noticed at once."""
    if sandbox_id in host.live:
        raise Bug(f"sandbox {sandbox_id} has a VM already")
    host.live[sandbox_id] = live
    host.tasks.start(f"watch {sandbox_id}", _watch(host, sandbox_id, live))


async def retire(host: Host, sandbox: Sandbox) -> None:
    """End the sandbox's VM and give back what it held; its disk stays. Idempotent.

    The VM is taken out of ``host.live`` first, so that the watcher knows that this
    end was asked for, and the slot is released only after the process is gone.
    """
    live = host.live.pop(sandbox.id, None)
    if live is not None:
        await live.agent.close()
        await live.instance.stop()
        await host.slots.release(live.slot)
    await host.storage.detach(sandbox.id)
    await remove_run_dir(host, sandbox)


async def remove_run_dir(host: Host, sandbox: Sandbox) -> None:
    await asyncio.to_thread(shutil.rmtree, host.run_dir(sandbox), ignore_errors=True)


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
    if host.live.get(sandbox_id) is live and host.on_vm_lost is not None:
        host.timings.vm_lost()
        await host.on_vm_lost(sandbox_id, live)
