"""Test programs of the Rust side: built here, run in the lab host, told one by one."""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.capabilities import REPO

_FAILURE = re.compile(
    r"^---- (\S+) stdout ----\n(.*?)(?=^---- \S+ stdout ----$|^failures:$|\Z)", re.MULTILINE | re.DOTALL
)


def build(package: str, *tests: str) -> Mapping[str, Path]:
    """Build test programs, and the programs that they start, statically linked; all by name. Blocks."""
    chosen = [word for test in tests for word in ("--test", test)]
    command = ["cargo", "test", "--no-run", "--locked", "--message-format=json", "--package", package, *chosen]
    done = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, text=True, check=True)
    messages = (json.loads(line) for line in done.stdout.splitlines())
    return {message["target"]["name"]: Path(message["executable"]) for message in messages if message.get("executable")}


def tests_for(reason: str, package: str, test: str) -> Sequence[str]:
    """The tests that are ignored elsewhere with *reason*; their names are read from the source."""
    source = (REPO / "crates" / package / "tests" / f"{test}.rs").read_text()
    wanted = rf'#\[ignore = "{re.escape(reason)}"\]\s*fn (\w+)'
    names: list[str] = re.findall(wanted, source)
    return names


def verdicts(log: str, said: str) -> Mapping[str, str | None]:
    """What became of each test that ended: None, or what a failed one said.

    *log* is what ``--logfile`` wrote: one line for each, with nothing between.
    """
    failures = dict(_FAILURE.findall(said))
    ended = (line.partition(" ") for line in log.splitlines())
    return {name: None if word == "ok" else failures.get(name, "it failed without a word") for word, _, name in ended}
