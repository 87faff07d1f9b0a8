"""Which kernel modules must be loaded, and in which order, read from the modules themselves.

Needs neither ``depmod`` nor ``modprobe``: a module names what it depends on in its
``.modinfo`` section, and the package lists what is built into the kernel.
"""

import gzip
import lzma
import struct
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.model.errors import Invalid, NotFound, Unsupported

_SUFFIXES: Final = (".ko", ".ko.xz", ".ko.zst", ".ko.gz")
_ELF64_LITTLE_ENDIAN: Final = b"\x7fELF\x02\x01"


@dataclass(frozen=True, slots=True)
class Module:
    """One loadable module, decompressed."""

    name: str
    data: bytes


class ModuleTree:
    """The modules of one kernel: the folder ``lib/modules/VERSION`` of its package."""

    def __init__(self, root: Path) -> None:
        self._files = {
            canonical(path.name): path for path in sorted(root.rglob("*.ko*")) if path.name.endswith(_SUFFIXES)
        }
        builtin = root / "modules.builtin"
        lines = builtin.read_text().splitlines() if builtin.exists() else []
        self._builtin = frozenset(canonical(Path(line).name) for line in lines)

    def load_order(self, names: Iterable[str]) -> list[Module]:
        """Return *names* and all that they need, each once, what is needed first.

        What is built into the kernel is left out. Raises `NotFound` for a name that is
        neither a module nor built in, `Invalid` for a file that is no module.
        """
        ordered: dict[str, Module] = {}
        for name in names:
            self._visit(canonical(name), ordered, ())
        return list(ordered.values())

    def _visit(self, name: str, ordered: dict[str, Module], above: tuple[str, ...]) -> None:
        if name in ordered or name in self._builtin:
            return
        if name in above:
            raise Invalid(f"kernel modules depend on each other in a circle: {' -> '.join((*above, name))}")
        if name not in self._files:
            needed_by = f", needed by {above[-1]}" if above else ""
            raise NotFound(f"the kernel package has no module {name}{needed_by}")
        data = _read(self._files[name])
        for needed in dependencies(data):
            self._visit(needed, ordered, (*above, name))
        ordered[name] = Module(name, data)


def canonical(file_name: str) -> str:
    """Return the name the kernel knows a module by: no suffix, no dashes."""
    return file_name.split(".", 1)[0].replace("-", "_")


def dependencies(module: bytes) -> list[str]:
    """Return what *module* (an ELF image) says it depends on. Raises `Invalid` if it is no module."""
    for field in _section(module, b".modinfo").split(b"\0"):
        key, _, value = field.partition(b"=")
        if key == b"depends" and value:
            return [canonical(name) for name in value.decode().split(",")]
    return []


def _section(elf: bytes, wanted: bytes) -> bytes:
    try:
        if not elf.startswith(_ELF64_LITTLE_ENDIAN):
            raise Invalid("not a 64-bit little-endian ELF file")
        (table,) = struct.unpack_from("<Q", elf, 0x28)
        size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
        headers = [struct.unpack_from("<IIQQQQ", elf, table + index * size) for index in range(count)]
        names_at = headers[names_index][4]
        for name_at, _, _, _, at, length in headers:
            end = elf.index(b"\0", names_at + name_at)
            if elf[names_at + name_at : end] == wanted:
                return elf[at : at + length]
    except (struct.error, IndexError, ValueError) as error:
        raise Invalid("not a kernel module: its section table is damaged") from error
    raise Invalid(f"not a kernel module: it has no section {wanted.decode()}")


def _read(path: Path) -> bytes:
    data = path.read_bytes()
    try:
        match path.suffix:
            case ".xz":
                return lzma.decompress(data)
            case ".gz":
                return gzip.decompress(data)
            case ".zst":
                return subprocess.run(["zstd", "-dc"], input=data, capture_output=True, check=True).stdout
            case _:
                return data
    except (lzma.LZMAError, gzip.BadGzipFile, EOFError, subprocess.CalledProcessError) as error:
        raise Invalid(f"{path.name} is damaged: it does not decompress") from error
    except FileNotFoundError as error:
        raise Unsupported(
            "the kernel's modules are packed with zstd, which is not installed", hint="install zstd"
        ) from error
