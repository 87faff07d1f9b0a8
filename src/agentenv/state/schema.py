"""The tables. What a query compares or orders by is a column; the rest of a value is one versioned JSON text.

Instants are microseconds since 1970 in UTC: exact, and the same in every database.
A migration in `migrations/versions` goes with every change here; a test compares the two.
"""

from typing import Final

import sqlalchemy as sa

metadata: Final = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)

sandboxes: Final = sa.Table(
    "sandboxes",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("created_at_us", sa.BigInteger, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
)

snapshots: Final = sa.Table(
    "snapshots",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("created_at_us", sa.BigInteger, nullable=False),
    sa.Column("spawn_count", sa.BigInteger, nullable=False),
    sa.Column("last_spawned_at_us", sa.BigInteger, nullable=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
)

snapshot_names: Final = sa.Table(
    "snapshot_names",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("snapshot_id", sa.Text, sa.ForeignKey("snapshots.id", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("position", sa.Integer, nullable=False),  # order within one snapshot
)

REVISION: Final = "0001"
"""The migration that leads to these tables: what a database of this release is stamped with."""
