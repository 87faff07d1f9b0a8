"""Samples to rows, rows to a table and to JSON.

A row stands beside its floor: a limit or a peer measured in the same run, because
machines differ and are shared, and a ratio travels where a time does not.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``floor`` is in the same unit; ``target`` says in words what is to be reached."""

    group: str
    name: str
    n: int
    unit: str
    p50: float
    p95: float
    p99: float
    max: float
    floor: float | None
    ratio: float | None
    target: str
    ok: bool


def percentile(samples: Sequence[float], q: float) -> float:
    """The nearest-rank percentile; *q* in 0..100."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(q / 100 * len(ordered)) - 1)]


def row(
    group: str,
    name: str,
    samples: Sequence[float],
    *,
    unit: str = "ms",
    floor: float | None = None,
    target: str,
    ok: bool,
) -> Row:
    """A row of *samples*; a bench without samples is a failed bench."""
    if not samples:
        raise SystemExit(f"{group}/{name}: nothing was measured")
    p50 = percentile(samples, 50)
    return Row(
        group=group,
        name=name,
        n=len(samples),
        unit=unit,
        p50=round(p50, 3),
        p95=round(percentile(samples, 95), 3),
        p99=round(percentile(samples, 99), 3),
        max=round(max(samples), 3),
        floor=None if floor is None else round(floor, 3),
        ratio=None if not floor else round(p50 / floor, 3),
        target=target,
        ok=ok,
    )


def write(rows: Sequence[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(r) for r in rows], indent=2) + "\n")


def show(rows: Sequence[Row]) -> None:
    head = ("group", "name", "n", "unit", "p50", "p95", "p99", "max", "floor", "ratio", "target", "ok")
    table = [head, *(tuple(_cell(getattr(r, column)) for column in head) for r in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    for line in table:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n")


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "NO"
        case float():
            return f"{value:.4g}" if value < 1000 else f"{value:.0f}"
        case _:
            return str(value)
