"""What must be so before a server touches anything; where it is not, one sentence says so and nothing was made.

Only what makes every later step fail in words that help nobody: the rest of what a
host may lack is said where it is needed, and all of it by `aenv doctor`.
"""

import os
from pathlib import Path

from agentenv.doctor import Places, privileges
from agentenv.model.errors import Invalid, Unsupported


def require_privileges(places: Places, *, user: int) -> None:
    """Raise `Unsupported` for a *user* other than root who cannot make network slots.

    Root in a container may lack one that this host's work does not need: it may try.
    """
    found = privileges(places)
    if user != 0 and found.ok is False:
        raise Unsupported(f"the server lacks privileges: {found.detail}", hint=found.hint)


def writable_directory(path: Path, *, setting: str) -> None:
    """Make *path*, parents and all, unless it is there. Blocks for a moment.

    Raises `Invalid`, naming the *setting* it comes from, where it cannot be made or written in.
    """
    hint = f"set {setting} to a directory that the server may write in"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o755)
    except FileExistsError:
        raise Invalid(f"{path} is no directory", hint=hint) from None
    except OSError as error:
        raise Invalid(f"{path} cannot be made: {error.strerror}", hint=hint) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise Invalid(f"{path} cannot be written in", hint=hint)
