"""A group says which of several rollout processes plays it."""

import sqlalchemy as sa
from alembic import op

revision = "7"
down_revision = "6"


def upgrade() -> None:
    known = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("groups")}
    if "runner" not in known:  # tests set a store back to an earlier schema without removing it
        op.add_column("groups", sa.Column("runner", sa.Text()))
