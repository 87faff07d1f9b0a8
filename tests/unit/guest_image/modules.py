"""Kernel modules made for tests: real ELF section tables, nothing else."""

import struct
from pathlib import Path


def make_module(*depends: str) -> bytes:
    """Return the smallest ELF file that says what it depends on."""
    modinfo = b"license=GPL\0depends=" + ",".join(depends).encode() + b"\0"
    names = b"\0.modinfo\0.shstrtab\0"
    start = 64
    table = start + len(modinfo) + len(names)
    header = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 2)
    )

    def section(name: int, at: int, size: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at, size, 0, 0, 1, 0)

    sections = section(0, 0, 0) + section(1, start, len(modinfo)) + section(10, start + len(modinfo), len(names))
    return header + modinfo + names + sections


def make_tree(root: Path, modules: dict[str, bytes], builtin: tuple[str, ...] = ()) -> Path:
    """Lay *modules* (file name to content) out as a kernel package does."""
    folder = root / "kernel/drivers"
    folder.mkdir(parents=True)
    for name, data in modules.items():
        (folder / name).write_bytes(data)
    (root / "modules.builtin").write_text("".join(f"kernel/{name}.ko\n" for name in builtin))
    return root
