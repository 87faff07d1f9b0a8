"""Build: from a root filesystem to a snapshot that sandboxes start from.

The root becomes a disk, the disk boots once, and the booted guest is captured with
its agent ready to serve. The capture counts only after a VM restored from it has
run a command: a template that cannot start is never published.
"""

import asyncio
import re
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from agentenv.aio.failpoints import failpoint
from agentenv.guest.contract import Agent
from agentenv.model.errors import DeadlineExceeded, Invalid, Unavailable
from agentenv.model.ids import new_sandbox_id, new_snapshot_id, parse_name
from agentenv.model.lifecycle import State
from agentenv.model.limits import DISK_MIB, MEMORY_MIB, VCPU_COUNT
from agentenv.model.machine import INIT_PATH
from agentenv.model.sandbox import Sandbox
from agentenv.model.snapshot import Capture, Snapshot, Source, Stack
from agentenv.node.create import admit
from agentenv.node.destroy import abandon
from agentenv.node.host import Host, Live
from agentenv.node.launch import answering, launched
from agentenv.node.retire import remove_run_dir
from agentenv.node.undo import undone_on_failure
from agentenv.templates.contract import BuildEvent, BuildSpec, Progress
from agentenv.templates.rootfs import build_ext4
from agentenv.vmm.contract import Instance

ENVD_VERSION: Final = "0.6.4"  # the surface of E2B's daemon that ours speaks
COMMAND_TIMEOUT_S: Final = 120.0
_BOUNDS: Final = {"vcpu_count": VCPU_COUNT, "memory_mib": MEMORY_MIB, "disk_mib": DISK_MIB}


class Say(Protocol):
    """Adds a line to the build's log."""

    def __call__(self, step: str, message: str, done: int | None = None, total: int | None = None) -> None: ...


async def build(host: Host, spec: BuildSpec, archive: Path, progress: Progress) -> Snapshot:
    """See `agentenv.templates.contract.Build`; *spec* has passed `check`."""
    await admit(host, 0)

    def say(step: str, message: str, done: int | None = None, total: int | None = None) -> None:
        progress(BuildEvent(host.clock.now(), step, message, done, total))

    work = host.settings.work_dir / f"build-{uuid.uuid4()}"
    try:
        async with AsyncExitStack() as taken:
            taken.push_async_callback(asyncio.to_thread, shutil.rmtree, work, ignore_errors=True)
            await asyncio.to_thread(work.mkdir, parents=True)
            disk = await _disk(host, spec, archive, work, taken, say)
            capture = await _first_boot(host, spec, disk, taken, say)
            await failpoint("build.captured")
            snapshot = Snapshot(
                id=new_snapshot_id(),
                names=(spec.name,),
                source=Source.BUILD,
                sandbox_id=None,
                machine=spec.machine,
                fingerprint=host.fingerprint,
                capture=capture,
                created_at=host.clock.now(),
                envd_version=ENVD_VERSION,
                env=spec.env,
                default_user=spec.default_user,
                default_workdir=spec.default_workdir,
            )
            await _boot_test(host, spec, snapshot, say)
            await host.catalogue.add(snapshot)
    finally:
        host.collector.nudge()  # of the template that had the name, or of a build that failed
    say("finalize", f"template {spec.name} is ready")
    return snapshot


def check(spec: BuildSpec) -> None:
    """Refuse a specification that can never be built, before anything is made."""
    parse_name(spec.name)
    for name, bounds in _BOUNDS.items():
        if (value := getattr(spec.machine, name)) not in bounds:
            raise Invalid(f"{name} must be {bounds.low} to {bounds.high}, not {value}")
    if spec.init is not None and not re.fullmatch(INIT_PATH, spec.init):
        raise Invalid(f"{spec.init!r} cannot be the path of an init")


async def _disk(host: Host, spec: BuildSpec, archive: Path, work: Path, taken: AsyncExitStack, say: Say) -> Stack:
    say("rootfs", "making a disk of the root filesystem")
    image = work / "disk.raw"

    def on_progress(done: int, total: int) -> None:
        say("rootfs", "copying files", done, total)

    info = await build_ext4(archive, image, spec.machine.disk_mib, progress=on_progress)
    say("rootfs", f"{info.files} files, {info.used_bytes >> 20} MiB")
    disk = await host.storage.import_disk(image, spec.machine.disk_mib << 20)
    taken.callback(host.storage.unpin, disk.layers, ())
    return disk


async def _first_boot(host: Host, spec: BuildSpec, disk: Stack, taken: AsyncExitStack, say: Say) -> Capture:
    sandbox = _stand_in(host, spec)
    say("boot", "booting for the first time")
    async with _booted(host, sandbox, disk, spec.init) as (instance, agent):
        say("boot", "the guest agent answers")
        await _warm_up(agent, host, sandbox)
        await agent.freeze(timeout_s=COMMAND_TIMEOUT_S)
        await instance.pause()
        say("capture", "writing down memory and disk")
        state = host.run_dir(sandbox) / "device.state"
        await instance.save_device_state(state)
        blob = await host.storage.put_blob(state)
        taken.callback(host.storage.unpin, (), (blob,))
        memory = await host.storage.capture_memory(sandbox.id, instance.process.pid)
        taken.callback(host.storage.unpin, memory.layers, ())
        sealed = await host.storage.seal_disk(sandbox.id, instance.switch_disk)
        taken.callback(host.storage.unpin, sealed.layers, ())
    flat = await host.storage.flatten_memory(memory)
    taken.callback(host.storage.unpin, flat.layers, ())
    return Capture(blob, flat, sealed, control_of=sandbox.id, fingerprint=host.fingerprint)


@asynccontextmanager
async def _booted(host: Host, sandbox: Sandbox, disk: Stack, init: str | None) -> AsyncIterator[tuple[Instance, Agent]]:
    """A fresh VM of *sandbox* whose agent has its identity; gone when the context is left.

    Only here is *init* told to a kernel: a restored one keeps the command line that it was booted with.

    It never gets beyond "creating", as in the boot test: no client sees it, and no crash keeps it.
    """
    host.registry.reserve(sandbox)
    async with undone_on_failure(f"first boot of {sandbox.id}") as taken:
        taken.push_async_callback(abandon, host, sandbox)
        slot = await host.slots.acquire(sandbox.id, sandbox.egress)
        taken.push_async_callback(host.slots.release, slot)
        target = await host.storage.create_disk(sandbox.id, disk)
        memory = await host.storage.attach_memory(sandbox.id, Stack((), sandbox.machine.memory_bytes))
        plan = replace(host.plan(sandbox, slot, memory, target), init=init)
        taken.push_async_callback(remove_run_dir, plan.run_dir)
        instance = await host.vmm.boot(plan)
        taken.pop_all()  # a slot is not given back before its VMM is gone
        agent = host.agents.agent(slot.address, secret=host.credentials.control_secret(sandbox.id))
        host.held[sandbox.id] = Live(instance, agent, slot)
        taken.push_async_callback(abandon, host, sandbox)
        await _answering(host, sandbox, instance, agent)
        yield instance, agent
    await abandon(host, sandbox)


async def _answering(host: Host, sandbox: Sandbox, instance: Instance, agent: Agent) -> None:
    """Return when the agent answers; a guest that dies on the way is an error at once, with its last words."""

    try:
        await answering(host, sandbox, instance, agent, secret=None)
    except Unavailable as error:
        raise Invalid(
            f"the guest did not come up: {error}", hint="is this a root filesystem that Linux can run?"
        ) from error


async def _warm_up(agent: Agent, host: Host, sandbox: Sandbox) -> None:
    """Run what every sandbox runs first, so that its pages are in the captured memory."""
    for _ in range(3):
        await _run_shell(agent, "/bin/bash", host.credentials.envd_token(sandbox.id))


async def _boot_test(host: Host, spec: BuildSpec, snapshot: Snapshot, say: Say) -> None:
    say("test", "starting a sandbox from it")
    candidate = _stand_in(host, spec)
    await host.operations.run(candidate.id, "boot test", lambda: _try_out(host, candidate, snapshot.capture))


async def _try_out(host: Host, candidate: Sandbox, capture: Capture) -> None:
    """Start *candidate* and run a shell in it."""
    assert capture.disk is not None
    with host.catalogue.pinned(capture):
        host.registry.reserve(candidate)
        try:
            async with asyncio.timeout(host.settings.operation_timeout_s + COMMAND_TIMEOUT_S):
                await host.storage.create_disk(candidate.id, capture.disk)
                async with launched(host, candidate, capture, verb="boot_test") as live:
                    await _run_shell(live.agent, "/bin/sh", host.credentials.envd_token(candidate.id))
        except TimeoutError as error:
            raise DeadlineExceeded("a sandbox of the new template did not start in time") from error
        finally:
            await abandon(host, candidate)


async def _run_shell(agent: Agent, shell: str, token: str) -> None:
    """Run nothing in a shell. An image need not have one, but a shell that it has must work."""
    try:
        command = [shell, "-l", "-c", "true"]
        ended = await agent.run(command, user="root", access_token=token, timeout_s=COMMAND_TIMEOUT_S)
    except Invalid:
        return  # the agent says that there is no such program
    if ended.exit_code != 0:
        raise Invalid(f"{shell} fails in this root filesystem: {ended.stderr[-500:].decode(errors='replace')}")


def _stand_in(host: Host, spec: BuildSpec) -> Sandbox:
    """The sandbox whose VM a build boots; never seen by anyone else."""
    now = host.clock.now()
    return Sandbox(
        id=new_sandbox_id(),
        template_id=new_snapshot_id(),
        template_name=spec.name,
        state=State.CREATING,
        generation=1,
        machine=spec.machine,
        created_at=now,
        started_at=now,
        ends_at=None,
        env=spec.env,
        default_user=spec.default_user,
        default_workdir=spec.default_workdir,
    )
