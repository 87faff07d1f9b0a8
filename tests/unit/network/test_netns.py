"""Namespaces that are kept under a name."""

import os
from pathlib import Path

import pytest

from agentenv.network import netns
from tests.unit.network.lab import within

pytestmark = pytest.mark.needs("root", "netns")


def inode(path: str = "/proc/thread-self/ns/net") -> int:
    return Path(path).stat().st_ino


def keep_a_new_one(path: Path) -> int:
    home = netns.own_namespace()

    def make() -> int:
        netns.unshare()
        netns.keep(path)
        return inode()

    try:
        return within(home, make)
    finally:
        os.close(home)


def test_a_kept_namespace_can_be_entered_until_it_is_removed(tmp_path: Path) -> None:
    path, home = tmp_path / "one", inode()
    made = keep_a_new_one(path)

    assert netns.is_kept(path)
    with netns.inside(path):
        assert inode() == made
    assert inode() == home != made

    netns.remove(path)
    netns.remove(path)
    assert not path.exists()
    with pytest.raises(FileNotFoundError), netns.inside(path):
        pass
    assert inode() == home


def test_what_is_there_is_not_covered(tmp_path: Path) -> None:
    path = tmp_path / "one"
    made = keep_a_new_one(path)

    with pytest.raises(FileExistsError):
        keep_a_new_one(path)

    assert inode(str(path)) == made
    netns.remove(path)


def test_a_mere_file_is_not_a_namespace(tmp_path: Path) -> None:
    path, home = tmp_path / "one", inode()
    path.write_text("left by a crash")

    assert not netns.is_kept(path)
    with pytest.raises(OSError, match="setns"), netns.inside(path):
        pass
    assert inode() == home
    assert not netns.is_kept(tmp_path / "none")
    netns.remove(path)
    assert not path.exists()


def test_an_error_inside_leads_home(tmp_path: Path) -> None:
    path, home = tmp_path / "one", inode()
    keep_a_new_one(path)

    with pytest.raises(ZeroDivisionError), netns.inside(path):
        1 // 0  # noqa: B018
    assert inode() == home
    netns.remove(path)
