"""Which back end a server uses: by what is asked for, by whose data there are, and by what the host can."""

import os
from pathlib import Path
from typing import Literal

import pytest

from agentenv.model.errors import Unsupported
from agentenv.storage.choice import choose, lack_of_layered
from agentenv.storage.layout import BackEnd, open_root, written_by

LACK = "no /dev/fuse"


@pytest.mark.parametrize(
    ("wanted", "written", "lack", "expected"),
    [
        ("auto", None, None, BackEnd.LAYERED),
        ("auto", None, LACK, BackEnd.PLAIN),
        ("auto", BackEnd.PLAIN, None, BackEnd.PLAIN),
        ("auto", BackEnd.PLAIN, LACK, BackEnd.PLAIN),
        ("auto", BackEnd.LAYERED, None, BackEnd.LAYERED),
        ("layered", None, None, BackEnd.LAYERED),
        ("layered", BackEnd.LAYERED, None, BackEnd.LAYERED),
        ("plain", None, None, BackEnd.PLAIN),
        ("plain", BackEnd.PLAIN, LACK, BackEnd.PLAIN),
    ],
)
def test_a_back_end_is_chosen(
    wanted: Literal["auto", "layered", "plain"], written: BackEnd | None, lack: str | None, expected: BackEnd
) -> None:
    chosen = choose(wanted, written, lack)
    assert chosen.back_end is expected
    assert chosen.reason


@pytest.mark.parametrize(
    ("wanted", "written", "lack", "said"),
    [
        ("auto", BackEnd.LAYERED, LACK, LACK),
        ("layered", BackEnd.PLAIN, None, "data of the plain"),
        ("plain", BackEnd.LAYERED, None, "data of the layered"),
        ("layered", None, LACK, LACK),
    ],
)
def test_data_are_never_out_of_sight_without_a_word(
    wanted: Literal["auto", "layered", "plain"], written: BackEnd | None, lack: str | None, said: str
) -> None:
    with pytest.raises(Unsupported, match=said) as raised:
        choose(wanted, written, lack)
    assert raised.value.hint


def test_what_a_host_lacks_is_said(tmp_path: Path) -> None:
    program = tmp_path / "storaged"
    program.touch(mode=0o755)
    fuse = tmp_path / "fuse"
    assert "no program" in (lack_of_layered(str(tmp_path / "nowhere")) or "")
    assert "No such file" in (lack_of_layered(str(program), fuse=fuse, uid=0) or "")
    fuse.touch()
    assert lack_of_layered(str(program), fuse=fuse, uid=0) is None
    assert "not root" in (lack_of_layered(str(program), fuse=fuse, uid=1000) or "")


def opened(root: Path, back_end: BackEnd) -> None:
    _, lock = open_root(root, back_end)
    os.close(lock)


def test_a_directory_says_whose_data_it_has(tmp_path: Path) -> None:
    assert written_by(tmp_path / "none") is None
    opened(tmp_path / "layered", BackEnd.LAYERED)
    assert written_by(tmp_path / "layered") is BackEnd.LAYERED
    opened(tmp_path / "plain", BackEnd.PLAIN)
    assert written_by(tmp_path / "plain") is None
    (tmp_path / "plain/layers/one").touch()
    assert written_by(tmp_path / "plain") is BackEnd.PLAIN


def test_a_plain_directory_without_data_becomes_a_layered_one(tmp_path: Path) -> None:
    opened(tmp_path, BackEnd.PLAIN)
    (tmp_path / "zero/4096.memory").touch()
    opened(tmp_path, BackEnd.LAYERED)
    assert {path.name for path in tmp_path.iterdir()} == {"VERSION", "lock", "blobs", "temporary"}


@pytest.mark.parametrize("part", ["layers", "owners", "blobs"])
def test_a_directory_with_data_of_the_other_back_end_is_refused_and_left_alone(tmp_path: Path, part: str) -> None:
    opened(tmp_path, BackEnd.PLAIN)
    (tmp_path / part / "data").touch()
    with pytest.raises(Unsupported, match="plain back end"):
        opened(tmp_path, BackEnd.LAYERED)
    assert (tmp_path / part / "data").exists()
    opened(tmp_path, BackEnd.PLAIN)


def test_the_plain_back_end_refuses_a_layered_directory(tmp_path: Path) -> None:
    opened(tmp_path, BackEnd.LAYERED)
    with pytest.raises(Unsupported, match="layered back end"):
        opened(tmp_path, BackEnd.PLAIN)
