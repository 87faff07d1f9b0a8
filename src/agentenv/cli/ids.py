"""A part of an id names nothing: commands act on whole ids, and who gave a part is told which ids begin so.

A part is not completed by itself, since what it stands for changes with every sandbox that starts.
"""

import re
from collections.abc import Iterable
from typing import Final

PART: Final = re.compile(r"[0-9a-f-]{1,36}")
WHOLE: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
NAMED: Final = 3  # so many ids still fit in a hint


def may_be_part(given: str) -> bool:
    """Whether *given* may be the beginning of an id, or one in capitals."""
    return bool(PART.fullmatch(given.lower())) and not WHOLE.fullmatch(given)


def whole_id(given: str, known: Iterable[str], listing: str) -> str:
    """A hint for *given*, a part of an id: which of the *known* begin so. *listing* is the command that shows them."""
    found = sorted({one for one in known if one.startswith(given.lower())})
    if len(found) == 1:
        return f"give the whole id: {found[0]}"
    if 0 < len(found) <= NAMED:
        return f"give the whole id, one of {', '.join(found)}"
    return f"give the whole id, as `{listing}` shows it; {len(found) or 'none'} begin with {given}"
