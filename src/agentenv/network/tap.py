"""The tap device that a VMM attaches to: made ahead and persistent, so that rules and routes are ready before it."""

import errno
import fcntl
import os
import struct
from typing import Final

from agentenv.model.errors import Unsupported

DEVICE: Final = "/dev/net/tun"

_TUNSETIFF: Final = 0x4004_54CA
_TUNSETPERSIST: Final = 0x4004_54CB
# Frames without a packet header, with the virtio header that VMMs offload through.
_FLAGS: Final = 0x0002 | 0x1000 | 0x4000


def make_tap(name: str) -> None:
    """Make the tap *name* in the calling thread's namespace. Raises `OSError`."""
    descriptor = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _FLAGS))
        fcntl.ioctl(descriptor, _TUNSETPERSIST, 1)
    finally:
        os.close(descriptor)


def check_tap_device() -> None:
    """Raises `Unsupported` where no tap can be made."""
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        missing = error.errno in {errno.ENOENT, errno.ENODEV, errno.ENXIO}
        raise Unsupported(
            f"{DEVICE} cannot be opened: {os.strerror(error.errno or 0)}",
            hint="load the kernel module: modprobe tun" if missing else "give the server access to the device",
        ) from error
