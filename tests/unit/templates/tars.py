"""Archives made for tests, one member at a time."""

import io
import tarfile
from pathlib import Path


def member(
    name: str,
    kind: bytes = tarfile.REGTYPE,
    *,
    mode: int = 0o644,
    link: str = "",
    headers: dict[str, str] | None = None,
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.linkname, info.pax_headers = kind, mode, link, headers or {}
    return info


def directory(name: str, mode: int = 0o755) -> tarfile.TarInfo:
    return member(name, tarfile.DIRTYPE, mode=mode)


def symlink(name: str, to: str) -> tarfile.TarInfo:
    return member(name, tarfile.SYMTYPE, mode=0o777, link=to)


def hardlink(name: str, to: str) -> tarfile.TarInfo:
    return member(name, tarfile.LNKTYPE, link=to)


def device(name: str, major: int, minor: int, kind: bytes = tarfile.CHRTYPE) -> tarfile.TarInfo:
    info = member(name, kind, mode=0o600)
    info.devmajor, info.devminor = major, minor
    return info


def make_tar(path: Path, *members: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        for item in members:
            info, data = item if isinstance(item, tuple) else (item, b"")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path
