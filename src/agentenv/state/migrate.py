"""Brings a database to the tables of this release, and refuses one from a newer release."""

import asyncio
from pathlib import Path
from typing import Final

import sqlalchemy as sa
import sqlalchemy.exc as sa_exc

from agentenv.model.errors import Unsupported
from agentenv.state.engine import open_engine
from agentenv.state.faults import translate
from agentenv.state.room import Room
from agentenv.state.schema import REVISION

SCRIPTS: Final = Path(__file__).parent / "migrations"


def migrate(url: str, room: Room) -> None:
    """Run every missing migration, all or nothing. Blocking: for a thread without an event loop.

    *room* tells whether the disk is full.

    Raises `Unsupported` for a database that a newer release has migrated, `Unavailable` or `NoSpace`.
    """
    try:
        asyncio.run(_migrate(url))
    except (sa_exc.SQLAlchemyError, OSError) as error:
        raise translate(error, disk_full=room.is_full()) from error


async def _migrate(url: str) -> None:
    engine = open_engine(url)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(_upgrade)
    finally:
        await engine.dispose()


def _upgrade(connection: sa.Connection) -> None:
    stamped = _stamp(connection)
    if stamped == REVISION:
        return
    # Imported only where there is work: it costs a good part of a start.
    from alembic import command  # noqa: PLC0415
    from alembic.config import Config  # noqa: PLC0415
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if stamped is not None and stamped not in known:
        raise Unsupported(
            f"the state database is of a newer release (schema {stamped}; this one knows {REVISION})",
            hint="run the newer release, or start with another home directory",
        )
    command.upgrade(config, "head")


def _stamp(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
