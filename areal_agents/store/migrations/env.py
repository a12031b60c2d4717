"""What Alembic runs for every migration: the revisions, on the connection and in the transaction given."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
