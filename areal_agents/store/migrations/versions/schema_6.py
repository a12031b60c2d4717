"""The processes of a run on several machines have places, see roles.py."""

import sqlalchemy as sa
from alembic import op

revision = "6"
down_revision = "5"


def upgrade() -> None:
    op.create_table(
        "roles",
        sa.Column("role", sa.Text(), primary_key=True),
        sa.Column("index", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("url", sa.Text()),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("beat_at", sa.Float(), nullable=False),
        if_not_exists=True,  # a store of schema 4 may have got it when it was opened
    )
