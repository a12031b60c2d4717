"""The tables of the oldest release whose stores are migrated. Nothing leads to them."""

revision = "3"
down_revision = None


def upgrade() -> None:
    raise AssertionError("a store is migrated from schema 3 or later")
