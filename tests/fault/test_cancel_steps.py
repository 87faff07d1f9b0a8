"""Every verb, broken at each of its steps: it fails, meets its deadline, is killed, or the server dies there.

What must be left is what docs/design/001 says, and nothing else: no process, slot,
file, pin or record that nobody needs, and nothing missing that somebody does.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from agentenv.model.errors import AgentEnvError, Conflict, DeadlineExceeded, NoSpace, NotFound, Unavailable
from agentenv.model.lifecycle import State
from agentenv.model.sandbox import Forked
from agentenv.node.sweep import sweep
from agentenv.testing.audit import faults
from agentenv.testing.host import FakeHost, Trip, World, log_briefly

pytestmark = pytest.mark.fault

LAUNCH: Final = (
    "slots.acquire",
    "storage.detach",
    "storage.attach_memory",
    "storage.open_disk",
    "vmm.restore",
    "storage.fill_memory",
)
CAPTURE: Final = (
    "store.update_sandbox",
    "guest.freeze",
    "instance.pause",
    "instance.save_device_state",
    "storage.put_blob",
    "storage.capture_memory",
    "storage.seal_disk",
    "instance.switch_disk",
)
END_VM: Final = ("instance.stop", "slots.release", "storage.detach")
COPY: Final = (
    "storage.usage",
    *CAPTURE,
    "instance.resume",
    "guest.thaw",
    "store.update_sandbox",
)
STEPS: Final = {
    "create": (
        "storage.usage",
        "storage.create_disk",
        *LAUNCH,
        "store.insert_sandbox",
        "instance.resume",
        "guest.init",
        "store.update_sandbox",
        "store.count_spawn",
    ),
    "pause": (*CAPTURE, "store.update_sandbox", *END_VM),
    "resume": (
        "store.update_sandbox",
        *LAUNCH,
        "store.update_sandbox",
        "instance.resume",
        "guest.init",
        "store.update_sandbox",
    ),
    "fork": (
        *COPY,
        "storage.create_disk",
        *LAUNCH,
        "store.insert_sandbox",
        "instance.resume",
        "guest.init",
        "store.update_sandbox",
    ),
    "snapshot": (*COPY, "storage.flatten_memory", "store.insert_snapshot"),
    "delete": ("store.update_sandbox", *END_VM, "storage.remove", "store.delete_sandbox"),
}
EACH_STEP: Final = [(verb, number) for verb, steps in STEPS.items() for number in range(len(steps))]


def named(verb: str, number: int) -> str:
    return f"{verb}-{number}-{STEPS[verb][number]}"


each_step = pytest.mark.parametrize(("verb", "number"), EACH_STEP, ids=[named(*step) for step in EACH_STEP])


@dataclass
class Scene:
    """A server with one sandbox that *verb* is about to be done to; for create, the one it makes."""

    fake: FakeHost
    verb: str
    sandbox: str = ""

    async def prepare(self) -> "Scene":
        if self.verb != "create":
            self.sandbox = (await self.fake.create()).id
        if self.verb == "resume":
            await self.fake.node.pause(self.sandbox)
        await settled(self.fake)
        return self

    async def act(self) -> object:
        node = self.fake.node
        verbs: dict[str, Callable[[], Awaitable[object]]] = {
            "create": self.fake.create,
            "pause": lambda: node.pause(self.sandbox),
            "resume": lambda: node.resume(self.sandbox, 300),
            "fork": lambda: node.fork(self.sandbox, 1, 300),
            "snapshot": lambda: node.snapshot(self.sandbox, "kept"),
            "delete": lambda: node.delete(self.sandbox),
        }
        return await verbs[self.verb]()

    @property
    def others(self) -> list[State]:
        """The states of the sandboxes that the verb made."""
        return [s.state for s in self.fake.host.registry.all() if s.id != self.sandbox]

    @property
    def was_kept(self) -> bool:
        return len(self.fake.host.catalogue.all()) == 2


@pytest.fixture(autouse=True)
def brief_logs() -> None:
    log_briefly()


@pytest.fixture
async def fakes(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[FakeHost]]]:
    made: list[FakeHost] = []

    async def make(**settings: Any) -> FakeHost:
        made.append(await FakeHost(World(tmp_path), **settings).start())
        return made[-1]

    yield make
    for fake in made:
        if not fake.taps.severed:
            await fake.stop()


async def settled(fake: FakeHost) -> None:
    """Let what was started in the background end."""
    await fake.world.clock.advance(0)
    await fake.idle()


async def test_these_are_the_steps(fakes: Callable[..., Awaitable[FakeHost]], each_verb: str) -> None:
    scene = await Scene(await fakes(), each_verb).prepare()

    with scene.fake.taps.recorded() as calls:
        await scene.act()
        await settled(scene.fake)

    assert tuple(calls) == STEPS[each_verb]
    assert await faults(scene.fake) == []


@pytest.fixture(params=STEPS)
def each_verb(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@each_step
@pytest.mark.parametrize("error", [Unavailable("tripped"), NoSpace("tripped")], ids=["unavailable", "no_space"])
async def test_a_step_that_fails_leaves_what_it_should(
    fakes: Callable[..., Awaitable[FakeHost]], verb: str, number: int, error: AgentEnvError
) -> None:
    scene = await Scene(await fakes(), verb).prepare()

    raised: AgentEnvError | None = None
    answer: object = None
    with scene.fake.taps.recorded():
        scene.fake.taps.trip(number, Trip(error=error))
        try:
            answer = await scene.act()
        except AgentEnvError as caught:
            raised = caught
        await settled(scene.fake)

    assert raised in (None, error) or raised.__cause__ is error
    check_failed(scene, number, raised, answer)
    await sweep(scene.fake.host)
    await catch_up(scene)
    assert await faults(scene.fake) == []


def check_failed(scene: Scene, number: int, raised: AgentEnvError | None, answer: object) -> None:
    """What a failure of step *number* leaves."""
    state = scene.fake.state(scene.sandbox) if scene.sandbox else None
    match scene.verb:
        case "create":
            works = STEPS["create"][number] == "store.count_spawn"
            assert scene.others == ([State.RUNNING] if works else [])
            assert (raised is None) == works
        case "pause":
            assert state == (State.PAUSED if number > COMMIT else State.RUNNING)
            assert (raised is None) == (number > COMMIT)
        case "resume":
            assert state == State.PAUSED
            assert raised is not None
        case "fork":
            copied = len(COPY) - 1  # a record of the source that cannot be written is no failure
            assert state == State.RUNNING
            assert scene.others == ([State.RUNNING] if number == copied else [])
            assert (raised is None) == (number >= copied)
            if number > copied:
                assert isinstance(answer, list)
                (child,) = answer
                assert isinstance(child, Forked)
                assert isinstance(child.error, AgentEnvError)
        case "snapshot":
            works = number == len(COPY) - 1
            assert state == State.RUNNING
            assert scene.was_kept == works
            assert (raised is None) == works
        case "delete":
            works = number == 0  # it is deleted even if that cannot be recorded first
            assert state == (State.GONE if works else State.KILLING)
            assert (raised is None) == works


async def catch_up(scene: Scene) -> None:
    """Write what the store could not take before, with the next change of each sandbox."""
    for sandbox in scene.fake.host.registry.all():
        if sandbox.state is State.RUNNING:
            await scene.fake.node.set_timeout(sandbox.id, 200)


@each_step
async def test_a_kill_at_any_step_ends_it(fakes: Callable[..., Awaitable[FakeHost]], verb: str, number: int) -> None:
    await kill_at(await fakes(), verb, number, after=False)


STORE_STEPS: Final = [(verb, number) for verb, number in EACH_STEP if STEPS[verb][number].startswith("store.")]


@pytest.mark.parametrize(("verb", "number"), STORE_STEPS, ids=[named(*step) for step in STORE_STEPS])
async def test_a_kill_just_after_a_record_is_written_ends_it(
    fakes: Callable[..., Awaitable[FakeHost]], verb: str, number: int
) -> None:
    await kill_at(await fakes(), verb, number, after=True)


async def kill_at(fake: FakeHost, verb: str, number: int, *, after: bool) -> None:
    scene = await Scene(fake, verb).prepare()
    with fake.taps.recorded():
        trip = fake.taps.trip(number, Trip(after=after))
        acting = asyncio.create_task(scene.act())
        await trip.reached.wait()
        if STEPS[verb][number] in ("storage.usage", "store.count_spawn"):
            trip.go.set()  # nothing to kill yet, or any more
            await asyncio.gather(acting)
        doomed = [s.id for s in fake.host.registry.all()]
        killing = [asyncio.create_task(fake.node.delete(sandbox)) for sandbox in doomed]
        await fake.world.clock.advance(0)
        trip.go.set()
        await asyncio.gather(*killing)
        with suppress(Conflict, NotFound):
            await acting
        await settled(fake)

    for sandbox in doomed:
        assert fake.state(sandbox) == State.GONE
        with pytest.raises(NotFound):
            fake.node.get(sandbox)
    assert await faults(fake) == []


COMMIT: Final = STEPS["pause"].index("store.update_sandbox", 1)


def has_deadline(verb: str, number: int) -> bool:
    """Not admission, the first record of a verb, and what comes after its last."""
    if number == 0 or STEPS[verb][number] in ("storage.flatten_memory", "store.insert_snapshot", "store.count_spawn"):
        return False
    match verb:
        case "delete":
            return False
        case "pause":
            return number <= COMMIT
        case "fork" | "snapshot":
            return number > 1
        case _:
            return True


DEADLINE_S: Final = 987.0  # a length that nothing else takes


class Deadlines:
    """Those of operations: they come when the test says so, however slow the machine is."""

    def __init__(self) -> None:
        self._timeout = asyncio.timeout
        self._made: list[asyncio.Timeout] = []

    def __call__(self, delay: float | None) -> asyncio.Timeout:
        if delay != DEADLINE_S:
            return self._timeout(delay)
        self._made.append(self._timeout(None))
        return self._made[-1]

    def come(self) -> None:
        now = asyncio.get_running_loop().time()
        for each in self._made:
            with suppress(RuntimeError):  # it is over already
                each.reschedule(now)


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> Deadlines:
    made = Deadlines()
    monkeypatch.setattr(asyncio, "timeout", made)
    return made


TIMED: Final = [step for step in EACH_STEP if has_deadline(*step)]


@pytest.mark.parametrize(("verb", "number"), TIMED, ids=[named(*step) for step in TIMED])
async def test_a_step_that_hangs_meets_the_deadline_of_its_verb(
    fakes: Callable[..., Awaitable[FakeHost]], verb: str, number: int, deadlines: Deadlines
) -> None:
    fake = await fakes(operation_timeout_s=DEADLINE_S)
    scene = await Scene(fake, verb).prepare()

    raised: AgentEnvError | None = None
    answer: object = None
    with fake.taps.recorded():
        trip = fake.taps.trip(number, Trip())
        acting = asyncio.create_task(scene.act())
        await trip.reached.wait()
        deadlines.come()
        await cancelled_operation(fake)
        trip.go.set()  # a record that is being written is waited for
        try:
            answer = await acting
        except AgentEnvError as caught:
            raised = caught
        await settled(fake)

    assert raised is None or isinstance(raised, DeadlineExceeded)
    step = STEPS[verb][number]
    state = fake.state(scene.sandbox) if scene.sandbox else None
    match verb:
        case "create":
            assert scene.others == []
            assert raised is not None
        case "pause":
            assert state == (State.PAUSED if step.startswith("store.") else State.RUNNING)
            assert (raised is None) == step.startswith("store.")
        case "resume":
            last = len(STEPS["resume"]) - 1  # a record that is being written is waited for
            assert state == (State.RUNNING if number == last else State.PAUSED)
            assert (raised is None) == (number == last)
        case "fork":
            assert state == State.RUNNING
            assert scene.others == []
            if number >= len(COPY):
                assert isinstance(answer, list)
                assert isinstance(answer[0].error, DeadlineExceeded)
        case "snapshot":
            assert state == State.RUNNING
            assert not scene.was_kept
    assert await faults(fake) == []


async def cancelled_operation(fake: FakeHost) -> None:
    """Return when a deadline has cancelled the operation in progress, or it has ended of that."""
    while (running := fake.host.operations._current.values()) and not any(op.task.cancelling() for op in running):
        await asyncio.sleep(0.001)


CRASHES: Final = [(verb, number, after) for verb, number in EACH_STEP for after in (False, True)]


@pytest.mark.parametrize(
    ("verb", "number", "after"), CRASHES, ids=[f"{named(v, n)}-{'after' if a else 'before'}" for v, n, a in CRASHES]
)
async def test_a_server_that_dies_at_a_step_is_repaired_by_the_next(
    fakes: Callable[..., Awaitable[FakeHost]], verb: str, number: int, after: bool
) -> None:
    scene = await Scene(await fakes(), verb).prepare()
    with scene.fake.taps.recorded():
        trip = scene.fake.taps.trip(number, Trip(after=after))
        acting = asyncio.create_task(scene.act())
        await trip.reached.wait()
        following = await scene.fake.crash()
        with suppress(BaseException):
            await acting

    scene.fake = await following.start()

    try:
        check_repaired(scene, number, after=after)
        await catch_up(scene)
        assert await faults(scene.fake) == []
        for sandbox in scene.fake.node.sandboxes():
            if sandbox.state is State.PAUSED:
                assert (await scene.fake.node.resume(sandbox.id, 300)).state is State.RUNNING
            await scene.fake.node.delete(sandbox.id)
        assert await faults(scene.fake) == []
    finally:
        await scene.fake.stop()


def check_repaired(scene: Scene, number: int, *, after: bool) -> None:
    """What the journal says after a crash at step *number*; with *after* once that step was done."""
    done = number + 1 if after else number  # how many steps had been done
    state = scene.fake.state(scene.sandbox) if scene.sandbox else None
    match scene.verb:
        case "create":
            recorded = STEPS["create"].index("store.update_sandbox") + 1
            assert scene.others == ([State.RUNNING] if done >= recorded else [])
        case "pause":
            assert state == (State.PAUSED if done > COMMIT else State.RUNNING)
        case "resume":
            journalled = STEPS["resume"].index("store.update_sandbox", 1) + 1
            assert state == (State.RUNNING if done >= journalled else State.PAUSED)
        case "fork":
            assert state == State.RUNNING
            assert scene.others == ([State.RUNNING] if done == len(STEPS["fork"]) else [])
        case "snapshot":
            assert state == State.RUNNING
            assert scene.was_kept == (done == len(STEPS["snapshot"]))
        case "delete":
            assert state == (State.GONE if done >= 1 else State.RUNNING)
