"""Create: a new sandbox from a template or snapshot."""

import asyncio
from datetime import timedelta

from agentenv.aio.failpoints import failpoint
from agentenv.model.errors import DeadlineExceeded, Exhausted, Invalid, NoSpace, Unsupported
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import Event, State
from agentenv.model.sandbox import CreateSandbox, Sandbox
from agentenv.model.snapshot import Capture
from agentenv.node.destroy import abandon
from agentenv.node.fits import check_fits
from agentenv.node.host import Host
from agentenv.node.launch import launched


async def create(host: Host, sandbox_id: SandboxId, request: CreateSandbox) -> Sandbox:
    """Return once the guest agent answers; the time to live starts then.

    Failed or cut short, nothing of it is left, its record included.
    """
    check_timeout(host, request.timeout_s)
    snapshot = host.catalogue.find(request.template)
    what = f"template {request.template}"
    check_fits(host, snapshot.fingerprint, what, hint="build the template again on this host")
    if snapshot.capture.disk is None:
        raise Unsupported(f"{request.template} has no disk to start from")
    await admit(host)
    now = host.clock.now()
    sandbox = Sandbox(
        id=sandbox_id,
        template_id=snapshot.id,
        template_name=snapshot.name,
        state=State.CREATING,
        generation=1,
        machine=snapshot.machine,
        created_at=now,
        started_at=now,
        ends_at=None,
        on_timeout=request.on_timeout,
        auto_resume=request.auto_resume,
        secure=request.secure,
        metadata=request.metadata,
        env={**snapshot.env, **request.env},
        egress=request.egress,
        ingress=request.ingress,
        envd_version=snapshot.envd_version,
        default_user=snapshot.default_user,
        default_workdir=snapshot.default_workdir,
        fingerprint=snapshot.fingerprint,
    )
    created = await start(host, sandbox, snapshot.capture, request.timeout_s, verb="create")
    host.tasks.start(f"count {sandbox_id}", host.catalogue.count_spawn(snapshot.id, now))
    return created


async def start(host: Host, sandbox: Sandbox, capture: Capture, timeout_s: int, *, verb: str) -> Sandbox:
    """Bring a new sandbox to life from *capture*; what create and fork have in common."""
    if capture.disk is None:
        raise Invalid("this capture has no disk of its own")
    with host.catalogue.pinned(capture):
        check_room(host)  # no await from here to the reservation: creates at once must not all see the last place
        host.registry.reserve(sandbox)
        try:
            async with asyncio.timeout(host.settings.operation_timeout_s):
                with host.timings.stage(verb, "disk"):
                    await host.storage.create_disk(sandbox.id, capture.disk)
                async with launched(host, sandbox, capture, verb=verb):
                    now = host.clock.now()
                    running = await host.registry.apply(
                        sandbox.id, Event.DONE, started_at=now, ends_at=now + timedelta(seconds=timeout_s)
                    )
        except BaseException as error:
            await abandon(host, sandbox)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("the sandbox did not start in time and was removed") from error
            raise
    await failpoint(f"{verb}.done")
    return running


async def admit(host: Host, count: int = 1) -> None:
    """Refuse before anything is taken when the node is full: `Exhausted` or `NoSpace`."""
    check_room(host, count)
    free_mib = (await host.storage.usage()).free_bytes >> 20
    if free_mib < host.settings.min_free_disk_mib:
        raise NoSpace(
            f"only {free_mib} MiB of disk are free and {host.settings.min_free_disk_mib} are kept in reserve",
            hint="delete sandboxes or templates, or lower sandbox.min_free_disk_mib",
        )


def check_room(host: Host, count: int = 1) -> None:
    """`Exhausted` unless *count* more sandboxes may be on this node, those that are starting included."""
    if count and len(host.registry) + count > host.settings.max_sandboxes:
        raise Exhausted(
            f"this node holds its limit of {host.settings.max_sandboxes} sandboxes",
            hint="delete some, or raise sandbox.max_sandboxes",
        )


def check_timeout(host: Host, timeout_s: int) -> None:
    if not 1 <= timeout_s <= host.settings.max_timeout_s:
        raise Invalid(f"timeout must be 1 to {host.settings.max_timeout_s} seconds, not {timeout_s}")
