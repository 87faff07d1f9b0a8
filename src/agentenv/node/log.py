"""One line in the log for every move of a sandbox: which, from where to where, in which VM, and why."""

import structlog

from agentenv.model.lifecycle import State
from agentenv.model.sandbox import Sandbox

log = structlog.get_logger(__name__)


def log_change(before: Sandbox | None, after: Sandbox | None) -> None:
    """A listener of the registry. Changes that are no move (metadata, deadlines) are not logged."""
    known = after or before
    if known is None:
        return
    old = before.state if before is not None else None
    new = after.state if after is not None else State.GONE
    if old is new and before is not None and before.generation == known.generation:
        return
    if old is None and new is not State.CREATING:
        say = log.debug  # read from the store when the server starts: it moved there earlier
    elif new is State.ERROR:
        say = log.error
    else:
        say = log.info
    say(
        "sandbox moved",
        sandbox=known.id,
        from_state=old.value if old is not None else None,
        to_state=new.value,
        generation=known.generation,
        reason=known.reason,
    )
