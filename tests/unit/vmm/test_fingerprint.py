"""What is asked of a QEMU before it is trusted, with programs that only claim to be one."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.model.errors import Unsupported
from agentenv.vmm.fingerprint import NEEDED_COMMANDS, cpu_model, probe
from agentenv.vmm.plan import Engine
from agentenv.vmm.process import is_alive
from agentenv.vmm.spawn import Spawner, Started

TCG = Engine("tcg", tb_size_mib=32)

SCRIPT = """#!{python}
import json, socket, sys
answers = {answers}
monitor = socket.socket(fileno=3)
say = lambda message: monitor.sendall(json.dumps(message).encode() + b"\\n")
say({{"QMP": {{}}}})
for line in monitor.makefile():
    command = json.loads(line)
    say({{"return": answers.get(command["execute"], {{}}), "id": command["id"]}})
"""


def pretender(
    directory: Path,
    *,
    version: tuple[int, int] = (7, 2),
    without: str | None = None,
    machines: tuple[str, ...] = ("none", "microvm"),
) -> Path:
    """Return a program that answers as a QEMU would."""
    answers = {
        "query-version": {"qemu": {"major": version[0], "minor": version[1], "micro": 9}, "package": "made up"},
        "query-commands": [{"name": name} for name in NEEDED_COMMANDS if name != without],
        "query-machines": [{"name": name} for name in machines],
    }
    program = directory / "qemu"
    program.write_text(SCRIPT.format(python=sys.executable, answers=answers))
    program.chmod(0o755)
    return program


@pytest.fixture
async def spawner() -> AsyncIterator[Spawner]:
    spawner = Spawner()
    yield spawner
    await asyncio.to_thread(spawner.close)


async def test_a_qemu_that_can_do_all_is_taken_by_its_feature_release(spawner: Spawner, tmp_path: Path) -> None:
    found = await probe(pretender(tmp_path), TCG, guest_digest="g", spawner=spawner, timeout_s=10.0)

    assert (found.driver, found.vmm_version, found.accelerator, found.guest_digest) == ("qemu", "7.2", "tcg", "g")


@pytest.mark.parametrize("command", NEEDED_COMMANDS)
async def test_a_qemu_that_lacks_a_command_is_refused_by_its_name(
    spawner: Spawner, tmp_path: Path, command: str
) -> None:
    program = pretender(tmp_path, without=command)

    with pytest.raises(Unsupported, match=command) as raised:
        await probe(program, TCG, guest_digest="", spawner=spawner, timeout_s=10.0)

    assert raised.value.hint


async def test_a_qemu_that_is_too_old_is_refused(spawner: Spawner, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"6\.2 is too old"):
        await probe(pretender(tmp_path, version=(6, 2)), TCG, guest_digest="", spawner=spawner, timeout_s=10.0)


async def test_a_qemu_without_microvm_is_refused(spawner: Spawner, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="microvm"):
        await probe(pretender(tmp_path, machines=("q35",)), TCG, guest_digest="", spawner=spawner, timeout_s=10.0)


async def test_a_program_that_ends_is_refused_with_its_words(spawner: Spawner, tmp_path: Path) -> None:
    program = tmp_path / "qemu"
    program.write_text("#!/bin/sh\necho 'invalid accelerator tcg' >&2\nexit 1\n")
    program.chmod(0o755)

    with pytest.raises(Unsupported, match="invalid accelerator tcg"):
        await probe(program, TCG, guest_digest="", spawner=spawner, timeout_s=10.0)


async def test_a_program_that_says_nothing_is_refused_in_time_and_ended(spawner: Spawner, tmp_path: Path) -> None:
    started: list[Started] = []

    class Watched(Spawner):
        async def spawn(self, *args: Any, **more: Any) -> Started:
            started.append(await spawner.spawn(*args, **more))
            return started[-1]

    program = tmp_path / "qemu"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)

    with pytest.raises(Unsupported):
        await probe(program, TCG, guest_digest="", spawner=Watched(), timeout_s=0.5)

    assert [is_alive(one.identity) for one in started] == [False]


def test_under_kvm_the_host_s_cpu_is_part_of_the_model() -> None:
    assert cpu_model(TCG).startswith("max")
    assert cpu_model(Engine("kvm", tb_size_mib=32)) == cpu_model(Engine("kvm", tb_size_mib=64))
    assert cpu_model(Engine("kvm", tb_size_mib=32)).startswith("host:")
