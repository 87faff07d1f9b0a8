"""Make this machine and this clone ready: Debian packages, Python environment, guest agent, guest image, base root.

    python3 -m tools.setup [--for check|test|demo] [STEP ...]

Nothing is done twice: what is up to date is left alone, and a second run takes a
second and fetches nothing. Two runs at once wait for each other.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
import time
from typing import IO

MIN_PYTHON = (3, 11)


def main() -> int:
    if sys.version_info < MIN_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        sys.stderr.write(
            f"error: Python {found} is too old, 3.11 or newer is needed\n"
            "hint: if one is installed under another name: make PYTHON=python3.11 ...\n"
        )
        return 1
    # Imported only now: an older Python could not even read these.
    from tools.setup import console, host, steps  # noqa: PLC0415

    names = ["packages", *(step.name for step in steps.STEPS)]
    parser = argparse.ArgumentParser(
        prog="setup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--for", dest="purpose", choices=("check", "test", "demo"), default="test", help="what comes next"
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"only these: {', '.join(names)}")
    options = parser.parse_args()
    if unknown := set(options.steps) - set(names):
        parser.error(f"unknown step: {', '.join(sorted(unknown))}")
    wanted = options.steps or (names[:2] if options.purpose == "check" else names)
    started = time.monotonic()
    try:
        with exclusive():
            console.say("set-up:")
            for note in host.check(options.purpose):
                console.say(f"  note: {note}")
            if "packages" in wanted:
                steps.install_packages()
            for step in steps.STEPS:
                if step.name in wanted:
                    step.bring_up_to_date()
    except console.SetupError as error:
        console.say(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""))
        return 1
    except KeyboardInterrupt:
        console.say("stopped; the next run goes on from here")
        return 130
    console.say(f"set-up: done in {time.monotonic() - started:.1f} s")
    return 0


def exclusive() -> IO[str]:
    """Hold the lock of set-up in this clone for as long as the returned file is open."""
    from tools.setup import console, steps  # noqa: PLC0415

    steps.CACHE.mkdir(exist_ok=True)
    lock = (steps.CACHE / "setup.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        console.say("another set-up is running in this clone; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


if __name__ == "__main__":
    sys.exit(main())
