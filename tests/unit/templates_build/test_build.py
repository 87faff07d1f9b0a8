"""A template is published when a sandbox started from it has run a command, and a failure leaves nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from agentenv.guest.contract import Completed
from agentenv.model.errors import (
    AgentEnvError,
    Conflict,
    DeadlineExceeded,
    Exhausted,
    Invalid,
    NoSpace,
    NotFound,
    Unavailable,
)
from agentenv.model.machine import Machine
from agentenv.model.snapshot import Snapshot, Source
from agentenv.node.sweep import sweep
from agentenv.templates import build as build_module
from agentenv.templates.contract import BuildEvent, BuildSpec, Progress
from agentenv.templates.rootfs import RootfsInfo
from agentenv.templates.service import BuildLimits, TemplateBuilder
from agentenv.testing.audit import faults
from agentenv.testing.guest import FakeAgent
from agentenv.testing.host import TEMPLATE, FakeHost, Trip, World, log_briefly

SPEC: Final = BuildSpec("mine", Machine(vcpu_count=1, memory_mib=128, disk_mib=256), env={"A": "b"})
STEPS: Final = (
    "storage.usage",
    "storage.import_disk",
    # the first boot
    "storage.create_disk",
    "slots.acquire",
    "storage.detach",
    "storage.attach_memory",
    "storage.open_disk",
    "vmm.boot",
    "store.insert_sandbox",
    "guest.init",
    "guest.run",
    "guest.run",
    "guest.run",
    "guest.freeze",
    "instance.pause",
    "instance.save_device_state",
    "storage.put_blob",
    "storage.capture_memory",
    "storage.seal_disk",
    "instance.switch_disk",
    "instance.stop",
    "slots.release",
    "storage.detach",
    "storage.remove",
    "store.delete_sandbox",
    "storage.flatten_memory",
    # the boot test
    "storage.create_disk",
    "slots.acquire",
    "storage.detach",
    "storage.attach_memory",
    "storage.open_disk",
    "vmm.restore",
    "storage.fill_memory",
    "store.insert_sandbox",
    "instance.resume",
    "guest.init",
    "guest.run",
    "instance.stop",
    "slots.release",
    "storage.detach",
    "storage.remove",
    "store.delete_sandbox",
    "store.insert_snapshot",
)
ENDS: Final = frozenset({"instance.stop", "slots.release", "storage.detach", "storage.remove", "store.delete_sandbox"})
each_step = pytest.mark.parametrize("number", range(len(STEPS)), ids=[f"{n}-{name}" for n, name in enumerate(STEPS)])


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A root file system made in no time, and little said of what fails on purpose."""

    async def quick(source: Path, out: Path, size_mib: int, *, progress: object = None) -> RootfsInfo:
        del progress
        if not source.exists():
            raise Invalid("the archive holds no root filesystem")
        await asyncio.to_thread(out.write_bytes, b"root file system")
        return RootfsInfo(size_mib << 20, 16, 16, 1)

    monkeypatch.setattr(build_module, "build_ext4", quick)
    log_briefly()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "root.tar"
    path.write_bytes(b"")
    return path


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
async def fake(world: World) -> AsyncIterator[FakeHost]:
    fake = await FakeHost(world).start()
    yield fake
    await world.clock.advance(0)
    await sweep(fake.host)
    wrong = await faults(fake)
    left = list((world.root / "work").glob("*"))
    await fake.stop()
    assert (wrong, left) == ([], [])


def ignore(_event: BuildEvent) -> None:
    """Nobody watches."""


LIMITS: Final = BuildLimits(timeout_s=60.0, max_running=2, max_waiting=1)


async def make(
    fake: FakeHost,
    archive: Path,
    spec: BuildSpec = SPEC,
    *,
    progress: Progress = ignore,
    builder: TemplateBuilder | None = None,
) -> Snapshot:
    with (builder or TemplateBuilder(fake.host, LIMITS)).begin(spec) as build:
        return await build.run(archive, progress)


async def test_these_are_the_steps(fake: FakeHost, archive: Path) -> None:
    with fake.taps.recorded() as calls:
        await make(fake, archive)

    assert tuple(calls) == STEPS


async def test_a_template_is_what_was_asked_for_and_can_be_started(fake: FakeHost, archive: Path) -> None:
    events: list[BuildEvent] = []

    template = await make(fake, archive, progress=events.append)
    sandbox = await fake.create(template="mine")

    assert (template.names, template.source, template.machine) == (("mine",), Source.BUILD, SPEC.machine)
    assert (template.env, template.default_user) == ({"A": "b"}, "user")
    assert template.fingerprint == fake.host.fingerprint
    assert len(template.capture.memory.layers) == 1
    assert (sandbox.machine, sandbox.env) == (SPEC.machine, {"A": "b"})
    assert fake.world.guests.secrets[sandbox.id] == f"control-{template.capture.control_of}"
    steps = [event.step for event in events]
    assert list(dict.fromkeys(steps)) == ["rootfs", "boot", "capture", "test", "finalize"]
    assert all(event.timestamp == fake.world.clock.now() for event in events)


@pytest.mark.parametrize("init", [None, "/sbin/init"])
async def test_the_first_boot_alone_is_told_the_init(fake: FakeHost, archive: Path, init: str | None) -> None:
    await make(fake, archive, replace(SPEC, init=init))

    plans = [process.plan for process in fake.world.hypervisor.processes.values()]
    assert [plan.init for plan in plans if plan.machine == SPEC.machine] == [init, None]


async def test_a_first_boot_shows_no_secret_and_every_start_has_its_own(fake: FakeHost, archive: Path) -> None:
    template = await make(fake, archive)

    maker = template.capture.control_of
    assert fake.world.guests.secrets[maker] is None
    (tried,) = [key for key in fake.world.guests.identities if key != maker]
    assert fake.world.guests.secrets[tried] == f"control-{maker}"


async def test_no_client_ever_sees_the_sandboxes_of_a_build(fake: FakeHost, archive: Path) -> None:
    seen: set[str] = set()
    fake.host.registry.listen(lambda _before, _after: seen.update(s.id for s in fake.node.sandboxes()))

    await make(fake, archive)

    assert seen == set()


async def test_a_name_moves_when_the_new_template_is_ready_and_the_old_one_is_collected(
    fake: FakeHost, archive: Path
) -> None:
    first = await make(fake, archive)
    second = await make(fake, archive)
    assert fake.node.find_snapshot("mine") == second

    await fake.host.collector.collect()

    assert {one.id for one in fake.node.snapshots(Source.BUILD)} == {second.id, fake.node.find_snapshot(TEMPLATE).id}
    with pytest.raises(NotFound):
        fake.node.find_snapshot(first.id)


@pytest.mark.parametrize("paused", [False, True])
async def test_a_template_that_was_replaced_stays_while_a_sandbox_was_made_of_it(
    fake: FakeHost, archive: Path, paused: bool
) -> None:
    first = await make(fake, archive)
    sandbox = await fake.create(template="mine")
    if paused:
        await fake.node.pause(sandbox.id)
    await make(fake, archive)
    await fake.host.collector.collect()
    assert fake.node.find_snapshot(first.id).names == ()

    await fake.node.delete(sandbox.id)
    await fake.host.collector.collect()

    with pytest.raises(NotFound):
        fake.node.find_snapshot(first.id)


async def test_a_snapshot_outlives_the_template_that_it_came_from(fake: FakeHost, archive: Path) -> None:
    await make(fake, archive)
    sandbox = await fake.create(template="mine")
    unnamed, named = await fake.node.snapshot(sandbox.id, None), await fake.node.snapshot(sandbox.id, "kept")
    await fake.node.delete(sandbox.id)
    await make(fake, archive)

    await fake.host.collector.collect()

    for snapshot in (unnamed, named):
        await fake.create(template=snapshot.id)


async def test_a_second_build_of_a_name_is_refused_while_the_first_is_under_way(fake: FakeHost, archive: Path) -> None:
    builder = TemplateBuilder(fake.host, LIMITS)
    with builder.begin(SPEC) as first:
        with pytest.raises(Conflict), builder.begin(SPEC):
            pass
        await first.run(archive, ignore)

    await make(fake, archive, builder=builder)


async def test_few_builds_work_at_once_few_wait_and_the_next_is_refused(fake: FakeHost, archive: Path) -> None:
    builder = TemplateBuilder(fake.host, LIMITS)
    said: list[str] = []
    with fake.taps.always("guest.freeze", Trip()) as held:
        building = [
            asyncio.create_task(
                make(fake, archive, replace(SPEC, name=name), builder=builder, progress=lambda e: said.append(e.step))
            )
            for name in ("a", "b", "c")
        ]
        await held.reached.wait()
        while "queue" not in said:
            await asyncio.sleep(0)
        with pytest.raises(Exhausted), builder.begin(SPEC):
            pass
        held.go.set()
        await asyncio.gather(*building)

    assert said.count("queue") == 1
    assert {name for one in fake.node.snapshots(Source.BUILD) for name in one.names} == {"a", "b", "c", TEMPLATE}


async def test_a_build_that_takes_too_long_leaves_nothing(fake: FakeHost, archive: Path) -> None:
    builder = TemplateBuilder(fake.host, replace(LIMITS, timeout_s=0.05))
    with fake.taps.always("guest.freeze", Trip()), pytest.raises(DeadlineExceeded):
        await make(fake, archive, builder=builder)

    with pytest.raises(NotFound):
        fake.node.find_snapshot("mine")


async def test_a_build_is_called_off_while_it_waits_for_its_upload(fake: FakeHost, archive: Path) -> None:
    builder = TemplateBuilder(fake.host, LIMITS)
    with builder.begin(SPEC) as build:
        assert await builder.cancel("mine")
        with fake.taps.recorded() as calls, pytest.raises(Conflict, match="called off"):
            await build.run(archive, ignore)

    assert calls == []
    assert not await builder.cancel("mine")


async def test_an_upload_that_does_not_end_is_called_off_and_frees_the_name(fake: FakeHost, archive: Path) -> None:
    builder = TemplateBuilder(fake.host, LIMITS)
    begun, unwound = asyncio.Event(), asyncio.Event()

    async def trickle() -> Path:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            unwound.set()
        return archive

    async def ask() -> None:
        with builder.begin(SPEC) as build:
            await build.receive(trickle)

    asking = asyncio.create_task(ask())
    await begun.wait()
    assert await builder.cancel("mine")
    assert unwound.is_set()
    with pytest.raises(Conflict, match="called off"):
        await asking
    await make(fake, archive, builder=builder)


async def test_a_build_that_waits_for_its_turn_can_be_called_off(fake: FakeHost, archive: Path) -> None:
    builder = TemplateBuilder(fake.host, replace(LIMITS, max_running=1))
    with fake.taps.always("guest.freeze", Trip()) as held:
        first = asyncio.create_task(make(fake, archive, builder=builder))
        await held.reached.wait()
        queued = asyncio.Event()
        second = asyncio.create_task(
            make(fake, archive, replace(SPEC, name="other"), builder=builder, progress=lambda _: queued.set())
        )
        await queued.wait()
        assert await builder.cancel("other")
        held.go.set()
        await first

    with pytest.raises(Conflict, match="called off"):
        await second
    await make(fake, archive, replace(SPEC, name="other"), builder=builder)


@pytest.mark.parametrize("start", ["vmm.boot", "vmm.restore"])
async def test_nothing_is_left_of_a_build_once_it_has_been_called_off(
    fake: FakeHost, archive: Path, start: str
) -> None:
    builder = TemplateBuilder(fake.host, LIMITS)
    with fake.taps.recorded():
        held = fake.taps.trip(STEPS.index("guest.run", STEPS.index(start)), Trip())
        building = asyncio.create_task(make(fake, archive, builder=builder))
        await held.reached.wait()
        await builder.cancel("mine")

        assert list(fake.world.hypervisor.alive) == []
        assert fake.host.registry.all() == []
    with pytest.raises(Conflict, match="called off"):
        await building


@each_step
@pytest.mark.parametrize("error", [Unavailable("tripped"), NoSpace("tripped"), Invalid("tripped")])
async def test_a_step_that_fails_leaves_nothing_but_the_old_template(
    fake: FakeHost, archive: Path, number: int, error: AgentEnvError
) -> None:
    raised = False
    with fake.taps.recorded():
        fake.taps.trip(number, Trip(error=error))
        try:
            await make(fake, archive)
        except AgentEnvError:
            raised = True

    ended = STEPS[number] in ENDS and STEPS[number + 1] != "storage.attach_memory"
    optional = STEPS[number] == "guest.run" and isinstance(error, Invalid)  # the image has no such program
    assert raised == (not ended and not optional)
    if raised:
        with pytest.raises(NotFound):
            fake.node.find_snapshot("mine")


@each_step
async def test_a_build_that_is_cut_short_leaves_nothing(fake: FakeHost, archive: Path, number: int) -> None:
    with fake.taps.recorded():
        trip = fake.taps.trip(number, Trip())
        builder = TemplateBuilder(fake.host, LIMITS)
        building = asyncio.create_task(make(fake, archive, builder=builder))
        await trip.reached.wait()
        cutting = asyncio.create_task(builder.cancel(SPEC.name))
        await fake.world.clock.advance(0)
        trip.go.set()
        await cutting
        with suppress(AgentEnvError):
            await building
        await fake.idle()
        await fake.world.clock.advance(0)

    if STEPS[number] != "store.insert_snapshot":
        with pytest.raises(NotFound):
            fake.node.find_snapshot("mine")


@each_step
async def test_a_server_that_dies_in_a_build_leaves_nothing(world: World, archive: Path, number: int) -> None:
    fake = await FakeHost(world).start()
    with fake.taps.recorded():
        trip = fake.taps.trip(number, Trip())
        building = asyncio.create_task(make(fake, archive))
        await trip.reached.wait()
        following = await fake.crash()
        with suppress(BaseException):
            await building

    await following.start()

    with pytest.raises(NotFound):
        following.node.find_snapshot("mine")
    assert await faults(following) == []
    assert list((world.root / "work").glob("*")) == []
    await following.stop()


BAD: Final = [
    replace(SPEC, name="../x"),
    replace(SPEC, name=""),
    replace(SPEC, machine=Machine(0, 128, 256)),
    replace(SPEC, machine=Machine(33, 128, 256)),
    replace(SPEC, machine=Machine(1, 127, 256)),
    replace(SPEC, machine=Machine(1, 128, 255)),
    replace(SPEC, machine=Machine(1, 1 << 20, 256)),
    replace(SPEC, machine=Machine(1, 128, 1 << 21)),
    replace(SPEC, init="init"),
    replace(SPEC, init="/init panic=0"),
    replace(SPEC, init="/init\n"),
]


@pytest.mark.parametrize("spec", BAD)
async def test_what_cannot_be_built_is_refused_before_anything_is_made(
    fake: FakeHost, archive: Path, spec: BuildSpec
) -> None:
    with fake.taps.recorded() as calls, pytest.raises(Invalid):
        await make(fake, archive, spec)

    assert calls == []


async def test_an_archive_without_a_root_file_system_is_invalid(fake: FakeHost, tmp_path: Path) -> None:
    with pytest.raises(Invalid):
        await make(fake, tmp_path / "nothing")


async def test_a_guest_that_dies_at_its_first_boot_is_told_with_its_last_words(fake: FakeHost, archive: Path) -> None:
    with fake.taps.always("guest.init", Trip()) as silent:
        building = asyncio.create_task(make(fake, archive))
        await silent.reached.wait()
        (vm,) = fake.world.hypervisor.alive
        vm.end(0, "no init found")

        with pytest.raises(Invalid, match="no init found"):
            await building


async def test_a_shell_that_fails_is_invalid(fake: FakeHost, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_args: object, **_kwargs: object) -> Completed:
        return Completed(1, b"", b"bad interpreter")

    monkeypatch.setattr(FakeAgent, "run", fails)

    with pytest.raises(Invalid, match="bad interpreter"):
        await make(fake, archive)


async def test_a_boot_test_that_hangs_meets_a_deadline(
    fake: FakeHost, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "COMMAND_TIMEOUT_S", 0.0)
    fake.host.settings = replace(fake.host.settings, operation_timeout_s=0.05)
    with fake.taps.always("vmm.restore", Trip()), pytest.raises(DeadlineExceeded):
        await make(fake, archive)


async def test_a_caller_that_hangs_up_calls_the_build_off(fake: FakeHost, archive: Path) -> None:
    with fake.taps.always("guest.init", Trip()) as slow:
        building = asyncio.create_task(make(fake, archive))
        await slow.reached.wait()
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building

    with pytest.raises(NotFound):
        fake.node.find_snapshot("mine")


async def test_a_full_disk_is_refused_first(fake: FakeHost, archive: Path) -> None:
    fake.world.storage.free_bytes = 0

    with fake.taps.recorded() as calls, pytest.raises(NoSpace):
        await make(fake, archive)

    assert calls == ["storage.usage"]
