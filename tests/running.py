"""Servers with a template, for suites: the home is kept between runs, so that a template is built once.

A home is good for one guest image and one QEMU: its name has a digest of both.
"""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.capabilities import BASE_ROOTFS, GUEST_DIR, QEMU, REPO
from tests.server import Server, leaks

HOMES = REPO / ".cache/tests"
SUITES = "suites"  # the home that suites share: they run one after the other, and leave it as they found it


@contextmanager
def running_server(
    name: str = SUITES, *, template: str = "base", prefix: str = "aet", net: int = 111
) -> Iterator[Server]:
    """A server on the home *name* that has *template*; on leaving, everything of it must be gone.

    Each suite has a *prefix* and a *net* of its own: one that was ended by force blocks no other.
    """
    server = Server(home=home_of(name), runtime=Path(f"/run/aenv-test-{prefix}"), prefix=prefix, net=net)
    shutil.rmtree(server.runtime, ignore_errors=True)
    server.start()
    try:
        server.delete_all()
        ensure_template(server, template)
        yield server
        server.delete_all()
    finally:
        server.stop()
        left = leaks(server)
        shutil.rmtree(server.runtime, ignore_errors=True)
        problems = {
            kind: sorted(items)
            for kind in ("processes", "namespaces", "links", "mounts", "loops", "tables", "sockets")
            if (items := getattr(left, kind))
        }
        assert not problems, problems


def home_of(name: str) -> Path:
    version = subprocess.run([QEMU, "--version"], capture_output=True, text=True, check=True).stdout
    guest = (GUEST_DIR / "current").read_text().strip() if (GUEST_DIR / "current").is_file() else ""
    rootfs = BASE_ROOTFS.stat()
    key = json.dumps([version, guest, rootfs.st_size, rootfs.st_mtime_ns])
    return HOMES / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def ensure_template(server: Server, name: str) -> None:
    """Build template *name* from the base root filesystem, if the server does not have it."""
    status, _ = server.call("GET", f"/templates/aliases/{name}")
    if status == 200:
        return
    built = server.aenv("template", "build", name, "--rootfs", str(BASE_ROOTFS), "--memory", "512", "--disk", "4096")
    assert built.returncode == 0, built.stderr.decode(errors="replace") + server.tail()
