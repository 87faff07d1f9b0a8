"""The floor: the bare minimum that QEMU allows between "start" and the guest's first answer.

A straight script, with none of the product's parts in the way: spawn QEMU in a
namespace that is there already, load the device state, let the guest run, and wait
for the first answer of its agent's /health. It starts from the very files of the
server's template (memory, disk, device state), so both restore the same guest.
"""

import array
import asyncio
import ctypes
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

import httpx

from agentenv.config.schema import Vmm
from agentenv.guest.connect import STREAM_TYPE, encode_frame
from agentenv.guest.contract import AGENT_PORT
from agentenv.model.ids import SandboxId
from agentenv.model.machine import BlockTarget
from agentenv.model.snapshot import Snapshot
from agentenv.network.contract import GATEWAY_ADDRESS, GATEWAY_MAC, GUEST_ADDRESS, GUEST_MAC, LINK_PREFIX, TAP_NAME
from agentenv.state.engine import sqlite_url
from agentenv.state.sql import SqlStore
from agentenv.storage.layout import Layout
from agentenv.vmm.contract import VmPlan
from agentenv.vmm.plan import Engine, argv
from bench.metrics import process_cpu_s
from tests.capabilities import QEMU
from tests.server import Server

NETNS = "aenv-bench-floor"
FD_SET = "state"
PAGE = 4096
TB_SIZE_MIB = Vmm().tb_size_mib  # as the server has it
SETTLE_S = 5.0
"""After its first answer a guest still does what it was restored to do: not idling yet, here or in a sandbox."""
IDLE_S = 15.0
Ask = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Floor:
    """What bare QEMU takes on this machine, now. Times in ms; CPU of an idle guest in per cent of a core."""

    answers_ms: list[float]
    captures_ms: list[float]
    idle_cpu_pct: float


def measure_floor(server: Server, n: int, template: str = "base") -> Floor:
    """Restore and write down the guest of *template*, *n* times after two to warm up."""
    snapshot = asyncio.run(_snapshot(server, template))
    work = server.home / "floor"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    _network()
    try:
        runs = [_once(server, snapshot, work) for _ in range(n + 2)][2:]
        _, _, idle_pct = _once(server, snapshot, work, idle_s=IDLE_S)
        return Floor([answer for answer, _, _ in runs], [capture for _, capture, _ in runs], idle_pct)
    finally:
        subprocess.run(["ip", "netns", "del", NETNS], check=False)
        shutil.rmtree(work, ignore_errors=True)


def direct_starts_ms(server: Server, sandbox_id: str, n: int) -> list[float]:
    """The same command as the SDK's, asked of the agent itself: no SDK, no proxy, one connection kept open."""
    address = _answering_address(server)
    token = server.call("GET", f"/sandboxes/{sandbox_id}")[1]["envdAccessToken"]
    headers = {"Content-Type": STREAM_TYPE, "X-Access-Token": token}
    message = {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", "true"]}, "stdin": False}
    samples = []
    with httpx.Client(base_url=f"http://{address}:{AGENT_PORT}", headers=headers, timeout=60) as agent:
        for _ in range(n + 3):
            start = time.perf_counter()
            answer = agent.post("/process.Process/Start", content=encode_frame(message))
            samples.append(1000 * (time.perf_counter() - start))
            if b'"exited":true' not in answer.content:
                raise SystemExit(f"floor: the agent did not run the command: {answer.content[:300]!r}")
    return samples[3:]


def _answering_address(server: Server) -> str:
    """The address of this server's slots at which a guest answers: there is one sandbox now."""
    lines = subprocess.run(["ip", "-o", "route"], capture_output=True, text=True, check=True).stdout.splitlines()
    addresses = [line.split()[0] for line in lines if f"dev {server.prefix}" in line]
    for address in addresses:
        try:
            if httpx.get(f"http://{address}:{AGENT_PORT}/health", timeout=2).status_code == 204:
                return address
        except httpx.HTTPError:
            continue
    raise SystemExit("floor: no guest answers")


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


def _once(server: Server, snapshot: Snapshot, work: Path, *, idle_s: float = 0.0) -> tuple[float, float, float]:
    """Milliseconds to the first answer and to write the guest down again, and its CPU while idle."""
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
    engine = Engine("kvm" if accelerator == "kvm" else "tcg", TB_SIZE_MIB)
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
            ask = _load(monitor, state)
            _first_answer()
            answered = time.perf_counter()
            idle_pct = _idle_pct(process.pid, idle_s) if idle_s else 0.0
            capturing = time.perf_counter()
            _write_down(ask, process.pid, layout.layer(memory), work / "capture")
            captured = time.perf_counter()
            return 1000 * (answered - start), 1000 * (captured - capturing), idle_pct
    finally:
        process.kill()
        process.wait()


def _idle_pct(pid: int, seconds: float) -> float:
    time.sleep(SETTLE_S)
    before = process_cpu_s(pid)
    time.sleep(seconds)  # idling is what is measured
    return 100 * (process_cpu_s(pid) - before) / seconds


def _write_down(ask: Ask, pid: int, image: Path, out: Path) -> None:
    """Stop the guest, save its device state, copy every page that is its own, and make it durable."""
    ask("stop")
    ask("xen-save-devices-state", {"filename": str(out.with_suffix(".state")), "live": False})
    with Path(f"/proc/{pid}/maps").open() as maps:
        area = next(line.split()[0] for line in maps if line.rstrip().endswith(str(image.resolve())))
    low, high = (int(part, 16) for part in area.split("-"))
    with (
        Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap,
        Path(f"/proc/{pid}/mem").open("rb", buffering=0) as mem,
        out.open("wb", buffering=0) as copy,
    ):
        entries = array.array("Q")
        entries.frombytes(os.pread(pagemap.fileno(), (high - low) // PAGE * 8, low // PAGE * 8))
        for index, entry in enumerate(entries):
            if entry >> 62 and not entry >> 61 & 1:
                copy.write(os.pread(mem.fileno(), PAGE, low + index * PAGE))
        os.fsync(copy.fileno())


def _load(monitor: socket.socket, state: bytes) -> Ask:
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
    return call


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
