"""What set-up builds. A step is done again only when what went into it has changed: its stamp is a digest of that."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from tools.setup import console, host
from tools.setup.console import SetupError
from tools.setup.host import ROOT

CACHE = ROOT / ".cache"
VENV = ROOT / ".venv"
TARGET = "x86_64-unknown-linux-gnu"
ENVD = ROOT / "target" / TARGET / "release/envd"
STORAGED = ROOT / "target" / TARGET / "release/storaged"
BASE_ROOTFS = CACHE / "base-rootfs.tar"
GUEST = CACHE / "guest"
KEPT_IMAGES = 4


class Step(NamedTuple):
    """*inputs* gives everything that the result depends on; *outputs* must exist for the stamp to count."""

    name: str
    inputs: Callable[[], Iterable[bytes]]
    outputs: tuple[Path, ...]
    build: Callable[[], None]

    def key(self) -> str:
        digest = hashlib.sha256()
        for part in self.inputs():
            digest.update(hashlib.sha256(part).digest())
        return digest.hexdigest()

    @property
    def stamp(self) -> Path:
        return CACHE / "stamps" / self.name

    def is_current(self) -> bool:
        return self.stamp.is_file() and self.stamp.read_text() == self.key() and all(o.exists() for o in self.outputs)

    def bring_up_to_date(self) -> None:
        if self.is_current():
            console.say(f"  {self.name}: up to date")
            return
        self.stamp.unlink(missing_ok=True)
        key = self.key()
        self.build()
        self.stamp.parent.mkdir(parents=True, exist_ok=True)
        self.stamp.write_text(key)


def contents(*patterns: str) -> Iterable[bytes]:
    """Names and contents of all files of the project that match."""
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(ROOT)).encode()
                yield path.read_bytes()


def log(name: str) -> Path:
    return CACHE / "log" / f"{name}.log"


def install_packages() -> None:
    missing = host.missing_packages()
    if not missing:
        console.say("  packages: all there")
        return
    listed = " ".join(missing)
    if shutil.which("apt-get") is None:
        raise SetupError(
            f"these Debian packages, or what they hold, are missing: {listed}",
            "install them with this system's own tools",
        )
    if os.geteuid() != 0:
        raise SetupError(
            f"not root, and Debian packages are missing: {listed}", f"run it as root, or: sudo apt-get install {listed}"
        )
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    # Another apt may be at work (a fresh machine updates itself); wait for it rather than fail.
    apt = ["apt-get", "-y", "-q", "-oDPkg::Lock::Timeout=300", "-oAcquire::Retries=3"]
    console.run("package lists", "Debian", [*apt, "update"], log("apt-update"), cwd=ROOT, env=quiet)
    install = [*apt, "install", "--no-install-recommends", *missing]
    console.run(f"packages ({listed})", "Debian", install, log("apt-install"), cwd=ROOT, env=quiet)
    still = host.missing_packages()
    if still:
        raise SetupError(f"installed, and still not usable: {' '.join(still)}", f"see {log('apt-install')}")


def build_venv() -> None:
    python = VENV / "bin/python"
    works = python.exists() and subprocess.run(
        [python, "-m", "pip", "--version"], stdout=subprocess.DEVNULL, check=False
    )
    if not works or works.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        console.run("virtual environment", "none", [sys.executable, "-m", "venv", str(VENV)], log("venv"), cwd=ROOT)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--no-input", "--progress-bar=off"]
    locked = ["--require-hashes", "--requirement", "requirements/dev.txt"]
    console.run("Python packages", "PyPI", [*pip, *locked], log("pip"), cwd=ROOT)
    # The build back end is one of the locked packages: nothing that is not locked is fetched.
    own = ["--no-deps", "--no-build-isolation", "--no-index", "--editable", "."]
    console.run("aenv itself", "none", [*pip, *own], log("pip-own"), cwd=ROOT)


def build_envd() -> None:
    command = ["cargo", "build", "--release", "--locked", "--package", "envd", "--target", TARGET]
    console.run("guest agent", "Rust's", command, log("cargo"), cwd=ROOT)


def build_storaged() -> None:
    command = ["cargo", "build", "--release", "--locked", "--package", "storaged", "--target", TARGET]
    console.run("storage daemon", "Rust's", command, log("cargo-storaged"), cwd=ROOT)
    # Where a server that runs from this environment finds it.
    beside = VENV / "bin/storaged"
    beside.unlink(missing_ok=True)
    beside.symlink_to(STORAGED)


def build_guest() -> None:
    command = [str(VENV / "bin/python"), "-m", "agentenv.guest.image", "--envd", str(ENVD), "--out", str(GUEST)]
    console.run("guest kernel and initramfs", "Debian", command, log("guest"), cwd=ROOT)
    # Images are never changed, so a clone that is worked on gathers them; servers of this clone use the newest.
    images = sorted(GUEST.glob("*/guest.json"), key=lambda manifest: manifest.stat().st_mtime)
    for manifest in images[:-KEPT_IMAGES]:
        shutil.rmtree(manifest.parent)


def build_base() -> None:
    if os.geteuid() != 0:
        raise SetupError("not root: the base root file system is made with mmdebstrap, as root")
    quiet = {"LC_ALL": "C", "PYTHON": sys.executable}
    if not _apt_knows_its_archives():
        console.run("package lists", "Debian", ["apt-get", "-q", "update"], log("apt-update"), cwd=ROOT, env=quiet)
    command = ["sh", "tools/base-rootfs.sh", str(BASE_ROOTFS)]
    console.run("base root file system", "Debian", command, log("base"), cwd=ROOT, env=quiet)


def _apt_knows_its_archives() -> bool:
    command = [sys.executable, "tools/apt_sources.py"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 0


def _python() -> bytes:
    return f"{sys.version_info[:2]} {sys.base_prefix}".encode()


STEPS = (
    Step(
        "venv",
        lambda: [_python(), *contents("requirements/dev.txt", "pyproject.toml")],
        (VENV / "bin/aenv",),
        build_venv,
    ),
    Step("envd", lambda: contents("crates/**/*", "Cargo.*", ".cargo/*", "rust-toolchain*"), (ENVD,), build_envd),
    Step(
        "storaged",
        lambda: contents("crates/**/*", "Cargo.*", ".cargo/*", "rust-toolchain*"),
        (STORAGED, VENV / "bin/storaged"),
        build_storaged,
    ),
    Step(
        "guest",
        lambda: [
            ENVD.read_bytes() if ENVD.exists() else b"",
            *contents(*(f"src/agentenv/guest/{part}.py" for part in ("cpio", "image", "kernel", "kmod"))),
        ],
        (GUEST / "current",),
        build_guest,
    ),
    Step("base", lambda: contents("tools/base-rootfs.sh", "tools/apt_sources.py"), (BASE_ROOTFS,), build_base),
)
