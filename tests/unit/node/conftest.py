"""A started node made of fakes, checked for anything left over at the end of each test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.testing.audit import faults
from agentenv.testing.host import FakeHost, World, log_briefly


@pytest.fixture(autouse=True)
def brief_logs() -> None:
    log_briefly()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
async def fake(world: World) -> AsyncIterator[FakeHost]:
    """Whatever a test does to it, it must be whole afterwards: that is asserted here."""
    fake = await FakeHost(world).start()
    yield fake
    await world.clock.advance(0)
    await fake.idle()
    wrong = await faults(fake)
    await fake.stop()
    assert wrong == []
