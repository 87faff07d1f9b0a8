"""QEMU guests for real: what a restore brings back, how a VM ends, and what its process may touch."""

import asyncio
import hashlib
import os
import resource
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.guest.image import GuestImage
from agentenv.model.errors import Invalid, NoSpace, NotFound, Unavailable, Unsupported
from agentenv.model.machine import BlockTarget
from agentenv.vmm.contract import Instance, VmPlan
from agentenv.vmm.plan import monitor_path
from agentenv.vmm.process import read_identity
from agentenv.vmm.qemu import QemuVmm
from tests.unit.vmm import lab as qemu
from tests.unit.vmm.lab import (
    MACHINE,
    Lab,
    Template,
    ask,
    call,
    copy_memory,
    make_template,
    no_preparation,
    open_lab,
    running_below,
    wait_healthy,
)

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.needs(*qemu.NEEDS, "mount")]


@pytest.fixture(scope="module")
def lab(guest_image: GuestImage) -> Iterator[Lab]:
    with open_lab(guest_image) as opened:
        yield opened


@pytest.fixture(scope="module")
def template(lab: Lab) -> Template:
    return make_template(lab)


@pytest.fixture
async def vmm(lab: Lab) -> AsyncIterator[QemuVmm]:
    driver = lab.driver()
    yield driver
    await driver.close()


@pytest.fixture
async def vm(vmm: QemuVmm, lab: Lab, template: Template) -> AsyncIterator[Instance]:
    """A restored guest that runs."""
    instance = await vmm.restore(lab.restore_plan(template), template.state, no_preparation)
    await instance.resume()
    yield instance
    await instance.stop()


async def test_the_vmm_never_waits_for_a_second_client_of_its_monitor(vm: Instance) -> None:
    pid = vm.process.pid
    listening = {
        line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()
        if line.endswith(f" {monitor_path(vm.plan)}") and int(line.split()[3], 16) & 1 << 16
    }  # fmt: skip
    fds = [path.name for path in Path(f"/proc/{pid}/fd").iterdir() if str(path.readlink())[8:-1] in listening]

    flags = [int(Path(f"/proc/{pid}/fdinfo/{fd}").read_text().split()[3], 8) for fd in fds]

    assert flags
    assert all(flag & os.O_NONBLOCK for flag in flags)


async def ask_guest(plan: VmPlan, method: str, path: str, body: object = None) -> int:
    return await asyncio.to_thread(call, plan.netns, method, path, body)


async def write_file(plan: VmPlan, name: str, content: bytes) -> None:
    assert await ask_guest(plan, "POST", f"/files?path=/{name}&username=root", content) == 200
    assert await ask_guest(plan, "POST", "/sync") == 204


async def read_file(plan: VmPlan, name: str) -> bytes | None:
    status, content = await asyncio.to_thread(ask, plan.netns, "GET", f"/files?path=/{name}&username=root")
    return content if status == 200 else None


class TestGuest:
    async def test_goes_on_where_it_was_paused(self, vm: Instance) -> None:
        assert await ask_guest(vm.plan, "GET", "/health") == 204

        await vm.pause()
        await vm.resume()

        assert await ask_guest(vm.plan, "GET", "/health") == 204

    async def test_stands_still_while_it_is_paused(self, vm: Instance) -> None:
        await ask_guest(vm.plan, "GET", "/health")

        await vm.pause()

        with pytest.raises(OSError, match="timed out"):
            await asyncio.to_thread(call, vm.plan.netns, "GET", "/health", timeout_s=0.2)

    async def test_leaves_the_image_of_its_memory_as_it_was(self, vm: Instance, template: Template) -> None:
        before = await asyncio.to_thread(lambda: hashlib.sha256(template.memory.read_bytes()).digest())

        await ask_guest(vm.plan, "POST", "/files?path=/some-file&username=root", os.urandom(4 << 20))

        assert await asyncio.to_thread(lambda: hashlib.sha256(template.memory.read_bytes()).digest()) == before

    async def test_forks_have_what_was_written_before_and_not_what_came_after(
        self, vmm: QemuVmm, vm: Instance, lab: Lab
    ) -> None:
        await write_file(vm.plan, "before", b"in both")
        await vm.pause()
        state, memory = lab.root / "fork-state", lab.root / "fork-memory"
        await vm.save_device_state(state)
        await asyncio.to_thread(copy_memory, vm.process.pid, vm.plan.memory_path, memory)
        sealed = vm.plan.disk
        await vm.switch_disk(lab.overlay(sealed))
        unchanged = sealed.path.read_bytes()
        await vm.resume()
        await write_file(vm.plan, "after", b"in one only")

        plan = replace(lab.restore_plan(Template(memory, sealed.path, state)), disk=lab.overlay(sealed))
        fork = await vmm.restore(plan, state, no_preparation)
        await fork.resume()

        assert sealed.path.read_bytes() == unchanged
        assert await read_file(vm.plan, "after") == b"in one only"
        assert await read_file(plan, "before") == b"in both"
        assert await read_file(plan, "after") is None
        await fork.stop()

    async def test_writes_to_the_disk_that_it_was_switched_to_while_running(self, vm: Instance, lab: Lab) -> None:
        sealed, target = vm.plan.disk, lab.overlay(vm.plan.disk)

        await vm.switch_disk(target)

        before = sealed.path.read_bytes()
        content = os.urandom(1 << 20)
        await write_file(vm.plan, "new", content)
        assert sealed.path.read_bytes() == before
        assert target.path.stat().st_blocks * 512 > len(content)

    async def test_cannot_have_its_disk_switched_to_a_raw_file(self, vm: Instance, lab: Lab) -> None:
        with pytest.raises(Invalid):
            await vm.switch_disk(BlockTarget(lab.empty_disk(), "raw"))

    async def test_several_start_at_once_from_one_state(self, vmm: QemuVmm, lab: Lab, template: Template) -> None:
        plans = [lab.restore_plan(template) for _ in range(4)]

        clones = await asyncio.gather(*(vmm.restore(plan, template.state, no_preparation) for plan in plans))
        await asyncio.gather(*(clone.resume() for clone in clones))

        assert [await ask_guest(plan, "GET", "/health") for plan in plans] == [204] * 4
        await asyncio.gather(*(clone.stop() for clone in clones))

    async def test_may_have_two_cpus(self, vmm: QemuVmm, lab: Lab) -> None:
        plan = replace(lab.boot_plan(), machine=replace(MACHINE, vcpu_count=2))
        instance = await vmm.boot(plan)

        await asyncio.to_thread(wait_healthy, plan.netns)

        await instance.pause()
        await instance.save_device_state(lab.root / "two-cpus")
        assert len(list(Path(f"/proc/{instance.process.pid}/task").iterdir())) >= 3
        await instance.stop()


class TestEnd:
    async def test_a_guest_that_powers_off_ends_with_success(self, vm: Instance) -> None:
        assert await ask_guest(vm.plan, "POST", "/shutdown") < 300

        assert (await vm.wait_exit()).code == 0

    async def test_a_kernel_that_panics_leaves_its_last_words(self, vmm: QemuVmm, lab: Lab) -> None:
        empty = lab.root / "no-initramfs"
        empty.touch()
        plan = replace(lab.boot_plan(), initramfs=empty)

        instance = await vmm.boot(plan)
        ended = await instance.wait_exit()

        assert ended.code == 0
        assert "Kernel panic" in ended.log_tail

    async def test_a_guest_that_ended_while_no_server_was_there_is_seen_by_the_next(
        self, lab: Lab, template: Template
    ) -> None:
        first = lab.driver()
        instance = await first.restore(lab.restore_plan(template), template.state, no_preparation)
        await instance.resume()
        await first.close()
        assert await ask_guest(instance.plan, "POST", "/shutdown") < 300

        second = lab.driver()
        adopted = await second.adopt(instance.plan, instance.process)

        assert (await adopted.wait_exit()).code == 0
        await second.close()

    async def test_a_running_guest_says_what_is_on_its_console(self, vmm: QemuVmm, lab: Lab) -> None:
        plan = lab.boot_plan()
        instance = await vmm.boot(plan)
        await asyncio.to_thread(wait_healthy, plan.netns)

        assert "aenv: ready" in await instance.log_tail()
        assert "aenv: ready" in await instance.log_tail()
        await instance.stop()

    async def test_a_vmm_that_stands_still_is_unavailable_and_can_be_stopped(
        self, lab: Lab, template: Template
    ) -> None:
        vmm = lab.driver(command_timeout_s=0.3)
        instance = await vmm.restore(lab.restore_plan(template), template.state, no_preparation)
        os.kill(instance.process.pid, signal.SIGSTOP)

        with pytest.raises(Unavailable):
            await instance.resume()
        with pytest.raises(Unavailable):
            await vmm.adopt(instance.plan, instance.process)
        await instance.stop()

        assert not Path(f"/proc/{instance.process.pid}").exists()
        await vmm.close()

    async def test_a_command_that_was_late_does_not_disturb_the_next(self, lab: Lab, template: Template) -> None:
        vmm = lab.driver(command_timeout_s=0.3)
        instance = await vmm.restore(lab.restore_plan(template), template.state, no_preparation)
        os.kill(instance.process.pid, signal.SIGSTOP)
        with pytest.raises(Unavailable):
            await instance.pause()
        os.kill(instance.process.pid, signal.SIGCONT)

        await instance.save_device_state(lab.root / "late-state")

        assert (lab.root / "late-state").stat().st_size > 1000
        await instance.stop()
        await vmm.close()


class TestMonitor:
    async def test_waits_for_the_connection_of_another_server_to_end(self, lab: Lab, template: Template) -> None:
        first, second = lab.driver(), lab.driver(command_timeout_s=0.3)
        instance = await first.restore(lab.restore_plan(template), template.state, no_preparation)

        with pytest.raises(Unavailable):
            await second.adopt(instance.plan, instance.process)
        await first.close()
        adopted = await second.adopt(instance.plan, instance.process)

        await adopted.resume()
        await adopted.stop()
        await second.close()

    async def test_survives_a_server_that_died_in_the_middle_of_a_command(self, lab: Lab, template: Template) -> None:
        first, second = lab.driver(), lab.driver()
        instance = await first.restore(lab.restore_plan(template), template.state, no_preparation)
        await first.close()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.connect(str(monitor_path(instance.plan)))
            dead.sendall(b'{"execute": "qmp_capabilities"}{"execute": "query-')

        adopted = await second.adopt(instance.plan, instance.process)

        await adopted.resume()
        await adopted.stop()
        await second.close()

    async def test_a_vm_whose_server_died_while_loading_it_can_only_be_stopped(
        self, lab: Lab, template: Template
    ) -> None:
        first, second = lab.driver(), lab.driver()
        plan = lab.restore_plan(template)
        adopted: list[Instance] = []

        async def prepare(pid: int) -> None:
            await first.close()
            identity = read_identity(pid)
            assert identity is not None
            adopted.append(await second.adopt(plan, identity))
            with pytest.raises(Unavailable, match="never got its device state"):
                await adopted[0].pause()
            with pytest.raises(Unavailable, match="never got its device state"):
                await adopted[0].resume()

        with pytest.raises(Unavailable):
            await first.restore(plan, template.state, prepare)

        assert (await adopted[0].wait_exit()).code != 0
        await adopted[0].stop()
        await second.close()


class TestProcess:
    async def test_lives_in_its_namespace_and_apart_from_the_server(self, vm: Instance) -> None:
        pid = vm.process.pid

        assert Path(f"/proc/{pid}/ns/net").stat().st_ino == vm.plan.netns.stat().st_ino
        assert os.getsid(pid) == pid
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "500"
        assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)

    async def test_holds_no_descriptor_or_secret_of_the_server(
        self, monkeypatch: pytest.MonkeyPatch, vmm: QemuVmm, lab: Lab, template: Template
    ) -> None:
        monkeypatch.setenv("AENV_SOME_SECRET", "do not tell")
        ours = Path(__file__).stat().st_ino
        with Path(__file__).open() as held:
            os.set_inheritable(held.fileno(), True)
            instance = await vmm.restore(lab.restore_plan(template), template.state, no_preparation)

        environment = Path(f"/proc/{instance.process.pid}/environ").read_bytes()
        files = [path.stat().st_ino for path in Path(f"/proc/{instance.process.pid}/fd").iterdir()]
        await instance.stop()
        assert b"AENV_SOME_SECRET" not in environment
        assert ours not in files

    async def test_leaves_no_descriptor_in_the_server(self, vmm: QemuVmm, lab: Lab, template: Template) -> None:
        plans = [lab.restore_plan(template) for _ in range(5)]
        broken = lab.root / "broken"
        broken.write_bytes(b"x" * 1000)

        async def cycle(plan: VmPlan) -> None:
            instance = await vmm.restore(plan, template.state, no_preparation)
            await instance.save_device_state(lab.root / "cycle-state")
            await instance.stop()
            with pytest.raises(Exception, match="QEMU"):
                await vmm.restore(plan, broken, no_preparation)

        await cycle(plans[0])
        before = len(list(Path("/proc/self/fd").iterdir()))
        for plan in plans[1:]:
            await cycle(plan)

        assert len(list(Path("/proc/self/fd").iterdir())) == before

    @pytest.mark.parametrize("delay_ms", range(0, 48, 4))
    async def test_is_gone_whenever_its_start_is_cancelled(
        self, vmm: QemuVmm, lab: Lab, template: Template, delay_ms: int
    ) -> None:
        starting = asyncio.create_task(vmm.restore(lab.restore_plan(template), template.state, no_preparation))

        await asyncio.wait([starting], timeout=delay_ms / 1000)
        if starting.done():
            await starting.result().stop()
        starting.cancel()
        await asyncio.wait([starting])
        await vmm.close()

        assert running_below(lab.root) == []

    @pytest.mark.parametrize(
        ("change", "kind", "words"),
        [
            ({"tap": "tap7"}, NotFound, "tap7"),
            ({"tap": "tap0,script=/bin/sh"}, Invalid, "interface"),
            ({"netns": Path("/nonexistent/netns")}, NotFound, "/nonexistent/netns"),
            ({"memory_path": Path("/nonexistent/memory")}, NotFound, "/nonexistent/memory"),
            ({"memory_path": Path("/dev/null")}, Invalid, "0 bytes"),
            ({"disk": BlockTarget(Path("/nonexistent/disk"), "raw")}, Unavailable, "/nonexistent/disk"),
            ({"disk": BlockTarget(Path("/dev/null"), "qcow2")}, Unavailable, "qcow2"),
            ({"run_dir": Path("/tmp") / ("x" * 100)}, Invalid, "socket"),
            ({"init": "/sbin/init panic=0"}, Invalid, "init"),
        ],
    )
    async def test_is_not_started_from_a_plan_that_cannot_work(
        self, vmm: QemuVmm, lab: Lab, change: dict[str, object], kind: type[Exception], words: str
    ) -> None:
        plan = replace(lab.boot_plan(), **change)  # type: ignore[arg-type]

        with pytest.raises(kind, match=words):
            await vmm.boot(plan)

        assert running_below(lab.root) == []

    async def test_needs_a_program(self, lab: Lab) -> None:
        for binary in ("no-such-qemu", "/nonexistent/qemu"):
            vmm = QemuVmm(binary=binary, accelerator="tcg", guest_digest="")
            with pytest.raises(Unsupported) as raised:
                await vmm.fingerprint()
            assert raised.value.hint
            with pytest.raises(Unsupported):
                await vmm.boot(lab.boot_plan())
            await vmm.close()

    async def test_must_be_qemu(self, lab: Lab) -> None:
        vmm = QemuVmm(binary="/bin/true", accelerator="tcg", guest_digest="")

        with pytest.raises(Unsupported):
            await vmm.fingerprint()
        with pytest.raises(Unavailable):
            await vmm.boot(lab.boot_plan())
        await vmm.close()


class TestFullDisk:
    @pytest.fixture
    def small(self, lab: Lab) -> Iterator[Path]:
        """A file system of 24 MiB."""
        mount = lab.root / "small"
        mount.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", mount], check=True)
        yield mount
        subprocess.run(["umount", "--lazy", mount], check=True)

    async def test_a_state_that_does_not_fit_is_no_space_and_the_vm_goes_on(self, vm: Instance, small: Path) -> None:
        fill(small, leave=4096)
        await vm.pause()

        with pytest.raises(NoSpace):
            await vm.save_device_state(small / "state")

        assert not (small / "state").exists()
        await vm.resume()
        assert await ask_guest(vm.plan, "GET", "/health") == 204

    async def test_a_guest_stands_still_until_there_is_room_for_what_it_writes(
        self, vmm: QemuVmm, lab: Lab, template: Template, small: Path
    ) -> None:
        base = small / "base"
        subprocess.run(["cp", "--sparse=always", template.disk, base], check=True)
        plan = replace(lab.restore_plan(template), disk=lab.overlay(BlockTarget(base, "raw")))
        instance = await vmm.restore(plan, template.state, no_preparation)
        await instance.resume()
        fill(small, leave=2 << 20)
        content = os.urandom(4 << 20)

        writing = asyncio.create_task(write_file(plan, "large", content))
        while await status_of(instance) != "io-error":
            await asyncio.sleep(0.01)
        await instance.pause()
        assert not writing.done()
        (small / "ballast").unlink()
        await instance.resume()

        await writing
        assert await read_file(plan, "large") == content
        await instance.stop()

    async def test_a_guest_goes_on_by_itself_once_there_is_room(
        self, vmm: QemuVmm, lab: Lab, template: Template, small: Path
    ) -> None:
        base = small / "base"
        subprocess.run(["cp", "--sparse=always", template.disk, base], check=True)
        plan = replace(lab.restore_plan(template), disk=lab.overlay(BlockTarget(base, "raw")))
        instance = await vmm.restore(plan, template.state, no_preparation)
        await instance.resume()
        fill(small, leave=2 << 20)
        writing = asyncio.create_task(write_file(plan, "large", os.urandom(4 << 20)))
        while await status_of(instance) != "io-error":
            await asyncio.sleep(0.01)

        (small / "ballast").unlink()

        await writing
        await instance.stop()


async def status_of(instance: Instance) -> str:
    """What QEMU says that it is doing."""
    return await instance._status()  # type: ignore[attr-defined, no-any-return]


def fill(directory: Path, *, leave: int) -> None:
    free = os.statvfs(directory)
    size = free.f_bavail * free.f_frsize - leave
    with (directory / "ballast").open("xb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, size)
