"""What every microVM boots: a kernel, and an initramfs that holds the agent and its modules.

The kernel is Debian's; the initramfs has `envd` as ``/init`` and, under
``/modules``, what must be loaded before a root disk can be mounted, named so that
load order is name order. A built image is never changed: a folder holds each one
under its digest, and the file ``current`` names the newest, so that snapshots
made with an older image go on loading.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.guest import cpio
from agentenv.guest.kernel import KernelTree, fetch_kernel, open_kernel
from agentenv.guest.kmod import Module, ModuleTree
from agentenv.model.errors import AgentEnvError, Invalid, NotFound

FORMAT: Final = 1
BOOT_MODULES: Final = (
    "virtio_mmio", "virtio_blk", "virtio_net", "virtio_balloon", "virtio_rng", "virtio_console", "ext4",
)  # fmt: skip
WORKLOAD_MODULES: Final = ("overlay", "fuse", "tun", "veth")

HOW_TO_GET_ONE: Final = (
    "make guest, and set guest.image_dir (AENV_GUEST_IMAGE_DIR) to .cache/guest of the clone, or to a copy"
)
_KERNEL: Final = "vmlinuz"
_INITRAMFS: Final = "initramfs.img"
_MANIFEST: Final = "guest.json"
_CURRENT: Final = "current"
_DIGEST_CHARACTERS: Final = 32


@dataclass(frozen=True, slots=True)
class GuestImage:
    """One built image. ``digest`` changes when a byte of the kernel or the initramfs does."""

    kernel: Path
    initramfs: Path
    kernel_version: str
    digest: str


def build_guest(envd: Path, out: Path, *, kernel: KernelTree | None = None) -> GuestImage:
    """Build the image of the agent binary *envd* into the folder *out*, and make it the current one. Blocks.

    *kernel* None fetches Debian's through apt, into a cache inside *out*. The same
    input gives the same digest; an image that is there already is kept as it is.
    Raises what `fetch_kernel` raises, and `Invalid` if *envd* cannot run as ``/init``.
    """
    agent = _read_agent(envd)
    out.mkdir(parents=True, exist_ok=True)
    tree = kernel or fetch_kernel(out / "kernel")
    modules = ModuleTree(tree.modules).load_order((*BOOT_MODULES, *WORKLOAD_MODULES))
    initramfs = gzip.compress(_archive(agent, modules), compresslevel=9, mtime=0)
    kernel_data = tree.image.read_bytes()
    digest = _digest(kernel_data, initramfs)
    folder = out / digest
    if not folder.is_dir():
        manifest = {
            "format": FORMAT,
            "kernel_version": tree.version,
            "digest": digest,
            "modules": [module.name for module in modules],
        }
        _publish(
            folder, {_KERNEL: kernel_data, _INITRAMFS: initramfs, _MANIFEST: json.dumps(manifest, indent=2).encode()}
        )
    _replace(out / _CURRENT, digest.encode())
    return load_guest(out)


def load_guest(folder: Path, digest: str | None = None) -> GuestImage:
    """Return the image *digest* of *folder*, or its current one. Blocks.

    Raises `NotFound` when nothing was built there, `Invalid` when what is there is damaged.
    """
    if digest is None:
        try:
            digest = (folder / _CURRENT).read_text()
        except FileNotFoundError:
            raise NotFound(f"no guest image was built in {folder}", hint=HOW_TO_GET_ONE) from None
    if len(digest) != _DIGEST_CHARACTERS or not digest.isalnum():
        raise Invalid(f"{digest!r} is not the digest of a guest image")
    at = folder / digest
    try:
        manifest = json.loads((at / _MANIFEST).read_bytes())
        kernel, initramfs = (at / _KERNEL).read_bytes(), (at / _INITRAMFS).read_bytes()
    except FileNotFoundError:
        raise NotFound(f"no guest image {digest} in {folder}", hint=HOW_TO_GET_ONE) from None
    except ValueError as error:
        raise Invalid(f"{at / _MANIFEST} is damaged", hint="remove the folder and run: make guest") from error
    if manifest.get("format") != FORMAT:
        raise Invalid(f"the guest image in {at} has format {manifest.get('format')}, this release reads {FORMAT}")
    if _digest(kernel, initramfs) != digest:
        raise Invalid(f"the guest image in {at} is damaged", hint="remove the folder and run: make guest")
    return GuestImage(at / _KERNEL, at / _INITRAMFS, str(manifest["kernel_version"]), digest)


def _read_agent(envd: Path) -> bytes:
    try:
        agent = envd.read_bytes()
    except OSError as error:
        raise NotFound(f"there is no agent binary {envd}: {error.strerror}", hint="make envd") from error
    if not agent.startswith(b"\x7fELF"):
        raise Invalid(f"{envd} is not a program")
    # A dynamic program names its loader, and there is none in the initramfs: the guest would panic.
    if b"/lib64/ld-linux" in agent[:4096]:
        raise Invalid(f"{envd} needs a dynamic loader; the agent must be linked statically")
    return agent


def _archive(agent: bytes, modules: list[Module]) -> bytes:
    out = io.BytesIO()
    folders = [cpio.directory(name) for name in ("dev", "proc", "sys", "root-fs", "modules")]
    loadable = [cpio.file(f"modules/{place:02d}-{module.name}.ko", module.data) for place, module in enumerate(modules)]
    # The kernel opens /dev/console for /init before anything could have mounted devtmpfs.
    cpio.write([*folders, cpio.character_device("dev/console", 5, 1), cpio.file("init", agent, 0o755), *loadable], out)
    return out.getvalue()


def _digest(kernel: bytes, initramfs: bytes) -> str:
    parts = b"".join(hashlib.sha256(part).digest() for part in (kernel, initramfs))
    return hashlib.sha256(parts).hexdigest()[:_DIGEST_CHARACTERS]


def _publish(folder: Path, files: dict[str, bytes]) -> None:
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        for name, data in files.items():
            _write_durably(partial / name, data)
        partial.chmod(0o755)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another build of the same bytes came first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(path: Path, data: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as partial:
        _write_durably(Path(partial) / path.name, data)
        (Path(partial) / path.name).rename(path)


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def main() -> int:
    """Build the guest image from the command line and print where it is, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m agentenv.guest.image", description=main.__doc__)
    parser.add_argument("--envd", type=Path, required=True, help="the static agent binary")
    parser.add_argument("--out", type=Path, required=True, help="folder of guest images")
    parser.add_argument("--kernel-tree", type=Path, help="an unpacked kernel package, instead of fetching one")
    options = parser.parse_args()
    try:
        kernel = open_kernel(options.kernel_tree) if options.kernel_tree else None
        image = build_guest(options.envd, options.out.absolute(), kernel=kernel)
    except AgentEnvError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 1
    shown = {"kernel": str(image.kernel), "initramfs": str(image.initramfs)}
    sys.stdout.write(json.dumps({**shown, "kernel_version": image.kernel_version, "digest": image.digest}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
