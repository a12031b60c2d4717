"""Alembic says which schema a store has.

Before, columns that may be null were added without a new number, so a store may lack any of them.
"""

import sqlalchemy as sa
from alembic import op

revision = "5"
down_revision = "4"

_ADDED: dict[str, list[tuple[str, sa.types.TypeEngine]]] = {
    "groups": [("surplus", sa.Integer()), ("version", sa.Integer())],
    "episodes": [("implicit_key", sa.Text()), ("owner", sa.Text())],
    "turns": [
        ("discarded", sa.Text()),
        ("constrained", sa.Integer()),
        ("routed_experts", sa.LargeBinary()),
    ],
    "versions": [
        ("checksum", sa.Text()),
        ("folder_pending", sa.Integer()),
        ("canary", sa.Text()),
        ("share", sa.Float()),
        ("canary_after", sa.Integer()),
        ("verdict", sa.JSON()),
    ],
}


def upgrade() -> None:
    inspector = sa.inspect(op.get_bind())
    for table, columns in _ADDED.items():
        known = {column["name"] for column in inspector.get_columns(table)}
        for name, kind in columns:
            if name not in known:
                op.add_column(table, sa.Column(name, kind))
    # Releases before this one look here, and refuse the store.
    op.execute("UPDATE store_meta SET value = '5' WHERE key = 'schema_version'")
