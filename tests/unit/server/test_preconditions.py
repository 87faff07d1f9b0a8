"""A server that cannot work says why in a sentence, before it has made anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.doctor import CAPABILITIES, Places
from agentenv.model.errors import Invalid, Unsupported
from agentenv.preconditions import require_privileges, writable_directory

ALL = sum(1 << bit for bit in CAPABILITIES.values())


def host(root: Path, capabilities: int) -> Places:
    (root / "self").mkdir()
    (root / "self/status").write_text(f"CapEff:\t{capabilities:016x}\n")
    return Places(home=root, guest_dir=root, qemu="", proc=root)


def test_a_user_without_capabilities_is_told_to_be_root(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="CAP_NET_ADMIN") as refused:
        require_privileges(host(tmp_path, 0), user=1000)

    assert refused.value.hint == "run the server as root"


@pytest.mark.parametrize(("capabilities", "user"), [(ALL, 1000), (ALL, 0), (0, 0)])
def test_who_may_work_goes_on(tmp_path: Path, capabilities: int, user: int) -> None:
    require_privileges(host(tmp_path, capabilities), user=user)


def test_a_directory_is_made_with_its_parents_and_may_be_there(tmp_path: Path) -> None:
    for _ in range(2):
        writable_directory(tmp_path / "a/b", setting="paths.home")

    assert (tmp_path / "a/b").is_dir()


@pytest.mark.parametrize("below", ["", "/x"])
def test_a_file_in_the_way_is_named_with_the_setting(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(Invalid, match=str(tmp_path / "file")) as refused:
        writable_directory(Path(f"{tmp_path}/file{below}"), setting="paths.home")

    assert "paths.home" in str(refused.value.hint)


def test_a_directory_that_cannot_be_written_in_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda _path, mode: not mode & os.W_OK)  # root may write everywhere

    with pytest.raises(Invalid, match=f"{tmp_path} cannot be written in"):
        writable_directory(tmp_path, setting="paths.runtime")


@pytest.mark.slow
def test_without_a_guest_image_the_server_says_how_to_get_one_and_leaves_nothing(tmp_path: Path) -> None:
    home, runtime = tmp_path / "home", tmp_path / "run"

    done = subprocess.run(
        [sys.executable, "-m", "agentenv.cli", "server", "--home", str(home)],
        env={**os.environ, "AENV_PATHS_RUNTIME": str(runtime), "AENV_GUEST_IMAGE_DIR": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    if os.geteuid() == 0:
        assert f"no guest image was built in {tmp_path / 'none'}" in done.stderr
        assert "AENV_GUEST_IMAGE_DIR" in done.stderr
    assert not home.exists()
    assert not runtime.exists()
