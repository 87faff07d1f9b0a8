"""Agents for tests: with accounts of their own instead of the host's, or in a root of their own."""

import shlex
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.guest_envd.agent import Agent, running

USER_ID = 1000


@dataclass(frozen=True, slots=True)
class Box:
    """An agent that sees the host's files with these accounts, and a directory that belongs to its user."""

    agent: Agent
    home: Path


def accounts(directory: Path, home: Path) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "passwd").write_text(f"root:x:0:0:root:/root:/bin/sh\nuser:x:{USER_ID}:{USER_ID}::{home}:/bin/sh\n")
    (directory / "group").write_text(f"root:x:0:\ntty:x:5:\nuser:x:{USER_ID}:\nhelpers:x:1234:user\n")


def unshared(binary: Path, etc: Path, *options: str) -> list[str]:
    """The command of an agent whose accounts are those in *etc*."""
    mounts = "".join(f"mount --bind {shlex.quote(str(etc / name))} /etc/{name}; " for name in ("passwd", "group"))
    serve = shlex.join([str(binary), "serve", "--port", "0", *options])
    return ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-ec", f"{mounts}exec {serve}"]


@pytest.fixture(scope="module")
def module_dir() -> Iterator[Path]:
    # Not below pytest's own directory: only its owner may enter that, and the agent's user is another.
    with tempfile.TemporaryDirectory(prefix="envd-test-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


@pytest.fixture(scope="module")
def shared_agent(envd_binary: Path, module_dir: Path) -> Iterator[Agent]:
    home = module_dir / "home"
    home.mkdir()
    shutil.chown(home, USER_ID, USER_ID)
    accounts(module_dir / "etc", home)
    with running(unshared(envd_binary, module_dir / "etc", "--no-cgroup")) as agent:
        agent.init(defaultUser="user")
        yield agent


@pytest.fixture
def box(shared_agent: Agent, module_dir: Path) -> Iterator[Box]:
    """The agent of this module, and an empty home. No process may be left by a test."""
    home = module_dir / "home"
    for entry in home.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    yield Box(shared_agent, home)
    for pid in shared_agent.pids():
        shared_agent.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})


@pytest.fixture
def agent(box: Box) -> Agent:
    return box.agent
