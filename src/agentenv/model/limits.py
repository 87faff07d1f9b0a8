"""Bounds that hold on every node, whatever its settings: the one place where they are numbers.

The edge, the settings and the command line refuse by them; a node may be set to less.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Range:
    """What a number may be, ends included, and what it is unless somebody says."""

    low: int
    high: int
    default: int

    def __contains__(self, value: int) -> bool:
        return self.low <= value <= self.high


VCPU_COUNT: Final = Range(1, 32, 1)
MEMORY_MIB: Final = Range(128, 65_536, 512)
DISK_MIB: Final = Range(256, 1 << 20, 4096)
MAX_TIMEOUT_S: Final = 30 * 24 * 3600
MAX_FORKS: Final = 100
MAX_NAME_CHARS: Final = 128
