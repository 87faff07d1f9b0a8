"""`make bench [ONLY=group]`: run the groups, print a table, write bench/out/latest.json.

A group that cannot run fails the run; a missed target is printed as such, and the
exit code tells it with --strict.
"""

import argparse
import importlib
import sys
from pathlib import Path

from bench.report import Row, show, write

GROUPS = ("node",)
OUT = Path(__file__).parent / "out/latest.json"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--only", choices=GROUPS, help="one group")
    parser.add_argument("--strict", action="store_true", help="fail on a missed target")
    options = parser.parse_args()
    rows: list[Row] = []
    OUT.unlink(missing_ok=True)  # a run that fails leaves no figures of an older one
    for group in [options.only] if options.only else GROUPS:
        print(f"bench: {group}", file=sys.stderr, flush=True)
        rows += importlib.import_module(f"bench.{group}").run()
        write(rows, OUT)
    show(rows)
    missed = [r.name for r in rows if not r.ok]
    print(f"{len(rows)} figures, {len(missed)} missed", *missed, sep="\n  ")
    return 1 if missed and options.strict else 0


if __name__ == "__main__":
    sys.exit(main())
