"""A server with a fake node, and `aenv` told where it is."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.world import Terminal, World, environment


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    world.open()
    yield world
    world.close()


@pytest.fixture
def aenv(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Terminal:
    told = environment(world.url, tmp_path)
    for name in [one for one in os.environ if one.startswith(("AENV_", "E2B_"))]:
        monkeypatch.delenv(name)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    return Terminal(told, monkeypatch, capfd)
