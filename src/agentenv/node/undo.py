"""Take things one after the other, and give all of them back if something fails on the way."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from agentenv.aio.tasks import to_its_end
from agentenv.model.errors import AgentEnvError

log = structlog.get_logger(__name__)


@asynccontextmanager
async def undone_on_failure(what: str) -> AsyncIterator[AsyncExitStack]:
    """A stack whose entries are undone, last first, when the block raises, and kept when it ends.

    Undoing goes to its end even if the caller is cancelled again (a kill after a
    deadline), and what fails in it is logged: the caller sees why the block failed.
    """
    taken = AsyncExitStack()
    try:
        yield taken
    except BaseException:
        try:
            await to_its_end(f"undo {what}", taken.aclose())
        except AgentEnvError:
            log.exception("not everything could be undone", what=what)
        raise
    taken.pop_all()
