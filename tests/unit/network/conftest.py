"""The lab of `lab.py`, and slots in it."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agentenv.network import netns
from agentenv.network.settings import NetworkSettings
from agentenv.network.slots import NetworkSlots
from tests.unit.network.lab import Lab, laid_out


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A test that uses it is marked ``needs("root", "netns", "nft", "tun")``."""
    with laid_out() as made:
        yield made
    for path in tmp_path.glob("**/netns/*"):  # of slots that the test left held
        netns.remove(path)


@pytest.fixture
def settings() -> NetworkSettings:
    return NetworkSettings(warm_low=1, warm_high=2)


@pytest.fixture
async def slots(lab: Lab, tmp_path: Path, settings: NetworkSettings) -> AsyncIterator[NetworkSlots]:
    network = NetworkSlots(settings, tmp_path)
    await network.start()
    yield network
    await network.close()
