"""Build the lab host, and run a script in it.

python -m tools.lab                    only build what is not up to date
python -m tools.lab SCRIPT [FILE ...]  build, and run SCRIPT (bash) in it, the FILEs beside it; its status is ours
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.lab import host, job
from tools.setup import console
from tools.setup.__main__ import exclusive


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", nargs="?", type=Path)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--limit-s", type=float, default=job.LIMIT_S)
    options = parser.parse_args()
    try:
        with exclusive():
            host.ready()
        if options.script is None:
            return 0
        files = {path.name: path for path in options.files}
        wanted = job.Job(options.script.read_text(), files, limit_s=options.limit_s)
        outcome = job.run(wanted, host.LAB / "last", show=sys.stdout)
    except (console.SetupError, job.LabError) as error:
        console.say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    console.say(f"lab: status {outcome.status} after {outcome.seconds:.0f} s; results in {outcome.results}")
    return outcome.status


if __name__ == "__main__":
    sys.exit(main())
