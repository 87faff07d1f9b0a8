"""The disks of the plain back end under a real QEMU, which has them open while they are sealed.

No guest runs: QEMU's own monitor does the reads and writes through the disk device.
"""

import json
import os
import random
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from agentenv.model.errors import Unavailable
from agentenv.model.machine import BlockTarget
from agentenv.model.snapshot import Stack
from agentenv.storage.plain import PlainStorage
from tests.capabilities import QEMU
from tests.unit.storage.disk_guest import GuestDisk, chain_of
from tests.unit.storage.memory_guest import MemoryGuest

pytestmark = [pytest.mark.needs("qemu", "qemu-img"), pytest.mark.slow]

MIB = 1 << 20
DISK = 64 * MIB
MEMORY = 64 * MIB


class Qemu:
    """A VMM that never runs its CPUs. `switch` does what a driver does."""

    def __init__(self, target: BlockTarget, run_dir: Path, *options: str) -> None:
        path = run_dir / "m"
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen()
        self._nodes = 0
        machine = "microvm,memory-backend=m" if options else "microvm"
        # What a command of the monitor prints goes to standard output; a terminal, so that it comes at once.
        self._said, terminal = os.openpty()
        self._process = subprocess.Popen(
            [
                QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-S", "-M", machine, "-accel", "tcg",
                "-m", "64M", "-blockdev", json.dumps(self._node(target, with_backing=True)),
                "-device", "virtio-blk-device,id=disk,drive=n0", "-qmp", f"unix:{path}", *options,
            ],
            stdout=terminal,
        )  # fmt: skip
        os.close(terminal)
        listening.settimeout(60)
        try:
            monitor, _ = listening.accept()
        except TimeoutError:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            listening.close()
        self._monitor, self._answers = monitor, monitor.makefile("r")
        self._answers.readline()
        self.execute("qmp_capabilities")
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._answers.close()
        self._monitor.close()
        os.close(self._said)

    def execute(self, command: str, **arguments: object) -> Any:
        self._monitor.sendall(json.dumps({"execute": command, "arguments": arguments}).encode())
        while True:
            answer = json.loads(self._answers.readline())
            if "error" in answer:
                raise Unavailable(answer["error"]["desc"])
            if "return" in answer:
                return answer["return"]

    def write(self, offset: int, pattern: int, length: int) -> None:
        assert "failed" not in self._io(f"write -P {pattern} {offset} {length}")
        self._command("flush")

    def shows(self, offset: int, pattern: int, length: int) -> bool:
        return "failed" not in self._io(f"read -P {pattern} {offset} {length}")

    async def switch(self, target: BlockTarget) -> None:
        present = f"n{self._nodes}"
        self._nodes += 1
        node = self._node(target, with_backing=False)
        self.execute("blockdev-add", **node)
        self.execute("blockdev-snapshot", node=present, overlay=node["node-name"])

    async def switch_and_lie(self, target: BlockTarget) -> None:
        await self.switch(target)
        raise Unavailable("no answer in time")

    def _node(self, target: BlockTarget, *, with_backing: bool) -> dict[str, Any]:
        file = {"driver": "file", "filename": str(target.path)}
        node: dict[str, Any] = {"driver": target.format, "node-name": f"n{self._nodes}", "file": file}
        return node if with_backing else node | {"backing": None}

    def _io(self, command: str) -> str:
        self._command(command)
        said = ""
        while "ops/sec)" not in said and "rror" not in said:
            said += os.read(self._said, 4096).decode()
        return said.replace("rror", "rror: failed")

    def _command(self, command: str) -> None:
        said = self.execute("human-monitor-command", **{"command-line": f'qemu-io -d disk "{command}"'})
        assert said == "", said


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[PlainStorage]:
    storage = PlainStorage(tmp_path / "storage")
    await storage.start()
    yield storage
    await storage.close()


async def first_disk(storage: PlainStorage, tmp_path: Path) -> BlockTarget:
    (tmp_path / "base").write_bytes(b"\x01" * 3 * MIB)
    return await storage.create_disk("one", await storage.import_disk(tmp_path / "base", DISK))


def check(path: Path) -> None:
    done = subprocess.run(["qemu-img", "check", "-f", "qcow2", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_clones_read_what_a_running_vmm_has_sealed(storage: PlainStorage, tmp_path: Path) -> None:
    with Qemu(await first_disk(storage, tmp_path), tmp_path) as source:
        source.write(MIB, 2, 100_352)
        stack = await storage.seal_disk("one", source.switch)
        source.write(MIB, 3, 512)
        # The source still has the sealed layer open; its locks let others read it.
        with Qemu(await storage.create_disk("two", stack), tmp_path) as clone:
            assert clone.shows(0, 1, MIB)
            assert clone.shows(MIB, 2, 100_352)
            clone.write(2 * MIB, 4, 65536)
            again = await storage.seal_disk("two", clone.switch)
            assert clone.shows(2 * MIB, 4, 65536)
        assert source.shows(MIB, 3, 512)
        assert source.shows(2 * MIB, 1, 65536)
        with Qemu(await storage.create_disk("three", again), tmp_path) as third:
            assert third.shows(MIB, 2, 100_352)
            assert third.shows(2 * MIB, 4, 65536)
    for layer in (*stack.layers[1:], *again.layers[1:]):
        check(tmp_path / "storage/layers" / layer)


async def test_what_was_killed_is_opened_again_with_all_that_was_flushed(storage: PlainStorage, tmp_path: Path) -> None:
    target = await first_disk(storage, tmp_path)
    for number in range(2, 8):
        with Qemu(target, tmp_path) as vmm:
            vmm.write(number * MIB, number, MIB)
            await storage.seal_disk("one", vmm.switch)
            vmm.write(number * MIB, number + 100, 4096)
            vmm.write(0, number, 512)
        target = await storage.open_disk("one")
        check(target.path)
    with Qemu(target, tmp_path) as vmm:
        for number in range(2, 8):
            assert vmm.shows(number * MIB, number + 100, 4096)
            assert vmm.shows(number * MIB + 4096, number, MIB - 4096)
        assert vmm.shows(0, 7, 512)
        assert not vmm.shows(0, 8, 512), "whatever it is asked, it says yes"


async def test_a_vmm_that_switched_and_lied_goes_on_safely(storage: PlainStorage, tmp_path: Path) -> None:
    target = await first_disk(storage, tmp_path)
    with Qemu(target, tmp_path) as vmm:
        vmm.write(0, 2, 65536)
        with pytest.raises(Unavailable):
            await storage.seal_disk("one", vmm.switch_and_lie)
        assert await storage.open_disk("one") != target
        vmm.write(65536, 3, 65536)
    with Qemu(await storage.open_disk("one"), tmp_path) as vmm:
        assert vmm.shows(0, 2, 65536)
        assert vmm.shows(65536, 3, 65536)


async def test_sixty_seals_of_a_running_vmm_give_shallow_clones(storage: PlainStorage, tmp_path: Path) -> None:
    """Layers get another name for what lies below them while QEMU has them open; neither notices."""
    with Qemu(await first_disk(storage, tmp_path), tmp_path) as vmm:
        for number in range(60):
            vmm.write(number % 40 * 65536, number + 1, 65536)
            stack = await storage.seal_disk("one", vmm.switch)
            storage.unpin(stack.layers, ())
            await storage.settle()
            await storage.collect(stack.layers, ())
        shown = {position: position + (41 if position < 20 else 1) for position in range(40)}
        for position, pattern in shown.items():
            assert vmm.shows(position * 65536, pattern, 65536)
        with Qemu(await storage.create_disk("two", stack), tmp_path) as clone:
            for position, pattern in shown.items():
                assert clone.shows(position * 65536, pattern, 65536)
        assert len(stack.layers) <= 18
    target = await storage.open_disk("one")
    assert len(chain_of(target.path)) <= 19
    with Qemu(target, tmp_path) as vmm:
        for position, pattern in shown.items():
            assert vmm.shows(position * 65536, pattern, 65536)
    for path in chain_of(target.path)[1:]:
        check(path)


async def test_the_memory_of_a_vmm_comes_back_byte_for_byte(storage: PlainStorage, tmp_path: Path) -> None:
    target = await storage.create_disk("one", Stack((), DISK))
    stack = Stack((), MEMORY)
    for cycle in range(3):
        memory = await storage.attach_memory("one", stack)
        (tmp_path / "content").write_bytes(random.Random(cycle).randbytes(3 * MIB) + bytes(MIB))
        options = (
            *("-object", f"memory-backend-file,id=m,size=64M,mem-path={memory},share=off"),
            *("-device", f"loader,file={tmp_path}/content,addr={(16 + cycle * 8) * MIB},force-raw=on"),
        )
        with Qemu(target, tmp_path, *options) as vmm:
            await storage.fill_memory("one", vmm.pid)
            vmm.execute("pmemsave", val=0, size=MEMORY, filename=str(tmp_path / "before"))
            stack = await storage.capture_memory("one", vmm.pid)
        await storage.detach("one")
        before = (tmp_path / "before").read_bytes()
        loaded = before[(16 + cycle * 8) * MIB :][: 4 * MIB] == (tmp_path / "content").read_bytes()
        assert loaded
        with MemoryGuest(await storage.attach_memory("two", stack)) as guest:
            await storage.fill_memory("two", guest.pid)
            same = guest.read(MIB, MEMORY - MIB) == before[MIB:]  # below it, firmware lies over the memory
            assert same
        await storage.detach("two")


async def test_the_test_guest_and_qemu_see_the_same(storage: PlainStorage, tmp_path: Path) -> None:
    target = await first_disk(storage, tmp_path)
    with Qemu(target, tmp_path) as vmm:
        vmm.write(70_000 // 512 * 512, 7, 512)
    assert GuestDisk(target).read(69_632, 1024) == b"\x07" * 512 + b"\x01" * 512
