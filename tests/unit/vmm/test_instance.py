"""What an instance does about its VMM, with a monitor that says what the test wants."""

import asyncio
import json
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.aio.tasks import Tasks
from agentenv.model.errors import Bug, Unavailable
from agentenv.model.ids import new_sandbox_id
from agentenv.model.machine import BlockTarget, Machine
from agentenv.vmm import instance as instance_module
from agentenv.vmm.contract import VmPlan
from agentenv.vmm.instance import QemuInstance
from agentenv.vmm.process import Process, read_identity
from agentenv.vmm.qmp import Monitor

DISK = [{"device": "", "qdev": "/machine/peripheral/disk/virtio-backend", "inserted": {"node-name": "disk-3"}}]


class Script:
    """QEMU's side: answers each command by name, notes it, and says events when told to."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.status = "running"
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.refuse: dict[str, str] = {}
        self.after: dict[str, Callable[[], None]] = {}  # done right after the answer has been sent
        self.arrived: dict[str, asyncio.Event] = {}
        self.hold: dict[str, asyncio.Event] = {}

    def say(self, message: object) -> None:
        self._connection.send(json.dumps(message).encode() + b"\n")

    def event(self, name: str, **data: object) -> None:
        self.say({"event": name, "data": data})

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.commands]

    async def serve(self) -> None:
        self.say({"QMP": {}})
        buffer, loop = b"", asyncio.get_running_loop()
        while data := await loop.sock_recv(self._connection, 65536):
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                await self._answer(json.loads(line))

    async def _answer(self, command: dict[str, Any]) -> None:
        name = command["execute"]
        self.commands.append((name, command.get("arguments", {})))
        self.arrived.setdefault(name, asyncio.Event()).set()
        if name in self.hold:
            await self.hold[name].wait()
        if name in self.refuse:
            self.say({"id": command["id"], "error": {"class": "GenericError", "desc": self.refuse[name]}})
            return
        self.say({"id": command["id"], "return": self._value(name)})
        self.after.pop(name, lambda: None)()

    def _value(self, name: str) -> object:
        match name:
            case "query-status":
                return {"status": self.status}
            case "query-block":
                return DISK
            case "ringbuf-read":
                return "TGFzdCB3b3Jkcw=="
            case "cont":
                self.status = "running"
        return {}


@pytest.fixture
def plan() -> Iterator[VmPlan]:
    with tempfile.TemporaryDirectory(prefix="vmm-instance-") as name:
        directory = Path(name)
        yield VmPlan(
            sandbox_id=new_sandbox_id(),
            generation=1,
            machine=Machine(1, 64, 64),
            kernel=directory / "kernel",
            initramfs=directory / "initramfs",
            memory_path=directory / "memory",
            disk=BlockTarget(directory / "disk", "raw"),
            netns=directory / "netns",
            tap="tap0",
            run_dir=directory,
        )


@pytest.fixture
def qemu() -> Iterator[tuple[Script, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    yield Script(theirs), ours
    ours.close()
    theirs.close()


@pytest.fixture
async def vm(
    qemu: tuple[Script, socket.socket], plan: VmPlan, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[QemuInstance]:
    monkeypatch.setattr(instance_module, "_RETRY_S", 0.001)
    script, connection = qemu
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        identity = read_identity(process.pid)
        assert identity is not None
        async with Tasks("test") as tasks:
            serving = tasks.start("qemu", script.serve())
            monitor = await Monitor.over(connection, timeout_s=5.0)
            instance = QemuInstance(plan, Process(identity), monitor, None, tasks)
            await instance.begin()
            script.commands.clear()
            yield instance
            await instance.stop()
            serving.cancel()
        process.returncode = -9  # reaped by the instance


@pytest.fixture
def script(qemu: tuple[Script, socket.socket]) -> Script:
    return qemu[0]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():
            await asyncio.sleep(0)


class TestDiskError:
    async def test_lets_the_guest_go_on_until_it_does(self, vm: QemuInstance, script: Script) -> None:
        def full_again() -> None:
            script.status = "io-error"
            script.event("BLOCK_IO_ERROR", action="stop", nospace=True)

        script.after["cont"] = full_again
        full_again()

        await until(lambda: script.names.count("cont") == 2)
        await until(lambda: repr(vm).endswith("alive>>") and script.names[-1] == "query-status")
        assert script.status == "running"

    async def test_that_comes_right_after_an_answer_is_not_missed(self, vm: QemuInstance, script: Script) -> None:
        def stop_again() -> None:
            script.status = "io-error"
            script.event("BLOCK_IO_ERROR", action="stop")

        # The first look finds it running, and the event arrives together with that answer.
        script.after["query-status"] = stop_again
        script.event("BLOCK_IO_ERROR", action="stop")

        await until(lambda: "cont" in script.names)
        assert vm.process.pid > 0

    async def test_does_not_resume_a_vm_that_was_paused_meanwhile(self, vm: QemuInstance, script: Script) -> None:
        await vm.pause()
        script.status = "io-error"
        script.event("BLOCK_IO_ERROR", action="stop")
        await until(lambda: script.names.count("query-status") >= 1)
        await asyncio.sleep(0.02)

        assert "cont" not in script.names
        await vm.resume()
        assert script.names.count("cont") == 1

    async def test_that_is_only_reported_to_the_guest_is_the_guest_s(self, vm: QemuInstance, script: Script) -> None:
        script.event("BLOCK_IO_ERROR", action="report")

        await vm.pause()

        assert script.names == ["stop"]


class TestGuestThatEnds:
    async def test_is_read_out_and_ended(self, vm: QemuInstance, script: Script) -> None:
        script.event("SHUTDOWN", guest=True, reason="guest-shutdown")

        await until(lambda: "quit" in script.names)

        assert script.names.index("ringbuf-read") < script.names.index("quit")
        assert "Last words" in await vm.log_tail()

    async def test_is_killed_if_it_does_not_quit(
        self, vm: QemuInstance, script: Script, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(instance_module, "_QUIT_TIMEOUT_S", 0.01)
        script.hold["quit"] = asyncio.Event()
        script.event("SHUTDOWN", guest=True)

        assert (await vm.wait_exit()).code == -9
        assert "Last words" in (await vm.wait_exit()).log_tail

    async def test_cannot_be_paused_saved_or_resumed(self, vm: QemuInstance, script: Script, plan: VmPlan) -> None:
        script.hold["quit"] = asyncio.Event()
        script.event("SHUTDOWN", guest=True)
        await until(lambda: "ringbuf-read" in script.names)

        for call in (vm.pause(), vm.resume(), vm.save_device_state(plan.run_dir / "state")):
            with pytest.raises(Unavailable, match="ended itself"):
                await call
        assert not (plan.run_dir / "state").exists()

    async def test_in_the_middle_of_a_pause_fails_the_pause(self, vm: QemuInstance, script: Script) -> None:
        script.hold["stop"] = asyncio.Event()
        pausing = asyncio.create_task(vm.pause())
        await until(lambda: "stop" in script.names)
        script.event("SHUTDOWN", guest=True)
        script.hold["stop"].set()

        with pytest.raises(Unavailable, match="ended itself"):
            await pausing


class TestSwitch:
    TARGET = BlockTarget(Path("/store/overlay"), "qcow2")

    async def test_puts_the_new_disk_on_the_present_one(self, vm: QemuInstance, script: Script) -> None:
        await vm.switch_disk(self.TARGET)

        assert script.names == ["query-block", "blockdev-add", "blockdev-snapshot"]
        added, snapshot = script.commands[1][1], script.commands[2][1]
        assert snapshot == {"node": "disk-3", "overlay": added["node-name"] == "disk-4" and "disk-4"}
        assert added["backing"] is None

    async def test_that_fails_takes_the_new_disk_away_again(self, vm: QemuInstance, script: Script) -> None:
        script.refuse["blockdev-snapshot"] = "the words of QEMU"

        with pytest.raises(Bug, match="the words of QEMU"):
            await vm.switch_disk(self.TARGET)

        assert script.commands[-1] == ("blockdev-del", {"node-name": "disk-4"})

    async def test_is_not_cut_short(self, vm: QemuInstance, script: Script) -> None:
        script.hold["blockdev-add"] = asyncio.Event()
        switching = asyncio.create_task(vm.switch_disk(self.TARGET))
        await until(lambda: "blockdev-add" in script.names)

        for _ in range(3):
            switching.cancel()
            await asyncio.sleep(0)
        assert not switching.done()
        script.hold["blockdev-add"].set()
        with pytest.raises(asyncio.CancelledError):
            await switching

        assert script.names[-1] == "blockdev-snapshot"


class TestSave:
    async def test_keeps_no_descriptor_in_qemu(self, vm: QemuInstance, script: Script, plan: VmPlan) -> None:
        script.status = "paused"
        script.refuse["xen-save-devices-state"] = "An IO error has occurred"

        with pytest.raises(Bug, match="IO error"):
            await vm.save_device_state(plan.run_dir / "state")

        assert script.names[-1] == "remove-fd"
        assert not (plan.run_dir / "state").exists()

    async def test_of_nothing_is_a_bug(self, vm: QemuInstance, script: Script, plan: VmPlan) -> None:
        script.status = "paused"

        with pytest.raises(Bug, match="no bytes"):
            await vm.save_device_state(plan.run_dir / "state")
