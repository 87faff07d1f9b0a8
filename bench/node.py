"""Figures of one node: create, pause, resume, fork, a command, idle cost, and leaks.

A real server, real microVMs (1 vCPU, 512 MiB), everything in the page cache. Times
are taken by the client, over the API, one request after the other. The floor is the
bare minimum that QEMU allows, measured in the same run (`bench.floor`).
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from e2b import Sandbox

from bench.floor import IDLE_S, SETTLE_S, direct_starts_ms, measure_floor
from bench.metrics import process_cpu_s, smaps_rollup_kib, stopped, stopped_ms
from bench.report import Row, percentile, row
from tests.running import running_server
from tests.server import Server, leaks, left_after

GROUP = "node"
N = 40
CYCLES = 200
IDLE_SANDBOXES = 20
PROCESSES = 6
CORES = 2


def run() -> list[Row]:
    """All rows of the group."""
    with running_server("bench", prefix="aeb", net=115) as server, server.sdk():
        floor = measure_floor(server, N)
        answer_p50, capture_p50 = percentile(floor.answers_ms, 50), percentile(floor.captures_ms, 50)
        rows = [
            row(GROUP, "floor: bare QEMU, spawn to first answer", floor.answers_ms, target="the floor itself", ok=True),
            row(GROUP, "floor: bare QEMU, stop and write down", floor.captures_ms, target="the floor itself", ok=True),
        ]
        creates = _create(server, answer_p50)
        rows.append(creates)
        rows += _pause_and_resume(server, answer_p50, capture_p50, processes=0)
        rows += _pause_and_resume(server, answer_p50, capture_p50, processes=PROCESSES)
        rows += _fork(server, creates.p50, capture_p50)
        rows += _command(server)
        rows += _idle(server, floor.idle_cpu_pct)
        rows += _leaks(server)
    return rows


def _creates(server: Server, n: int) -> list[float]:
    samples = []
    for _ in range(n):
        with timed() as took:
            sandbox = server.create()
        samples.append(took())
        server.call("DELETE", f"/sandboxes/{sandbox}")
    return samples


def _create(server: Server, floor_p50: float) -> Row:
    _creates(server, 5)  # the page cache is to be warm
    samples = _creates(server, N)
    p50, p99 = percentile(samples, 50), percentile(samples, 99)
    return row(
        GROUP, "create: API call to envd ready", samples, floor=floor_p50,
        target="p50 <= 1.3 x floor, p99 <= 2.5 x p50", ok=p50 <= 1.3 * floor_p50 and p99 <= 2.5 * p50,
    )  # fmt: skip


def _pause_and_resume(server: Server, floor_p50: float, capture_p50: float, *, processes: int) -> list[Row]:
    """With *processes* asleep in the sandbox: the agent spares one that is empty the kernel's freezer."""
    pauses, stops, resumes = [], [], []
    sandbox = server.create()
    for _ in range(processes):
        Sandbox.connect(sandbox).commands.run("exec sleep infinity", background=True, timeout=0)
    within = f", {processes} processes asleep in it" if processes else ""
    for _ in range(N):
        before = stopped(server, "pause")
        with timed() as took:
            status, body = server.call("POST", f"/sandboxes/{sandbox}/pause", {})
        assert status == 204, body
        pauses.append(took())
        stops.append(stopped_ms(server, "pause", before))
        with timed() as took:
            status, body = server.call("POST", f"/v2/sandboxes/{sandbox}/connect", {"timeout": 600})
        assert status == 201, body
        resumes.append(took())
    server.call("DELETE", f"/sandboxes/{sandbox}")
    return [
        row(
            GROUP, f"pause{within}: API call to return", pauses, floor=capture_p50,
            target="p50 <= 120 ms", ok=percentile(pauses, 50) <= 120,
        ),
        row(
            GROUP, f"pause{within}: guest stopped until the capture is recorded", stops, floor=capture_p50,
            target="p50 <= 60 ms", ok=percentile(stops, 50) <= 60,
        ),
        row(
            GROUP, f"resume{within}: API call to envd ready", resumes, floor=floor_p50,
            target="p50 <= 1.3 x floor", ok=percentile(resumes, 50) <= 1.3 * floor_p50,
        ),
    ]  # fmt: skip


def _fork(server: Server, create_p50: float, capture_p50: float) -> list[Row]:
    limit = 4 * create_p50 / CORES * 1.3
    samples, stops = [], []
    sandbox = server.create()
    for _ in range(N):
        before = stopped(server, "fork")
        with timed() as took:
            status, body = server.call("POST", f"/sandboxes/{sandbox}/fork", {"count": 4, "timeout": 600})
        samples.append(took())
        assert status == 201, body
        stops.append(stopped_ms(server, "fork", before))
        children = [child["sandbox"]["sandboxID"] for child in body]
        assert len(children) == 4, body
        for child in children:
            server.call("DELETE", f"/sandboxes/{child}")
    server.call("DELETE", f"/sandboxes/{sandbox}")
    return [
        row(
            GROUP, "fork into 4: API call to all ready", samples, floor=4 * create_p50 / CORES,
            target="<= 4 x create / 2 cores x 1.3", ok=percentile(samples, 50) <= limit,
        ),
        row(
            GROUP, "fork: source stopped", stops, floor=capture_p50,
            target="p50 <= 80 ms", ok=percentile(stops, 50) <= 80,
        ),
    ]  # fmt: skip


def _command(server: Server) -> list[Row]:
    with Sandbox.create("base", timeout=600) as sandbox:
        for _ in range(10):
            sandbox.commands.run("true")
        samples = []
        for _ in range(2 * N):
            with timed() as took:
                sandbox.commands.run("true")
            samples.append(took())
        direct = direct_starts_ms(server, sandbox.sandbox_id, N)
    return [
        row(
            GROUP, 'commands.run("true") on a warm sandbox, SDK round trip', samples, floor=percentile(direct, 50),
            target="p50 <= 60 ms", ok=percentile(samples, 50) <= 60,
        )
    ]  # fmt: skip


def _idle(server: Server, floor_pct: float) -> list[Row]:
    with ThreadPoolExecutor(2) as pool:
        sandboxes = list(pool.map(lambda _: Sandbox.create("base", timeout=1200), range(IDLE_SANDBOXES)))
    answered = sum(s.commands.run("echo here").stdout == "here\n" for s in sandboxes)
    pids = vmm_pids(server)
    time.sleep(SETTLE_S)
    before = {pid: process_cpu_s(pid) for pid in pids}
    time.sleep(IDLE_S)  # the measured thing is idling itself
    cpu = [100 * (process_cpu_s(pid) - before[pid]) / IDLE_S for pid in pids]
    memory = [smaps_rollup_kib(pid) for pid in pids]
    answered_after = sum(s.commands.run("echo here").stdout == "here\n" for s in sandboxes)
    for sandbox in sandboxes:
        sandbox.kill()
    everyone = answered == answered_after == len(pids) == IDLE_SANDBOXES
    return [
        row(
            GROUP, f"{IDLE_SANDBOXES} sandboxes idle: CPU each", cpu, unit="% core", floor=floor_pct,
            target="all answer, <= 1.5 % of a core each", ok=everyone and percentile(cpu, 100) <= 1.5,
        ),
        row(GROUP, "memory of one, PSS", [m["Pss"] / 1024 for m in memory], unit="MiB", target="printed", ok=True),
        row(
            GROUP, "memory of one, private", [(m["Private_Clean"] + m["Private_Dirty"]) / 1024 for m in memory],
            unit="MiB", target="printed", ok=True,
        ),
    ]  # fmt: skip


def _leaks(server: Server) -> list[Row]:
    before = leaks(server)
    samples = _creates(server, CYCLES)
    server.wait_until(lambda: not left_after(server, before), "nothing to be left", timeout_s=60)
    left = left_after(server, before)
    return [
        row(GROUP, f"{CYCLES} create/delete cycles: time of create", samples, target="printed", ok=True),
        row(
            GROUP, f"{CYCLES} create/delete cycles: things left", [float(sum(len(v) for v in left.values()))],
            unit="leaks", target="0", ok=not left,
        ),
    ]  # fmt: skip


def vmm_pids(server: Server) -> list[int]:
    return sorted(int(entry.split()[0]) for entry in leaks(server).processes)


@contextmanager
def timed() -> Iterator[Callable[[], float]]:
    """Yields a function that gives the milliseconds spent in the block, once it is over."""
    start = time.perf_counter()
    end = start

    def took() -> float:
        return 1000 * (end - start)

    yield took
    end = time.perf_counter()
