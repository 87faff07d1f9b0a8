"""Set-up: nothing is done twice, a failure leaves no stamp, and what is missing is named."""

import os
import platform
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.setup import console, host, steps
from tools.setup.console import SetupError
from tools.setup.steps import Step


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(steps, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").write_bytes(b"1")
    return tmp_path / "source"


@pytest.fixture
def built(tmp_path: Path) -> Path:
    return tmp_path / "built"


def step(source: Path, built: Path, build: Callable[[], None] | None = None) -> Step:
    def count() -> None:
        built.write_text(f"{int(built.read_text()) + 1 if built.exists() else 1}")

    return Step("thing", lambda: [source.read_bytes()], (built,), build or count)


def test_what_is_up_to_date_is_left_alone(source: Path, built: Path) -> None:
    for _ in range(3):
        step(source, built).bring_up_to_date()

    assert built.read_text() == "1"


def test_it_is_done_again_when_what_went_into_it_changes(source: Path, built: Path) -> None:
    step(source, built).bring_up_to_date()
    source.write_bytes(b"2")
    step(source, built).bring_up_to_date()

    assert built.read_text() == "2"


def test_it_is_done_again_when_the_result_is_gone(source: Path, built: Path) -> None:
    step(source, built).bring_up_to_date()
    built.unlink()
    step(source, built).bring_up_to_date()

    assert built.read_text() == "1"


def test_a_failure_leaves_no_stamp_even_over_an_older_success(source: Path, built: Path) -> None:
    step(source, built).bring_up_to_date()
    source.write_bytes(b"2")

    def fail() -> None:
        raise SetupError("no")

    with pytest.raises(SetupError):
        step(source, built, fail).bring_up_to_date()
    source.write_bytes(b"1")

    assert not step(source, built).is_current()


@pytest.mark.parametrize(
    ("line", "unreachable"),
    [
        ("  Temporary failure resolving 'mirror'", True),
        ("error: failed to download from the registry", True),
        ("NewConnectionError: Failed to establish a new connection: [Errno 111] Connection refused", True),
        ("[6] Could not resolve hostname (Could not resolve host)", True),
        ("error[E0425]: cannot find value `x` in this scope", False),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", False),
    ],
)
def test_an_unreachable_registry_is_told_from_other_failures(tmp_path: Path, line: str, unreachable: bool) -> None:
    log = tmp_path / "log"

    with pytest.raises(SetupError) as caught:
        console.run("the thing", "PyPI", ["sh", "-c", f"echo {line!r}; exit 3".replace("`", "")], log, cwd=tmp_path)

    assert ("cannot be reached" in str(caught.value)) is unreachable
    assert caught.value.hint
    assert line.split(maxsplit=1)[0] in str(caught.value), "the last lines are shown"


def test_an_interrupted_command_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grandchild = -1

    def interrupt(child: subprocess.Popen[bytes], *_: object) -> None:
        nonlocal grandchild
        pidfile = tmp_path / "pid"
        while not pidfile.exists() or not pidfile.read_text().endswith("\n"):
            assert child.poll() is None
        grandchild = os.pidfd_open(int(pidfile.read_text()))
        raise KeyboardInterrupt

    monkeypatch.setattr(console, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        console.run("it", "none", ["sh", "-c", "sleep 1000 & echo $! > pid; wait"], tmp_path / "log", cwd=tmp_path)

    ended, _, _ = select.select([grandchild], [], [], 60)
    os.close(grandchild)
    assert ended


def test_everything_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(SetupError) as caught:
        host.check("demo")

    for part in ("aarch64", "no cargo", "not root"):
        assert part in str(caught.value)


def test_checks_need_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_cargo_trouble", list)
    monkeypatch.setattr(host, "_sandbox_trouble", lambda: ["not root", "no tun"])

    assert host.check("check") == []
    assert host.check("test") == ["not root", "no tun"]
    with pytest.raises(SetupError):
        host.check("demo")


def test_an_old_cargo_is_refused_by_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cargo = tmp_path / "cargo"
    cargo.write_text("#!/bin/sh\necho 'cargo 1.63.0 (fd9c4297c 2022-07-01)'\n")
    cargo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    assert any("1.63.0 is too old" in line for line in host._cargo_trouble())


def test_without_root_the_packages_to_install_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "missing_packages", lambda: ["gcc", "zstd"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(SetupError, match="gcc zstd") as caught:
        steps.install_packages()
    assert caught.value.hint is not None
    assert "sudo apt-get install gcc zstd" in caught.value.hint


@pytest.mark.slow
def test_two_runs_at_once_wait_for_each_other(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from tools.setup import steps, __main__ as m\n"
        f"steps.CACHE = pathlib.Path({str(tmp_path)!r})\n"
        "with m.exclusive():\n"
        f"    inside = steps.CACHE / 'inside'\n"
        "    inside.touch(exist_ok=False)\n"
        "    [None for _ in range(2_000_000)]\n"
        "    inside.unlink()\n"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", program], cwd=host.ROOT, stderr=subprocess.DEVNULL) for _ in range(4)
    ]

    assert [run.wait(120) for run in runs] == [0, 0, 0, 0]
