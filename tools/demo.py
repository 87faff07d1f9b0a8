"""`make demo`: a server of its own, the template `base`, and examples/demo.py against it, as a user would run it.

The server's home is kept under .cache, so that the second demo finds the template.
Nothing else stays: the server is stopped, and what it left on the host is looked for.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.capabilities import BASE_ROOTFS, REPO
from tests.running import HOMES, home_of
from tests.server import Server, alone_at, leaks

PREFIX = "aed"
NET = 113  # beside a server under test, and beside one with the default ranges
LEFT = ("processes", "namespaces", "links", "mounts", "loops", "tables", "sockets")


RUNTIME = Path("/run/aenv-demo")


def main() -> int:
    with alone_at(RUNTIME):
        return demo()


def demo() -> int:
    home = home_of("demo")
    for older in HOMES.glob("demo-*"):
        if older != home:  # made with another guest or another QEMU: nothing of it loads any more
            shutil.rmtree(older)
    server = Server(home=home, runtime=RUNTIME, prefix=PREFIX, net=NET)
    server.clear()
    started = time.monotonic()
    status = 1
    try:
        server.start()
        log = server.log.relative_to(REPO)
        say(f"server: listening on {server.url}, log in {log} ({time.monotonic() - started:.1f} s)")
        status = build_template(server) or run_example(server)
        server.delete_all()
    except AssertionError as error:
        say(f"error: {error}")
    finally:
        server.leave()
    found = leaks(server)
    server.clear()
    left = {kind: sorted(items) for kind in LEFT if (items := getattr(found, kind))}
    if left:
        say(f"error: the server left something behind: {left}")
        return 1
    outcome = "all of it works" if status == 0 else "FAILED"
    say(f"demo: {outcome}, {time.monotonic() - started:.1f} s with server and template")
    return status


def build_template(server: Server) -> int:
    if server.call("GET", "/templates/aliases/base")[0] == 200:
        say("template: `base` is there")
        return 0
    say("template: building `base` from the root file system (once)")
    started = time.monotonic()
    arguments = ["template", "build", "base", "--rootfs", str(BASE_ROOTFS), "--memory", "512", "--disk", "4096"]
    command = [sys.executable, "-m", "agentenv.cli", *arguments]
    status = subprocess.run(
        command, env=environment(server), cwd=REPO, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False
    ).returncode  # its progress goes to the other output
    say(f"template: {'built' if status == 0 else 'FAILED'} in {time.monotonic() - started:.1f} s")
    return status


def run_example(server: Server) -> int:
    say("example: examples/demo.py, with the E2B SDK")
    command = [sys.executable, str(REPO / "examples/demo.py")]
    return subprocess.run(command, env=environment(server), cwd=REPO, stdin=subprocess.DEVNULL, check=False).returncode


def environment(server: Server) -> dict[str, str]:
    names = {"E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url, "E2B_API_KEY": server.api_key}
    return {**os.environ, **names, "AENV_API_URL": server.url, "AENV_API_KEY": server.api_key}


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
