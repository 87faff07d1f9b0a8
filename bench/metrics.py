"""Read figures from where the server and the kernel publish them."""

import os
import re
import urllib.request
from pathlib import Path

from tests.server import Server


def stopped(server: Server, operation: str) -> tuple[int, float]:
    """How often *operation* has stopped a guest so far, and for how many milliseconds in all."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    name, labels = "agentenv_guest_stopped_seconds", re.escape(f'{{operation="{operation}"}}')
    found = {
        kind: float(match.group(1))
        for kind in ("count", "sum")
        if (match := re.search(rf"^{name}_{kind}{labels} (\S+)$", text, re.MULTILINE))
    }
    return int(found.get("count", 0)), 1000 * found.get("sum", 0.0)


def stopped_ms(server: Server, operation: str, before: tuple[int, float]) -> float:
    """For how long the one *operation* since *before* stopped its guest. A bench that cannot tell ends here."""
    count, total_ms = stopped(server, operation)
    if count != before[0] + 1:
        raise SystemExit(f"{operation}: the server counted {count - before[0]} stops instead of one")
    return total_ms - before[1]


def process_cpu_s(pid: int) -> float:
    """User and system time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def smaps_rollup_kib(pid: int) -> dict[str, int]:
    """Memory of a process by kind, in KiB."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        found[name] = int(value.split()[0])
    return found
