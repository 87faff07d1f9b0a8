"""The rule about skips, on small test files of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.capabilities import REPO

LACKING = "import pytest\n\n@pytest.mark.needs('{}')\ndef test_it(): pass\n"


def run(folder: Path, source: str, **environ: str) -> tuple[int, str]:
    (folder / "test_inner.py").write_text(source)
    clean = {name: value for name, value in os.environ.items() if name not in ("AENV_REQUIRE", "PYTEST_ADDOPTS")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider",
         "--rootdir", str(folder),
         "-c", str(REPO / "pyproject.toml"), str(folder / "test_inner.py")],
        cwd=REPO, env={**clean, **environ}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_skip_for_no_named_lack_is_a_failure(tmp_path: Path) -> None:
    status, said = run(tmp_path, "import pytest\n\ndef test_it(): pytest.skip('not today')\n")

    assert status == 1
    assert "nothing it named is missing" in said


@pytest.mark.slow
def test_a_lack_is_skipped_counted_and_listed(tmp_path: Path) -> None:
    status, said = run(tmp_path, LACKING.format("guest"), AENV_GUEST_DIR=str(tmp_path / "nowhere"))

    assert status == 0
    assert "1 skipped" in said
    assert "skipped for want of" in said
    assert "no guest image" in said


@pytest.mark.slow
def test_a_lack_that_is_demanded_is_a_failure(tmp_path: Path) -> None:
    lacking = {"AENV_GUEST_DIR": str(tmp_path / "nowhere"), "AENV_REQUIRE": "root, guest"}
    status, said = run(tmp_path, LACKING.format("guest"), **lacking)

    assert status == 1
    assert "AENV_REQUIRE" in said


@pytest.mark.slow
def test_an_unknown_capability_is_a_failure(tmp_path: Path) -> None:
    assert run(tmp_path, LACKING.format("magic"))[0] == 1
    assert run(tmp_path, "def test_it(): pass\n", AENV_REQUIRE="magic")[0] != 0
