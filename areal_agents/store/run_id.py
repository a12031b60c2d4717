"""A random name that a store gets once, so that the objects of its run are told from those of others."""

from __future__ import annotations

import secrets

import sqlalchemy as sa

from areal_agents.store.schema import store_meta

_KEY = "run_id"


def of(connection: sa.Connection) -> str:
    """Return the name of the store, in a transaction that writes; it is made if there is none."""
    query = sa.select(store_meta.c.value).where(store_meta.c.key == _KEY)
    found = connection.execute(query).scalar_one_or_none()
    if found is None:
        found = f"run-{secrets.token_hex(6)}"
        connection.execute(sa.insert(store_meta).values(key=_KEY, value=found))
    return str(found)
