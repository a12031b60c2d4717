"""A group may be leased several times, so the key of a lease is the group and the number of the use."""

from alembic import op

revision = "4"
down_revision = "3"


def upgrade() -> None:
    # SQLite cannot change the key of a table.
    for statement in (
        "ALTER TABLE leases RENAME TO leases_of_schema_3",
        "DROP INDEX leases_by_state",
        "DROP INDEX leases_by_step",
        """CREATE TABLE leases (
            group_id TEXT NOT NULL,
            "use" INTEGER NOT NULL,
            state TEXT NOT NULL,
            step INTEGER NOT NULL,
            holder TEXT NOT NULL,
            version INTEGER,
            reason TEXT,
            PRIMARY KEY (group_id, "use"),
            FOREIGN KEY(group_id) REFERENCES groups (id)
        )""",
        """INSERT INTO leases (group_id, "use", state, step, holder, version, reason)
            SELECT group_id, 0, state, step, holder, version, reason FROM leases_of_schema_3""",
        "DROP TABLE leases_of_schema_3",
        "CREATE INDEX leases_by_state ON leases (state)",
        "CREATE INDEX leases_by_step ON leases (step)",
    ):
        op.execute(statement)
