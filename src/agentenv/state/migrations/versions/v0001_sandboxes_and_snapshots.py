"""The first tables: sandboxes, snapshots and the names of snapshots."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "sandboxes",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("created_at_us", sa.BigInteger, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sandboxes"),
    )
    op.create_table(
        "snapshots",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("created_at_us", sa.BigInteger, nullable=False),
        sa.Column("spawn_count", sa.BigInteger, nullable=False),
        sa.Column("last_spawned_at_us", sa.BigInteger, nullable=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_snapshots"),
    )
    op.create_table(
        "snapshot_names",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("snapshot_id", sa.Text, nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_snapshot_names"),
        sa.ForeignKeyConstraint(
            ["snapshot_id"], ["snapshots.id"], name="fk_snapshot_names_snapshot_id", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_snapshot_names_snapshot_id", "snapshot_names", ["snapshot_id"])
