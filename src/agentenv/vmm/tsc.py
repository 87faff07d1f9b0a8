"""How fast the time stamp counter of this machine runs.

Under software emulation a guest reads the host's counter. Left alone, a guest
kernel measures its speed against an emulated timer chip, which fails whenever the
host is busy, and a kernel of ours that has failed hangs: without a known counter it
waits for timer ticks that this machine type does not deliver. So it is told.
"""

import ctypes
import mmap
import platform
import time
from functools import cache
from typing import Final

from agentenv.model.errors import Unsupported

_READ_COUNTER: Final = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; rdx <<= 32; rax |= rdx; ret
_MEASURE_S: Final = 0.02
_TRIES: Final = 20
_PLAUSIBLE_KHZ: Final = range(100_000, 20_000_000)


@cache
def tsc_khz() -> int:
    """Return the speed in kHz, measured once to about one part in 10^5. Takes 20 ms the first time: blocks.

    Raises `Unsupported` where the counter cannot be read.
    """
    if platform.machine() != "x86_64":
        raise Unsupported(f"no time stamp counter on {platform.machine()}", hint="use an x86-64 machine")
    try:
        code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError as error:
        raise Unsupported(
            f"cannot map a page of code to read the time stamp counter: {error.strerror}",
            hint="a security policy forbids executable anonymous memory; QEMU's emulation needs it too",
        ) from error
    code.write(_READ_COUNTER)
    anchor = ctypes.c_char.from_buffer(code)
    try:
        read_counter = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(anchor))
        first_ns, first = _sample(read_counter)
        time.sleep(_MEASURE_S)
        last_ns, last = _sample(read_counter)
    finally:
        del anchor
        code.close()
    khz = round((last - first) * 1e6 / (last_ns - first_ns))
    if khz not in _PLAUSIBLE_KHZ:
        raise Unsupported(f"the time stamp counter runs at {khz} kHz, which cannot be")
    return khz


def _sample(read_counter: "ctypes._CFunctionType") -> tuple[int, int]:
    """Return one instant as (nanoseconds, counter): of several tries the one least disturbed."""
    best_width = best_ns = best_count = -1
    for _ in range(_TRIES):
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        count = read_counter()
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        if best_width < 0 or after - before < best_width:
            best_width, best_ns, best_count = after - before, (before + after) // 2, count
    return best_ns, best_count
