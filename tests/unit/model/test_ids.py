"""Ids have one spelling each; names never climb out of anything."""

import uuid
from pathlib import PurePosixPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentenv.model.errors import Invalid, NotFound
from agentenv.model.ids import new_sandbox_id, new_snapshot_id, parse_name, parse_sandbox_id


def test_a_new_id_is_read_back_as_itself() -> None:
    made = new_sandbox_id()
    assert parse_sandbox_id(made) == made
    assert len({new_sandbox_id() for _ in range(1000)} | {str(new_snapshot_id()) for _ in range(1000)}) == 2000


@given(st.uuids())
def test_every_uuid_is_an_id_in_its_canonical_spelling_only(value: uuid.UUID) -> None:
    text = str(value)
    assert parse_sandbox_id(text) == text
    for other in (text.replace("-", ""), f"{{{text}}}", f"urn:uuid:{text}", f" {text}", f"{text}\n"):
        with pytest.raises(NotFound):
            parse_sandbox_id(other)
    if text.upper() != text:
        with pytest.raises(NotFound):
            parse_sandbox_id(text.upper())


@given(st.text(max_size=60))
@example("")
@example("../../etc/passwd")
@example("\u0661" * 36)
@example("00000000\u200b-0000-0000-0000-000000000000")
def test_whatever_else_is_asked_for_does_not_exist(text: str) -> None:
    with pytest.raises(NotFound, match=r"^no such sandbox$"):
        parse_sandbox_id(text)


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True))
def test_a_name_is_read_back_as_itself(text: str) -> None:
    assert parse_name(text) == text


@given(st.text(max_size=140))
@example("..")
@example(".hidden")
@example("a/b")
@example("a\\b")
@example("a\x00")
@example("a\n")
@example("-rf")
@example("a:b")
@example("a" * 129)
@example("\u0430")
def test_a_name_never_climbs(text: str) -> None:
    try:
        name = parse_name(text)
    except Invalid:
        return
    path = PurePosixPath("/names") / name
    assert path.parent == PurePosixPath("/names")
    assert path.name == name
    assert name.isascii()
    assert name.isprintable()
    assert 1 <= len(name) <= 128


def test_a_refused_name_is_shown_shortened_and_escaped() -> None:
    with pytest.raises(Invalid) as refused:
        parse_name("\x1b[31m" + "a" * 100_000)
    assert len(refused.value.message) < 200
    assert "\x1b" not in refused.value.message
    assert refused.value.hint
