"""The main job, end to end, with the official E2B SDK against a server of ours.

A project with a failing test goes into a sandbox. The sandbox is forked three ways,
each fork gets a different patch, and the tests say which patch wins. The sandbox is
then paused in the middle of counting and goes on where it was. Ports inside are
reached over HTTP and WebSocket. Each step prints how long it took.

Needs E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY, and a template called `base`.
"""

import asyncio
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import websockets
from e2b import CommandExitException, Sandbox

PROJECT = Path(__file__).parent / "demo_project"
PATCHES = {
    "check the balance first": (
        "        self.balances[source] = self.balances.get(source, 0) - cents\n",
        (
            "        if self.balances.get(source, 0) < cents:\n"
            "            raise ValueError('overdraft')\n"
            "        self.balances[source] = self.balances.get(source, 0) - cents\n"
        ),
    ),
    "give the rest to the first shares": (
        "        return [total // ways] * ways\n",
        "        share, rest = divmod(total, ways)\n        return [share + (i < rest) for i in range(ways)]\n",
    ),
}
PATCHES["both of them"] = ("", "")  # applied as the other two, one after the other


@contextmanager
def step(what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"  {time.perf_counter() - start:7.2f} s  {what}", flush=True)


def run_tests(sandbox: Sandbox) -> tuple[int, str]:
    """Failures, and the runner's last line."""
    try:
        result = sandbox.commands.run("python3 -m unittest -q", cwd="/home/user/project", timeout=120)
        return 0, result.stderr.strip().splitlines()[-1]
    except CommandExitException as failed:
        last = failed.stderr.strip().splitlines()[-1]
        return sum(int(part.split("=")[1].rstrip(")")) for part in last.split() if "=" in part), last


def patch(sandbox: Sandbox, name: str) -> None:
    source = sandbox.files.read("/home/user/project/ledger.py")
    names = [n for n in PATCHES if n != "both of them"] if name == "both of them" else [name]
    for one in names:
        before, after = PATCHES[one]
        source = source.replace(before, after)
    sandbox.files.write("/home/user/project/ledger.py", source)


def try_patches(parent: Sandbox) -> str:
    """Fork, patch, test; return the patch that passes."""
    with step(f"forked {len(PATCHES)} ways"):
        forks = parent.fork(count=len(PATCHES), timeout=300)
    children = dict(zip(PATCHES, (outcome_of(fork) for fork in forks), strict=True))
    try:
        with step("patched and tested all of them at once"), ThreadPoolExecutor() as pool:
            for name, child in children.items():
                pool.submit(patch, child, name).result()
            outcomes = dict(zip(children, pool.map(run_tests, children.values()), strict=True))
    finally:
        for child in children.values():
            child.kill()
    for name, (failures, last) in outcomes.items():
        print(f"             {'passes' if failures == 0 else 'fails '}  {name}: {last}")
    winners = [name for name, (failures, _) in outcomes.items() if failures == 0]
    if len(winners) != 1:
        sys.exit(f"expected one winner, not {winners}")
    return winners[0]


def outcome_of(fork: Sandbox | Exception) -> Sandbox:
    """The child of one entry of a fork; its error is raised."""
    if isinstance(fork, Exception):
        raise fork
    return fork


def pause_and_go_on(sandbox: Sandbox) -> None:
    sandbox.commands.run("python3 count.py", cwd="/home/user/project", background=True, timeout=0)
    before = count_above(sandbox, 0)
    with step("paused while a process counts"):
        sandbox.pause()
    time.sleep(3)
    with step("resumed"):
        sandbox.connect(timeout=300)
    after = count_above(sandbox, before)
    print(f"             the counter went on: {before} before the pause, {after} after it")


def count_above(sandbox: Sandbox, least: int) -> int:
    """The counter, once it is above *least*; a counter that stands still ends the demo."""
    wait = f'until [ "$(cat /tmp/count 2>/dev/null || echo 0)" -gt {least} ]; do sleep 0.05; done; cat /tmp/count'
    return int(sandbox.commands.run(wait, timeout=60).stdout)


def serve(sandbox: Sandbox) -> None:
    sandbox.commands.run("python3 web.py", cwd="/home/user/project", background=True, timeout=0)
    sandbox.commands.run("until ss -Hltn 'sport = :8000' | grep -q .; do sleep 0.1; done", timeout=60)
    base = os.environ["E2B_SANDBOX_URL"]
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8000"}
    with step("HTTP to port 8000 of the sandbox"):
        request = urllib.request.Request(f"{base}/anything", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            print(f"             {answer.read().decode().strip()}")
    with step("WebSocket to port 8001 of the sandbox"):
        print(f"             {asyncio.run(shout(base, {**headers, 'E2b-Sandbox-Port': '8001'}))}")


async def shout(base: str, headers: dict[str, str]) -> str:
    url = base.replace("http", "ws", 1) + "/"
    async with websockets.connect(url, additional_headers=headers) as socket:
        await socket.send("is anybody there?")
        return str(await socket.recv())


def main() -> None:
    start = time.perf_counter()
    with step("started a sandbox from `base`"):
        sandbox = Sandbox.create("base", timeout=600, metadata={"example": "demo"})
    try:
        with step("wrote the project into it"):
            for file in sorted(PROJECT.iterdir()):
                if file.is_file():
                    sandbox.files.write(f"/home/user/project/{file.name}", file.read_text())
        with step("ran its tests"):
            failures, last = run_tests(sandbox)
        print(f"             {last}")
        if failures == 0:
            sys.exit("the tests were expected to fail")
        winner = try_patches(sandbox)
        print(f"             the patch that wins: {winner}")
        pause_and_go_on(sandbox)
        serve(sandbox)
    finally:
        with step("deleted it"):
            sandbox.kill()
    print(f"done in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
