"""Failpoints do nothing, or exactly what they were armed with, once."""

import asyncio
import signal
import subprocess
import sys

import pytest

from agentenv.aio.failpoints import REGISTRY, Failpoints, Kill, Raise, Sleep, Stall, failpoint, failpoint_nowait
from agentenv.aio.tasks import spawn
from agentenv.model.errors import Bug, Invalid, NoSpace


async def test_an_unarmed_failpoint_does_nothing() -> None:
    await failpoint("pause.captured")
    failpoint_nowait("pause.captured")
    assert not REGISTRY


async def test_an_armed_failpoint_raises_once() -> None:
    with REGISTRY.armed("pause.captured", Raise(NoSpace("full"))):
        await failpoint("pause.sealed")
        with pytest.raises(NoSpace):
            await failpoint("pause.captured")
        await failpoint("pause.captured")
    assert not REGISTRY


async def test_a_failpoint_can_let_passes_through() -> None:
    with REGISTRY.armed("pause.captured", Raise(NoSpace("full")), on_pass=3):
        failpoint_nowait("pause.captured")
        failpoint_nowait("pause.captured")
        with pytest.raises(NoSpace):
            failpoint_nowait("pause.captured")


async def test_a_star_counts_every_name() -> None:
    with REGISTRY.armed("*", Raise(NoSpace("full")), on_pass=2):
        await failpoint("create.slot")
        with pytest.raises(NoSpace):
            await failpoint("create.disk")


async def test_what_is_due_together_happens_one_after_the_other() -> None:
    with REGISTRY.armed("*", Raise(NoSpace("star"))), REGISTRY.armed("a", Raise(NoSpace("name"))):
        for which in ("name", "star"):
            with pytest.raises(NoSpace, match=which):
                await failpoint("a")


async def test_a_stall_tells_and_holds() -> None:
    stall = Stall()
    with REGISTRY.armed("pause.captured", stall):
        passing = spawn("passing", failpoint("pause.captured"))
        await stall.reached.wait()
        await asyncio.sleep(0)
        assert not passing.done()

        stall.released.set()
        await passing


async def test_code_that_cannot_wait_is_not_made_to() -> None:
    with REGISTRY.armed("a", Stall()), pytest.raises(Bug):
        failpoint_nowait("a")


def test_a_text_arms_several() -> None:
    points = Failpoints()
    points.arm_text(" pause.captured = kill ; b=raise:no_space@2; c=sleep:0.5;d=stall; *=kill@17;")

    assert isinstance(points.take("pause.captured"), Kill)
    assert points.take("b") is None
    raising = points.take("b")
    assert isinstance(raising, Raise)
    assert isinstance(raising.error, NoSpace)
    assert points.take("c") == Sleep(0.5)
    assert isinstance(points.take("d"), Stall)


@pytest.mark.parametrize(
    "text",
    ["a", "a=", "=kill", "a=boom", "a=kill:9", "a=raise:", "a=raise:nothing", "a=sleep:x", "a=sleep:-1", "a=sleep:nan",
     "a=kill@0", "a=kill@x", "a=stall; b=boom"],
)  # fmt: skip
def test_a_text_that_says_something_else_is_refused_whole(text: str) -> None:
    points = Failpoints()
    with pytest.raises(Invalid):
        points.arm_text(text)
    assert not points


def test_a_pass_that_never_comes_is_refused() -> None:
    with pytest.raises(Invalid):
        Failpoints().arm("a", Kill(), on_pass=0)


def test_kill_ends_the_process_with_nothing_cleaned_up() -> None:
    program = (
        "import asyncio\n"
        "from agentenv.aio.failpoints import REGISTRY, failpoint\n"
        "REGISTRY.arm_text('a=kill')\n"
        "try:\n asyncio.run(failpoint('a'))\n"
        "finally:\n print('cleaned up')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)

    assert ended.returncode == -signal.SIGKILL
    assert b"cleaned up" not in ended.stdout
