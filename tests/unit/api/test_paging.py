"""Pages: a cursor is opaque, checked, and survives what happens between two requests."""

import base64
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from agentenv.api.paging import Cursor, Order, in_order, page
from agentenv.model.errors import Invalid

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Thing:
    id: str
    created_at: datetime


def things(*seconds: int) -> list[Thing]:
    return [Thing(f"id-{index}", EPOCH + timedelta(seconds=one)) for index, one in enumerate(seconds)]


def walk(items: list[Thing], limit: int, order: Order = "desc") -> list[list[Thing]]:
    pages, token = [], None
    while True:
        shown, token = page(items, limit=limit, token=token, order=order)
        pages.append(list(shown))
        if token is None:
            return pages


def test_newest_comes_first_and_ids_settle_a_tie() -> None:
    items = things(1, 3, 3, 2)

    assert [one.id for one in in_order(items, "desc")] == ["id-1", "id-2", "id-3", "id-0"]
    assert [one.id for one in in_order(items, "asc")] == ["id-0", "id-3", "id-1", "id-2"]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_a_page_that_is_exactly_full_is_the_last(order: Order) -> None:
    pages = walk(things(1, 2, 3, 4), 2, order)

    assert [len(one) for one in pages] == [2, 2]


def test_an_empty_list_has_one_empty_page() -> None:
    assert walk([], 10) == [[]]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_the_item_that_a_cursor_names_may_be_gone(order: Order) -> None:
    items = things(1, 2, 3, 4)
    shown, token = page(items, limit=2, order=order)

    rest, _ = page([one for one in items if one not in shown], limit=2, token=token, order=order)

    assert {one.id for one in [*shown, *rest]} == {one.id for one in items}


def encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    "token",
    [
        "", "x", "\x00", "é", "====", "%%%", "a" * 512,
        encoded("1|desc|2026-01-01T00:00:00+00:00"),
        encoded("1|desc|2026-01-01T00:00:00|id"),
        encoded("1|desc|yesterday|id"),
        encoded("2|desc|2026-01-01T00:00:00+00:00|id"),
        encoded("1|desc|2026-01-01T00:00:00+00:00|id|more"),
        base64.urlsafe_b64encode(b"\xff\xfe").decode(),
    ],
)  # fmt: skip
def test_a_token_that_was_never_given_out_is_refused(token: str) -> None:
    with pytest.raises(Invalid):
        page(things(1), limit=1, token=token)


def test_a_token_belongs_to_one_order() -> None:
    _, token = page(things(1, 2), limit=1, order="asc")

    with pytest.raises(Invalid, match="order"):
        page(things(1, 2), limit=1, token=token, order="desc")


def test_a_token_has_nothing_that_a_url_must_escape() -> None:
    token = Cursor("desc", EPOCH, "?" * 40).encode()

    assert token.replace("-", "").replace("_", "").isalnum()
