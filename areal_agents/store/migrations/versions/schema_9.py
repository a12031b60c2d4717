"""Versions have a folder in an object storage, and engines that read them there say which they have."""

import sqlalchemy as sa
from alembic import op

revision = "9"
down_revision = "8"


def upgrade() -> None:
    op.add_column("versions", sa.Column("object_folder", sa.Text()))
    op.create_table(
        "engine_weights",
        sa.Column("index", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("process", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Integer()),
        sa.Column("version", sa.Integer()),
        sa.Column("problem", sa.Text()),
        sa.Column("pause_s", sa.Float(), nullable=False),
        sa.Column("fetch_s", sa.Float(), nullable=False),
        sa.Column("received_bytes", sa.BigInteger(), nullable=False),
        sa.Column("agreement", sa.Float()),
        sa.Column("busy_s", sa.Float()),
        sa.Column("beat_at", sa.Float(), nullable=False),
    )
