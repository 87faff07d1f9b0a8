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
from agentenv.model.errors import DeadlineExceeded, Invalid
from agentenv.model.ids import new_sandbox_id, new_snapshot_id, parse_name
from agentenv.model.lifecycle import State
from agentenv.model.limits import DISK_MIB, MEMORY_MIB, VCPU_COUNT
from agentenv.model.machine import INIT_PATH
from agentenv.model.sandbox import Sandbox
from agentenv.model.snapshot import Capture, Snapshot, Source, Stack
from agentenv.node.alive import GuestUnresponsive, VmEnded
from agentenv.node.create import admit
from agentenv.node.destroy import abandon
from agentenv.node.host import Host, Live
from agentenv.node.launch import Boot, Origin, answering
from agentenv.node.still import captured
from agentenv.templates.contract import BuildEvent, BuildSpec, Progress
from agentenv.templates.rootfs import build_ext4

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
            await _boot_test(host, spec, capture, say)
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
    async with AsyncExitStack() as running:
        try:
            live = await running.enter_async_context(_unseen(host, sandbox, disk, Boot(spec.init), verb="first_boot"))
        except (GuestUnresponsive, VmEnded) as error:
            raise Invalid(
                f"the guest did not come up: {error}", hint="is this a root filesystem that Linux can run?"
            ) from error
        say("boot", "the guest agent answers")
        await _warm_up(live.agent, host, sandbox)
        say("capture", "writing down memory and disk")
        capture = await running.enter_async_context(
            captured(host, sandbox, live, verb="first_boot", freeze_timeout_s=COMMAND_TIMEOUT_S)
        )
        taken.enter_context(host.catalogue.pinned(capture))
    flat = await host.storage.flatten_memory(capture.memory)
    taken.callback(host.storage.unpin, flat.layers, ())
    return replace(capture, memory=flat)


@asynccontextmanager
async def _unseen(host: Host, sandbox: Sandbox, disk: Stack, origin: Origin, *, verb: str) -> AsyncIterator[Live]:
    """A VM of *sandbox* that answers; gone when the context is left.

    It never gets beyond "creating": no client sees it, and no crash keeps it.
    """
    host.registry.reserve(sandbox)
    try:
        await host.storage.create_disk(sandbox.id, disk)
        async with answering(host, sandbox, origin, verb=verb) as (live, _):
            yield live
    finally:
        await abandon(host, sandbox)


async def _warm_up(agent: Agent, host: Host, sandbox: Sandbox) -> None:
    """Run what every sandbox runs first, so that its pages are in the captured memory."""
    for _ in range(3):
        await _run_shell(agent, "/bin/bash", host.credentials.envd_token(sandbox.id))


async def _boot_test(host: Host, spec: BuildSpec, capture: Capture, say: Say) -> None:
    """Start a sandbox as one will be, and run a shell in it."""
    say("test", "starting a sandbox from it")
    assert capture.disk is not None
    candidate = _stand_in(host, spec)
    try:
        async with (
            asyncio.timeout(host.settings.operation_timeout_s + COMMAND_TIMEOUT_S),
            _unseen(host, candidate, capture.disk, capture, verb="boot_test") as live,
        ):
            await _run_shell(live.agent, "/bin/sh", host.credentials.envd_token(candidate.id))
    except TimeoutError as error:
        raise DeadlineExceeded("a sandbox of the new template did not start in time") from error


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
        fingerprint=host.fingerprint,
    )
