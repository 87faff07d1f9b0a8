"""The ublk front end on a kernel that has it: one boot of the lab host runs the Rust tests, told one by one."""

import sys
from collections.abc import Mapping

import pytest

from tests.lab import rust
from tools.lab import host, job

TESTS = rust.tests_for("needs ublk: make lab", "storaged", "ublk")
COMMAND = """\
export RUST_BACKTRACE=1
./ublk --ignored --test-threads=1 --logfile /mnt/results/ublk.log 2>&1 | tee /mnt/results/ublk.txt
"""


@pytest.fixture(scope="module")
def verdicts() -> Mapping[str, str | None]:
    host.ready()
    program = rust.build("storaged", "ublk")
    outcome = job.run(job.Job(COMMAND, {"ublk": program}), host.LAB / "ublk", show=sys.stdout)
    log, said = ((outcome.results / name).read_text(errors="replace") for name in ("ublk.log", "ublk.txt"))
    return rust.verdicts(log, said)


@pytest.mark.slow
@pytest.mark.needs("lab", "root", "qemu")
@pytest.mark.parametrize("name", TESTS)
def test_in_the_lab(name: str, verdicts: Mapping[str, str | None]) -> None:
    assert name in verdicts, "it did not end: see the console"
    assert verdicts[name] is None, verdicts[name]


def test_the_suite_is_not_empty() -> None:
    assert len(TESTS) > 10
