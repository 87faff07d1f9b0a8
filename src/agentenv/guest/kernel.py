"""Debian's own cloud kernel, fetched through the host's package sources and never installed.

apt keeps its lists and state in a private folder here, so fetching needs no root,
changes nothing on the host and does not meet another apt that is running.
"""

import fcntl
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.model.errors import Invalid, NotFound, Unavailable, Unsupported

_FETCH_TIMEOUT_S: Final = 900
_META_PACKAGES: Final = {"x86_64": "linux-image-cloud-amd64"}
_SAID_LINES: Final = 6


@dataclass(frozen=True, slots=True)
class KernelTree:
    """An unpacked kernel package."""

    version: str
    image: Path
    modules: Path


def open_kernel(root: Path) -> KernelTree:
    """Find the kernel in *root*, an unpacked package. Raises `Invalid` unless there is exactly one."""
    images = sorted(root.glob("boot/vmlinuz-*"))
    if len(images) != 1:
        raise Invalid(f"{root} holds {len(images)} kernels (boot/vmlinuz-*) where one was expected")
    version = images[0].name.removeprefix("vmlinuz-")
    for modules in (root / "lib/modules" / version, root / "usr/lib/modules" / version):
        if modules.is_dir():
            return KernelTree(version, images[0], modules)
    raise Invalid(f"{root} holds kernel {version} without its modules")


def fetch_kernel(cache: Path) -> KernelTree:
    """Return the kernel in *cache*, fetching and unpacking its package the first time. Blocks.

    Raises `Unsupported` where there is no apt or no such kernel for this CPU,
    `Unavailable` when the package source does not answer, `NotFound` when it
    has no such package.
    """
    tree = cache / "tree"
    if tree.is_dir():
        return open_kernel(tree)
    machine = platform.machine()
    if machine not in _META_PACKAGES:
        raise Unsupported(f"no guest kernel is known for the CPU architecture {machine}; only x86_64 is supported")
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise Unsupported(
                f"the guest kernel comes from a Debian package, and this host has no {program}",
                hint="unpack a linux-image-cloud-amd64 package elsewhere and pass its folder as --kernel-tree",
            )
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second caller waits, and then finds the tree
        if not tree.is_dir():
            _fetch(_META_PACKAGES[machine], cache, tree)
    return open_kernel(tree)


def _fetch(meta_package: str, cache: Path, tree: Path) -> None:
    configuration = f"-c={_private_apt(cache / 'apt')}"
    _run("apt-get", configuration, "update")
    package = _image_package(_run("apt-cache", configuration, "depends", "--important", meta_package))
    partial = cache / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    _run("apt-get", configuration, "download", package, cwd=partial)
    for archive in partial.glob("*.deb"):
        _run("dpkg-deb", "--extract", str(archive), str(partial / "tree"))
    open_kernel(partial / "tree")
    (partial / "tree").rename(tree)  # only a whole tree is ever seen under this name
    shutil.rmtree(partial)


def _private_apt(state: Path) -> Path:
    for folder in ("lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    configuration = state / "apt.conf"
    # Hooks of the host are cleared: they clean or index the host's own lists and caches.
    configuration.write_text(
        f"""\
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
Dir::State::lists "{state}/lists";
Dir::Cache "{state}/cache";
APT::Sandbox::User "root";
APT::Update::Error-Mode "any";
Acquire::Languages "none";
Acquire::Retries "3";
"""
    )
    return configuration


def _image_package(depends: str) -> str:
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    if found is None:
        raise NotFound("the package sources of this host have no cloud kernel", hint="Debian's main section has it")
    return found.group(1)


def _run(program: str, *arguments: str, cwd: Path | None = None) -> str:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    asked = f"{program} {next(word for word in arguments if not word.startswith('-c='))}"
    try:
        done = subprocess.run(
            [program, *arguments],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_FETCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{asked} did not end within {_FETCH_TIMEOUT_S} s") from error
    if done.returncode != 0:
        said = "; ".join(done.stderr.strip().splitlines()[-_SAID_LINES:])
        raise Unavailable(f"{asked} failed: {said}", hint="is the package mirror reachable?")
    return done.stdout
