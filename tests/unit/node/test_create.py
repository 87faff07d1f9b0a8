"""Create: what a new sandbox is, what is refused before anything is taken, and who gets the last place."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from ipaddress import IPv4Network

import pytest

from agentenv.model.errors import (
    AgentEnvError,
    Conflict,
    Exhausted,
    Invalid,
    NoSpace,
    NotFound,
    Unavailable,
    Unsupported,
)
from agentenv.model.lifecycle import State
from agentenv.model.policy import EgressPolicy, IngressPolicy
from agentenv.model.sandbox import CreateSandbox, OnTimeout, Sandbox
from agentenv.testing.host import FakeHost, Trip, World


async def test_a_new_sandbox_is_what_was_asked_for(fake: FakeHost) -> None:
    egress = EgressPolicy(allow_internet=False, allow_out=(IPv4Network("192.0.2.0/24"),))
    ingress = IngressPolicy(allow_public_traffic=False)

    sandbox = await fake.create(
        timeout_s=60, on_timeout=OnTimeout.PAUSE, auto_resume=True, metadata={"a": "b"}, env={"C": "d"},
        egress=egress, ingress=ingress, secure=False,
    )  # fmt: skip

    template = fake.host.catalogue.find("base")
    assert sandbox.state is State.RUNNING
    assert sandbox.generation == 1
    assert sandbox.ends_at == fake.world.clock.now() + timedelta(seconds=60)
    assert (sandbox.template_id, sandbox.template_name) == (template.id, "base")
    assert (sandbox.on_timeout, sandbox.auto_resume, sandbox.secure) == (OnTimeout.PAUSE, True, False)
    assert (sandbox.metadata, sandbox.env) == ({"a": "b"}, {"C": "d"})
    assert (sandbox.egress, sandbox.ingress) == (egress, ingress)
    assert fake.node.get(sandbox.id) == sandbox
    assert await fake.world.store.sandboxes() == [sandbox]


async def test_the_time_to_live_starts_when_the_guest_answers(fake: FakeHost) -> None:
    with fake.taps.always("guest.init", Trip()) as slow:
        creating = asyncio.create_task(fake.create(timeout_s=60))
        await slow.reached.wait()
        await fake.world.clock.advance(50)
        slow.go.set()
        sandbox = await creating

    assert sandbox.started_at == fake.world.clock.now()
    assert sandbox.ends_at == sandbox.started_at + timedelta(seconds=60)
    assert sandbox.created_at == sandbox.started_at - timedelta(seconds=50)


async def test_a_guest_gets_an_identity_of_its_own_with_the_secret_of_what_it_was_captured_from(fake: FakeHost) -> None:
    first, second = [await fake.create() for _ in range(2)]

    (a,), (b,) = fake.world.guests.identities[first.id], fake.world.guests.identities[second.id]
    differ = ("sandbox_id", "access_token", "control_secret", "hostname", "machine_id", "entropy")
    assert all(getattr(a, name) != getattr(b, name) for name in differ)
    maker = fake.host.catalogue.find("base").capture.control_of
    assert fake.world.guests.secrets[first.id] == f"control-{maker}"
    assert a.control_secret == f"control-{first.id}"
    assert len(a.entropy) >= 32


@pytest.mark.parametrize("secure", [True, False])
async def test_only_a_secure_sandbox_has_an_access_token(fake: FakeHost, secure: bool) -> None:
    sandbox = await fake.create(secure=secure)

    (identity,) = fake.world.guests.identities[sandbox.id]
    assert identity.access_token == (f"envd-{sandbox.id}" if secure else None)
    assert fake.node.tokens(sandbox).envd == identity.access_token


async def test_the_environment_of_the_template_is_added_to_not_replaced(fake: FakeHost) -> None:
    base = fake.host.catalogue.find("base")
    fake.host.catalogue._snapshots[base.id] = replace(base, env={"A": "template", "B": "template"})

    sandbox = await fake.create(env={"B": "mine"})

    assert sandbox.env == {"A": "template", "B": "mine"}
    fake.host.catalogue._snapshots[base.id] = base


@pytest.mark.parametrize("reference", ["base", "base:default", "team/base", "team/base:default"])
async def test_a_template_is_found_by_any_spelling_of_its_name(fake: FakeHost, reference: str) -> None:
    assert (await fake.create(template=reference)).template_name == "base"


async def test_a_template_is_found_by_its_id(fake: FakeHost) -> None:
    assert (await fake.create(template=fake.host.catalogue.find("base").id)).template_name == "base"


REFUSED: list[tuple[dict[str, object], type[AgentEnvError]]] = [
    ({"template": "other"}, NotFound),
    ({"template": "../nowhere"}, NotFound),
    ({"template": ""}, NotFound),
    ({"timeout_s": 0}, Invalid),
    ({"timeout_s": -1}, Invalid),
    ({"timeout_s": 10**9}, Invalid),
]


@pytest.mark.parametrize(("request_", "kind"), REFUSED)
async def test_what_cannot_be_is_refused_before_anything_is_taken(
    fake: FakeHost, request_: dict[str, object], kind: type[AgentEnvError]
) -> None:
    with fake.taps.recorded() as calls, pytest.raises(kind):
        await fake.create(**request_)

    assert calls == []


async def test_a_template_of_another_host_is_unsupported(fake: FakeHost) -> None:
    base = fake.host.catalogue.find("base")
    other = replace(base, fingerprint=replace(base.fingerprint, vmm_version="0.1"))
    fake.host.catalogue._snapshots[base.id] = other

    with fake.taps.recorded() as calls, pytest.raises(Unsupported, match="another host"):
        await fake.create()

    assert calls == []
    fake.host.catalogue._snapshots[base.id] = base


async def test_a_full_disk_is_refused_before_anything_is_taken(fake: FakeHost) -> None:
    fake.world.storage.free_bytes = (fake.host.settings.min_free_disk_mib << 20) - 1

    with fake.taps.recorded() as calls, pytest.raises(NoSpace):
        await fake.create()

    assert calls == ["storage.usage"]


@pytest.mark.parametrize("most", [1, 7])
async def test_of_fifty_creates_at_once_exactly_as_many_succeed_as_there_are_places(world: World, most: int) -> None:
    fake = await FakeHost(world, max_sandboxes=most).start()

    outcomes = await asyncio.gather(*(fake.create() for _ in range(50)), return_exceptions=True)

    made = [outcome for outcome in outcomes if isinstance(outcome, Sandbox)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, Exhausted)]
    assert (len(made), len(refused)) == (most, 50 - most)
    assert len(fake.node.sandboxes()) == most
    await fake.node.delete(made[0].id)
    await fake.create()
    await fake.stop()


async def test_a_place_is_free_again_after_a_create_that_failed(world: World) -> None:
    fake = await FakeHost(world, max_sandboxes=1).start()
    fake.vmm.fail["restore"] = Unavailable("no")
    with pytest.raises(Unavailable):
        await fake.create()
    fake.vmm.fail.clear()

    await fake.create()

    await fake.stop()


async def test_a_vm_that_ends_while_it_starts_is_an_error_at_once_with_its_last_words(fake: FakeHost) -> None:
    with fake.taps.always("guest.init", Trip()) as silent:
        creating = asyncio.create_task(fake.create())
        await silent.reached.wait()
        (process,) = fake.world.hypervisor.alive
        process.end(1, "Kernel panic - not syncing")

        with pytest.raises(Unavailable, match="Kernel panic"):
            await creating

    assert fake.node.sandboxes() == []


async def test_a_caller_that_hangs_up_leaves_a_sandbox_behind_that_lives_its_time(fake: FakeHost) -> None:
    with fake.taps.always("guest.init", Trip()) as slow:
        creating = asyncio.create_task(fake.create(timeout_s=60))
        await slow.reached.wait()
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        slow.go.set()
        await fake.idle()

    (sandbox,) = fake.node.sandboxes()
    assert sandbox.ends_at == fake.world.clock.now() + timedelta(seconds=60)
    assert fake.node.info().create_successes == 1
    assert fake.node.info().starting == 0


async def test_a_sandbox_that_starts_is_not_listed(fake: FakeHost) -> None:
    with fake.taps.always("guest.init", Trip()) as slow:
        creating = asyncio.create_task(fake.create())
        await slow.reached.wait()

        assert fake.node.sandboxes() == []
        assert fake.node.info().starting == 1
        slow.go.set()
        await creating

    assert len(fake.node.sandboxes()) == 1


async def test_a_create_that_is_killed_is_a_conflict_for_the_creator_and_leaves_nothing(fake: FakeHost) -> None:
    with fake.taps.always("guest.init", Trip()) as slow:
        creating = asyncio.create_task(fake.create())
        await slow.reached.wait()
        (starting,) = fake.host.registry.all()

        await fake.node.delete(starting.id)

        with pytest.raises(Conflict, match="cut short by kill"):
            await creating
    assert fake.host.registry.all() == []


async def test_creates_and_deletes_in_any_order_leave_nothing(fake: FakeHost) -> None:
    async def come_and_go() -> None:
        sandbox = await fake.create()
        await fake.node.delete(sandbox.id)

    await asyncio.gather(*(come_and_go() for _ in range(30)))

    assert fake.node.sandboxes() == []


async def test_spawns_of_a_template_are_counted(fake: FakeHost) -> None:
    for _ in range(3):
        await fake.create()
    await fake.world.clock.advance(0)

    template = fake.node.find_snapshot("base")
    assert template.spawn_count == 3
    assert template.last_spawned_at == fake.world.clock.now()
    assert (await fake.world.store.snapshots())[0].spawn_count == 3


async def test_a_template_that_is_deleted_meanwhile_is_not_found(fake: FakeHost) -> None:
    with fake.taps.recorded():
        trip = fake.taps.trip(0, Trip())
        creating = asyncio.create_task(fake.create())
        await trip.reached.wait()
        await fake.node.delete_snapshot("base")
        await fake.host.collector.collect()
        trip.go.set()

        with pytest.raises(NotFound):
            await creating


async def test_a_slot_that_cannot_be_had_leaves_nothing(fake: FakeHost) -> None:
    fake.world.slots.failures["acquire"] = Exhausted("no slots")

    with pytest.raises(Exhausted):
        await fake.create()

    assert fake.host.registry.all() == []


def test_a_request_has_the_defaults_of_the_api() -> None:
    request = CreateSandbox(template="base", timeout_s=1)

    assert (request.secure, request.auto_resume, request.on_timeout) == (True, False, OnTimeout.KILL)
