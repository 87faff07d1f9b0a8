"""The ublk front end on a kernel that has it: one boot of the lab host runs the Rust tests, told one by one."""

import sys
from collections.abc import Mapping

import pytest

from tests.lab import rust
from tools.lab import host, job

PROGRAMS = ("ublk", "ublk_daemon")
TESTS = [
    (program, name) for program in PROGRAMS for name in rust.tests_for("needs ublk: make lab", "storaged", program)
]
COMMAND = """\
export RUST_BACKTRACE=1
for program in {programs}; do
    log=/mnt/results/$program.log said=/mnt/results/$program.txt
    ./$program --ignored --test-threads=1 --logfile $log 2>&1 | tee $said
done
"""


@pytest.fixture(scope="module")
def verdicts() -> Mapping[str, str | None]:
    host.ready()
    files = rust.build("storaged", *PROGRAMS)
    wanted = job.Job(COMMAND.format(programs=" ".join(PROGRAMS)), files)
    results = job.run(wanted, host.LAB / "ublk", show=sys.stdout).results
    told: dict[str, str | None] = {}
    for program in PROGRAMS:
        log, said = ((results / f"{program}.{end}").read_text(errors="replace") for end in ("log", "txt"))
        told |= {f"{program}::{name}": verdict for name, verdict in rust.verdicts(log, said).items()}
    return told


@pytest.mark.slow
@pytest.mark.needs("lab", "root", "qemu")
@pytest.mark.parametrize(("program", "name"), TESTS)
def test_in_the_lab(program: str, name: str, verdicts: Mapping[str, str | None]) -> None:
    told = f"{program}::{name}"
    assert told in verdicts, "it did not end: see the console"
    assert verdicts[told] is None, verdicts[told]


def test_the_suite_is_not_empty() -> None:
    assert {program for program, _ in TESTS} == set(PROGRAMS)
