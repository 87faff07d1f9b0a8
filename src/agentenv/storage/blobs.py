"""Opaque immutable files, and how full their file system is: the same with every back end. All calls block."""

import os
import stat
from pathlib import Path

from agentenv.model.errors import Invalid
from agentenv.model.ids import BlobId
from agentenv.storage.contract import Usage
from agentenv.storage.files import Check, take
from agentenv.storage.layout import Layout


def put_blob(layout: Layout, source: Path, blob: BlobId, check: Check) -> None:
    """Make the file *source* the durable blob *blob*: moved, or copied where it must be. `Invalid` if no file."""
    if not stat.S_ISREG(source.lstat().st_mode):
        raise Invalid(f"{source.name} is not a file")
    take(source, layout.blob(blob), layout.new_temporary(), check)


def usage_of(root: Path) -> Usage:
    """Of the file system of *root*, as it reports itself."""
    status = os.statvfs(root)
    used = (status.f_blocks - status.f_bfree) * status.f_frsize
    free = status.f_bavail * status.f_frsize
    return Usage(used, free, used + free)
