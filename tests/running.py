"""Servers with a template, for suites: the home is kept between runs, so that a template is built once.

A home is good for one checkout, one guest image and one QEMU: its name has a digest of
all three, so that two checkouts that share a cache never meet in one home.
"""

import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.capabilities import BASE_ROOTFS, GUEST_DIR, QEMU, REPO
from tests.server import Server, alone_at, leaks

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
    with alone_at(server.runtime):
        server.clear()
        server.start()
        try:
            server.delete_all()
            ensure_template(server, template)
            yield server
            server.delete_all()
        finally:
            server.leave()
            left = leaks(server)
            server.clear()
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
    back_end = os.environ.get("AENV_STORAGE_BACKEND", "auto")
    key = json.dumps([str(REPO), back_end, version, guest, rootfs.st_size, rootfs.st_mtime_ns])
    return HOMES / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def ensure_template(server: Server, name: str) -> None:
    """Build template *name* from the base root filesystem, if the server does not have it."""
    status, _ = server.call("GET", f"/templates/aliases/{name}")
    if status == 200:
        return
    built = server.aenv("template", "build", name, "--rootfs", str(BASE_ROOTFS), "--memory", "512", "--disk", "4096")
    assert built.returncode == 0, built.stderr.decode(errors="replace") + server.tail()


@contextmanager
def small_disk(mount_point: Path, size: str) -> Iterator[Path]:
    """A file system of *size* of its own, on a loop device."""
    image = mount_point.with_suffix(".img")
    mount_point.mkdir()
    subprocess.run(["truncate", "-s", size, str(image)], check=True)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mount_point)], check=True)
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "-l", str(mount_point)], check=True)
        image.unlink()


@contextmanager
def running_on(disk: Path, *, prefix: str, net: int) -> Iterator[Server]:
    """A server whose home is on *disk*, with the template that the home of the suites has; its log is beside."""
    server = Server(
        home=disk / "home",
        runtime=Path(f"/run/aenv-test-{prefix}"),
        prefix=prefix,
        net=net,
        extra="[sandbox]\nmin_free_disk_mib = 0\n",
        files=disk.parent,
    )
    subprocess.run(["cp", "-a", "--sparse=always", str(home_of(SUITES)), str(server.home)], check=True)
    with alone_at(server.runtime):
        server.clear()
        try:
            yield server.start()
            server.delete_all()
        finally:
            server.leave()
            for process in leaks(server).processes:  # of a test that failed: they hold the disk
                os.kill(int(process.split()[0]), signal.SIGKILL)
            server.clear()
