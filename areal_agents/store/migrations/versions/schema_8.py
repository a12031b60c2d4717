"""A process whose connection was lost knows whether its last transaction was committed."""

import sqlalchemy as sa
from alembic import op

revision = "8"
down_revision = "7"


def upgrade() -> None:
    op.create_table(
        "writers",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("commits", sa.BigInteger(), nullable=False),
        sa.Column("committed_at", sa.Float(), nullable=False),
    )
