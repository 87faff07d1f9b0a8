"""Pages of a list that changes between two requests.

A cursor names the last item of a page by the two things that never change, when it was
created and its id; the next page is what comes after it. So whatever is created or
deleted meanwhile, nothing is shown twice and nothing that stays is left out.
"""

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, Protocol, Self, TypeAlias, TypeVar

from agentenv.model.errors import Invalid

Order: TypeAlias = Literal["asc", "desc"]
MAX_PAGE: Final = 100
_VERSION: Final = "1"


class Item(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def created_at(self) -> datetime: ...


T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True)
class Cursor:
    """The place after one item in a list of the given order."""

    order: Order
    created_at: datetime
    id: str

    def encode(self) -> str:
        text = f"{_VERSION}|{self.order}|{self.created_at.isoformat()}|{self.id}"
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    @classmethod
    def decode(cls, token: str, order: Order) -> Self:
        """Raises `Invalid` for anything that `encode` did not write, or wrote for the other order."""
        try:
            padded = token.encode("ascii") + b"=" * (-len(token) % 4)
            version, kept, created_at, item_id = (
                base64.b64decode(padded, altchars=b"-_", validate=True).decode().split("|")
            )
            cursor = cls(order, datetime.fromisoformat(created_at), item_id)
        except (ValueError, binascii.Error):
            raise Invalid("nextToken is not one that this server gave out") from None
        if version != _VERSION or cursor.created_at.tzinfo is None:
            raise Invalid("nextToken is not one that this server gave out")
        if kept != order:
            raise Invalid(f"nextToken belongs to a list in the other order than {order!r}")
        return cursor


def in_order(items: Iterable[T], order: Order) -> list[T]:
    """By creation; items of the same instant by id, ascending either way."""
    return sorted(sorted(items, key=lambda item: item.id), key=lambda item: item.created_at, reverse=order == "desc")


def page(
    items: Iterable[T], *, limit: int, token: str | None = None, order: Order = "desc"
) -> tuple[Sequence[T], str | None]:
    """At most *limit* of *items* after *token*, and the token of the next page if there is more."""
    ordered = in_order(items, order)
    if token is not None:
        cursor = Cursor.decode(token, order)
        ordered = [item for item in ordered if _is_after(item, cursor)]
    shown = ordered[:limit]
    if len(ordered) <= limit:
        return shown, None
    return shown, Cursor(order, shown[-1].created_at, shown[-1].id).encode()


def _is_after(item: Item, cursor: Cursor) -> bool:
    if item.created_at == cursor.created_at:
        return item.id > cursor.id
    return (item.created_at > cursor.created_at) == (cursor.order == "asc")
