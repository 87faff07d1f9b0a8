"""Which back end a server uses, and why. Blocks: it looks at the host and at the data directory."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from agentenv.model.errors import Unsupported
from agentenv.storage.contract import Storage
from agentenv.storage.layered.process import find_program
from agentenv.storage.layered.storage import LayeredStorage
from agentenv.storage.layout import BackEnd, written_by
from agentenv.storage.plain import PlainStorage

FUSE: Final = Path("/dev/fuse")


@dataclass(frozen=True, slots=True)
class Chosen:
    """``reason`` is for the log."""

    back_end: BackEnd
    reason: str


def lack_of_layered(program: str, *, fuse: Path = FUSE, uid: int | None = None) -> str | None:
    """Why this host cannot use the layered back end, or None if it can."""
    try:
        find_program(program)
    except Unsupported as error:
        return error.message
    if (os.geteuid() if uid is None else uid) != 0:
        return "not root: images cannot be mounted"
    try:
        os.close(os.open(fuse, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"{fuse}: {error.strerror}"
    return None


def choose(wanted: Literal["auto", "layered", "plain"], written: BackEnd | None, lack: str | None) -> Chosen:
    """Choose by what is *wanted*, whose data there are, and what the host lacks for the layered one.

    Raises `Unsupported` where data or host rule the choice out, with what to do.
    """
    if wanted == "auto":
        return _choose_for(written, lack)
    back_end = BackEnd(wanted)
    if written is not None and written is not back_end:
        raise Unsupported(
            f"storage.backend is {back_end}, and the home has data of the {written} back end",
            hint=f"set storage.backend to {written}, or start with an empty home and build the templates again",
        )
    if back_end is BackEnd.LAYERED and lack is not None:
        raise Unsupported(f"storage.backend is layered, and this host cannot: {lack}", hint="see aenv doctor")
    return Chosen(back_end, "storage.backend says so")


def open_storage(chosen: Chosen, root: Path, runtime: Path, program: str) -> Storage:
    """Return that back end over *root*, not started; *runtime* and *program* are for the daemon."""
    if chosen.back_end is BackEnd.PLAIN:
        return PlainStorage(root)
    return LayeredStorage(root, runtime, program)


def look(wanted: Literal["auto", "layered", "plain"], root: Path, program: str) -> Chosen:
    """`choose` for this host and the data directory *root*."""
    return choose(wanted, written_by(root), lack_of_layered(program))


def _choose_for(written: BackEnd | None, lack: str | None) -> Chosen:
    if written is BackEnd.PLAIN:
        return Chosen(BackEnd.PLAIN, "the home has data of it; a new home would be layered")
    if written is BackEnd.LAYERED and lack is not None:
        raise Unsupported(f"the home has layered data, and this host cannot serve them: {lack}", hint="see aenv doctor")
    if lack is not None:
        return Chosen(BackEnd.PLAIN, lack)
    return Chosen(BackEnd.LAYERED, "the daemon and /dev/fuse are here")
