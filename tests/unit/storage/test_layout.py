"""One process, one directory, one layout."""

import multiprocessing
import os
from pathlib import Path

import pytest

from agentenv.model.errors import Bug, Conflict, Invalid, NotFound, Unsupported
from agentenv.model.ids import BlobId, LayerId
from agentenv.storage.layout import Layout, layer_kind, open_root


def opened(root: Path) -> Layout:
    layout, lock = open_root(root)
    os.close(lock)
    return layout


def test_a_new_directory_gets_the_layout(tmp_path: Path) -> None:
    layout = opened(tmp_path / "a/b")
    assert (tmp_path / "a/b/VERSION").read_text() == "1\n"
    assert {path.name for path in layout.root.iterdir()} == {
        "VERSION", "lock", "layers", "blobs", "owners", "zero", "temporary",
    }  # fmt: skip
    opened(tmp_path / "a/b")


def test_a_fresh_file_system_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    opened(tmp_path)


def test_the_root_is_absolute_and_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    assert opened(Path("link")).root == (tmp_path / "real").resolve()


def test_what_was_in_the_making_is_removed(tmp_path: Path) -> None:
    layout = opened(tmp_path)
    (layout.temporary / "half").write_bytes(b"x")
    (layout.temporary / "tree/deep").mkdir(parents=True)
    opened(tmp_path)
    assert list(layout.temporary.iterdir()) == []


def test_a_directory_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    (tmp_path / "temporary/mine").write_text("mine")
    with pytest.raises(Invalid):
        open_root(tmp_path)
    assert (tmp_path / "temporary/mine").read_text() == "mine"


@pytest.mark.parametrize("text", ["2", "99\n", "1000000"])
def test_a_newer_layout_is_unsupported_and_left_alone(tmp_path: Path, text: str) -> None:
    layout = opened(tmp_path)
    (tmp_path / "VERSION").write_text(text)
    (layout.temporary / "half").write_bytes(b"x")
    with pytest.raises(Unsupported):
        open_root(tmp_path)
    assert (layout.temporary / "half").exists()


@pytest.mark.parametrize("content", [b"", b"one", b"-1", b"1.5", b"\xff\xfe", "²".encode()])
def test_a_damaged_version_is_a_bug(tmp_path: Path, content: bytes) -> None:
    opened(tmp_path)
    (tmp_path / "VERSION").write_bytes(content)
    with pytest.raises(Bug):
        open_root(tmp_path)


@pytest.mark.slow
def test_a_second_process_is_told_that_there_is_a_first(tmp_path: Path) -> None:
    _, lock = open_root(tmp_path)
    outcomes: multiprocessing.Queue[str] = multiprocessing.get_context("spawn").Queue()
    try:
        assert _in_another_process(tmp_path, outcomes) == "Conflict"
        with pytest.raises(Conflict):
            open_root(tmp_path)
    finally:
        os.close(lock)
    assert _in_another_process(tmp_path, outcomes) == "opened"


def _in_another_process(root: Path, outcomes: "multiprocessing.Queue[str]") -> str:
    process = multiprocessing.get_context("spawn").Process(target=_try_to_open, args=(root, outcomes))
    process.start()
    outcome = outcomes.get(timeout=60)
    process.join()
    return outcome


def _try_to_open(root: Path, outcomes: "multiprocessing.Queue[str]") -> None:
    try:
        opened(root)
    except Conflict:
        outcomes.put("Conflict")
    else:
        outcomes.put("opened")


@pytest.mark.parametrize(
    "name",
    ["", "x.raw", "../" + "0" * 29 + ".raw", "0" * 32, "0" * 32 + ".exe", "0" * 32 + ".raw\n", "A" * 32 + ".raw"],
)
def test_no_name_leads_out_of_the_directory(tmp_path: Path, name: str) -> None:
    layout = Layout(tmp_path)
    with pytest.raises(NotFound):
        layer_kind(name)
    with pytest.raises(NotFound):
        layout.layer(LayerId(name))
    with pytest.raises(NotFound):
        layout.blob(BlobId(name))
