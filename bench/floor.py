"""The floor: the bare minimum that QEMU allows between "start" and the guest's first answer.

A straight script, with none of the product's parts in the way: spawn QEMU in a
namespace that is there already, load the device state, let the guest run, and wait
for the first answer of its agent's /health. It starts from the very files of the
server's template (memory, disk, device state), so both restore the same guest.
"""

import asyncio
import ctypes
import json
import os
import shutil
import socket
import subprocess
import time
from ipaddress import IPv4Address
from pathlib import Path

from agentenv.model.ids import SandboxId
from agentenv.model.machine import BlockTarget
from agentenv.model.snapshot import Snapshot
from agentenv.network.contract import GATEWAY_ADDRESS, GATEWAY_MAC, GUEST_ADDRESS, GUEST_MAC, LINK_PREFIX, TAP_NAME
from agentenv.state.engine import sqlite_url
from agentenv.state.sql import SqlStore
from agentenv.storage.layout import Layout
from agentenv.vmm.contract import VmPlan
from agentenv.vmm.plan import Engine, argv
from tests.capabilities import QEMU
from tests.server import Server

NETNS = "aenv-bench-floor"
AGENT_PORT = 49983
FD_SET = "state"


def measure_floor(server: Server, n: int, template: str = "base") -> list[float]:
    """Milliseconds from spawn to the first answer, *n* times."""
    snapshot = asyncio.run(_snapshot(server, template))
    work = server.home / "floor"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    _network()
    try:
        return [_once(server, snapshot, work) for _ in range(n + 2)][2:]
    finally:
        subprocess.run(["ip", "netns", "del", NETNS], check=False)
        shutil.rmtree(work, ignore_errors=True)


async def _snapshot(server: Server, name: str) -> Snapshot:
    store = SqlStore(sqlite_url(server.home / "state/aenv.db"))
    await store.start()
    try:
        return next(s for s in await store.snapshots() if name in s.names)
    finally:
        await store.close()


def _network() -> None:
    subprocess.run(["ip", "netns", "del", NETNS], check=False, capture_output=True)
    for command in (
        f"ip netns add {NETNS}",
        f"ip -n {NETNS} tuntap add {TAP_NAME} mode tap",
        f"ip -n {NETNS} link set {TAP_NAME} address {GATEWAY_MAC} up",
        f"ip -n {NETNS} addr add {GATEWAY_ADDRESS}/{LINK_PREFIX} dev {TAP_NAME}",
        f"ip -n {NETNS} neigh replace {GUEST_ADDRESS} lladdr {GUEST_MAC} dev {TAP_NAME} nud permanent",
    ):
        subprocess.run(command.split(), check=True)


def _once(server: Server, snapshot: Snapshot, work: Path) -> float:
    layout = Layout(server.home / "storage")
    assert snapshot.capture.disk is not None
    top = layout.layer(snapshot.capture.disk.layers[-1])
    upper = work / "upper.qcow2"
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(top), "-F", top.suffix[1:], str(upper)]
    subprocess.run(command, check=True)
    (memory,) = snapshot.capture.memory.layers
    plan = VmPlan(
        sandbox_id=SandboxId("floor"),
        generation=1,
        machine=snapshot.machine,
        kernel=work / "unused",
        initramfs=work / "unused",
        memory_path=layout.layer(memory),
        disk=BlockTarget(upper, "qcow2"),
        netns=Path("/run/netns") / NETNS,
        tap=TAP_NAME,
        run_dir=work,
    )
    state = layout.blob(snapshot.capture.device_state).read_bytes()
    accelerator = snapshot.fingerprint.accelerator
    engine = Engine("kvm" if accelerator == "kvm" else "tcg", 32)
    monitor_path = work / "qmp"
    monitor_path.unlink(missing_ok=True)
    (work / "pid").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(monitor_path))
        listener.listen(1)
        fd = listener.fileno()
        os.set_inheritable(fd, True)
        line = argv(Path(shutil.which(QEMU) or QEMU), plan, engine, monitor_fd=fd, incoming=True)
        start = time.perf_counter()
        process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{NETNS}", *line], pass_fds=[fd], stdin=subprocess.DEVNULL
        )
    try:
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.connect(str(monitor_path))
            _load(monitor, state)
            _first_answer()
            return 1000 * (time.perf_counter() - start)
    finally:
        process.kill()
        process.wait()


def _load(monitor: socket.socket, state: bytes) -> None:
    lines = monitor.makefile("r")
    lines.readline()

    def call(command: str, arguments: dict[str, object] | None = None, fds: list[int] | None = None) -> object:
        message = json.dumps({"execute": command, "arguments": arguments or {}}).encode() + b"\n"
        socket.send_fds(monitor, [message], fds or [])
        while True:
            answer = json.loads(lines.readline())
            if "error" in answer:
                raise SystemExit(f"floor: {command}: {answer['error']}")
            if "return" in answer:
                return answer["return"]

    reader, writer = os.pipe()
    os.write(writer, state)  # fits: the state of a microvm is some 20 KB, a pipe holds 64
    os.close(writer)
    call("qmp_capabilities")
    call("getfd", {"fdname": FD_SET}, [reader])
    os.close(reader)
    call("migrate-incoming", {"uri": f"fd:{FD_SET}"})
    while not isinstance(status := call("query-migrate"), dict) or status.get("status") != "completed":
        if isinstance(status, dict) and status.get("status") == "failed":
            raise SystemExit(f"floor: the device state does not load: {status}")
    call("cont")


def _first_answer() -> None:
    """One request, from inside the namespace, on a raw socket."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    inside = os.open(f"/run/netns/{NETNS}", os.O_RDONLY)
    try:
        _setns(inside)
        with socket.create_connection((str(IPv4Address(GUEST_ADDRESS)), AGENT_PORT), timeout=30) as guest:
            guest.sendall(b"GET /health HTTP/1.1\r\nHost: guest\r\n\r\n")
            if not guest.recv(4096).startswith(b"HTTP/1.1 204"):
                raise SystemExit("floor: the guest did not answer")
    finally:
        _setns(home)
        os.close(inside)
        os.close(home)


def _setns(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, 0x4000_0000):
        raise OSError(ctypes.get_errno(), "setns")
