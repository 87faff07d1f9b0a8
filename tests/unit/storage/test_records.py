"""Records of owners survive, and damaged ones stop nothing."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.model.ids import LayerId
from agentenv.model.snapshot import Stack
from agentenv.storage.layout import LayerKind, Layout, new_layer_id, open_root
from agentenv.storage.records import DiskRecord, OwnerRecord, decode, encode, load_records, remove_record, save_record

RAW, UPPER, NEXT = (
    LayerId(f"{digit * 32}.{kind}") for digit, kind in (("0", "memory"), ("1", "qcow2"), ("2", "qcow2"))
)
FULL = OwnerRecord("one", DiskRecord(1 << 30, UPPER, NEXT), Stack((RAW, LayerId("3" * 32 + ".delta")), 1 << 29))

layer_ids = st.sampled_from(LayerKind).map(new_layer_id)
sizes = st.integers(1, 1 << 60)
records = st.builds(
    OwnerRecord,
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True),
    st.none() | st.builds(DiskRecord, sizes, layer_ids, st.none() | layer_ids),
    st.none() | st.builds(Stack, st.lists(layer_ids, max_size=2).map(tuple), sizes),
)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout, lock = open_root(tmp_path)
    os.close(lock)
    return layout


@given(records)
def test_a_record_comes_back_as_it_was(record: OwnerRecord) -> None:
    assert decode(encode(record)) == record


def test_records_are_found_again(layout: Layout) -> None:
    other = OwnerRecord("two.json", None, Stack((), 4096))
    for record in (FULL, other):
        save_record(layout, record, over_durable=False)
    save_record(layout, FULL, over_durable=True)
    loaded = load_records(layout)
    assert loaded.records == {"one": FULL, "two.json": other}
    assert loaded.broken == ()
    assert list(layout.temporary.iterdir()) == []


def test_an_empty_record_is_no_record(layout: Layout) -> None:
    save_record(layout, FULL, over_durable=False)
    save_record(layout, OwnerRecord("one"), over_durable=True)
    assert load_records(layout).records == {}
    save_record(layout, OwnerRecord("one"), over_durable=True)


def changed(**changes: object) -> str:
    return json.dumps(json.loads(encode(FULL)) | changes)


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "null", "7", '"text"', "{}", "[" * 60_000, "\xff", " " * 70_000,
        changed(version=2), changed(version=None), changed(owner="two"), changed(owner=None),
        changed(disk=7), changed(disk=[]), changed(disk={}), changed(disk="x"),
        changed(disk={"size_bytes": 1, "upper": "../../etc/passwd", "next": None}),
        changed(disk={"size_bytes": 1, "upper": 7, "next": None}),
        changed(disk={"size_bytes": 0, "upper": UPPER, "next": None}),
        changed(disk={"size_bytes": True, "upper": UPPER, "next": None}),
        changed(disk={"size_bytes": "1", "upper": UPPER, "next": None}),
        changed(disk={"size_bytes": 1, "upper": UPPER, "next": "x"}),
        changed(memory={"size_bytes": 1}), changed(memory={"size_bytes": 1, "layers": 7}),
        changed(memory={"size_bytes": 1, "layers": ["x"]}), changed(memory=[1]),
    ],
)  # fmt: skip
def test_a_damaged_record_is_set_aside_and_the_others_are_read(
    layout: Layout, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_record(layout, OwnerRecord("good", None, Stack((), 4096)), over_durable=False)
    (layout.owners / "one.json").write_text(text, encoding="latin-1")
    loaded = load_records(layout)
    assert set(loaded.records) == {"good"}
    assert loaded.broken == ("one.json.broken",)
    assert (layout.owners / "one.json.broken").read_text(encoding="latin-1") == text
    assert "one.json" in caplog.text
    assert load_records(layout).broken == ("one.json.broken",)


@pytest.mark.parametrize("content", [b"", bytes(300)])
def test_a_record_whose_content_never_reached_the_disk_is_no_record(layout: Layout, content: bytes) -> None:
    (layout.owners / "one.json").write_bytes(content)
    loaded = load_records(layout)
    assert (loaded.records, loaded.broken) == ({}, ())
    assert not (layout.owners / "one.json").exists()


def test_what_is_no_file_is_set_aside(layout: Layout) -> None:
    (layout.owners / "one.json").mkdir()
    assert load_records(layout).broken == ("one.json.broken",)


def test_strange_names_are_left_alone(layout: Layout) -> None:
    (layout.owners / "README").write_text("x")
    assert load_records(layout).records == {}
    assert (layout.owners / "README").exists()


def test_forgetting_an_owner_forgets_its_damaged_record(layout: Layout) -> None:
    (layout.owners / "one.json").write_text("{")
    load_records(layout)
    remove_record(layout, "one")
    assert list(layout.owners.iterdir()) == []
