"""The URLs of stores: a path, sqlite:///path, or postgresql://host/database?schema=name."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from areal_agents.errors import StoreError
from areal_agents.store.config import Durability
from areal_agents.store.database import Backend
from areal_agents.store.postgres import PostgresBackend, is_postgres, shown
from areal_agents.store.sqlite import SqliteBackend


def store_url(url_or_path: str | Path) -> str:
    """Return the SQLAlchemy URL of a store given as a path or a URL; create the parent folder of a path."""
    text = str(url_or_path)
    if "://" in text:
        return text
    path = Path(text).expanduser().absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{path}"


def shown_store(url_or_path: str | Path) -> str:
    """Return a store as messages name it: the path of its file, or its URL without the password."""
    text = str(url_or_path)
    return shown(text) if is_postgres(text) else text.removeprefix("sqlite:///")


def store_path(url_or_path: str | Path) -> Path:
    """Return the file of a store given as a path or a URL; its other files are in the same folder."""
    url = store_url(url_or_path)
    if is_postgres(url):
        raise StoreError(f"the store {shown(url)} is in PostgreSQL and has no file")
    return Path(str(sa.make_url(url).database))


def backend_of(url: str, durability: Durability) -> Backend:
    """Return the backend of a store's URL. Raises StoreError if it is of no known kind."""
    if is_postgres(url):
        return PostgresBackend(url, durability)
    return SqliteBackend(url, durability)
