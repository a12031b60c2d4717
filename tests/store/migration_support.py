"""Processes that open a store, and so migrate it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess

import sqlalchemy as sa

from areal_agents.store import Store

# They are forked from a process that has imported these, and then import no more than this module, which
# takes a tenth of a second. It is not on the import path of that process.
_PRELOADED = ["areal_agents.store.store", "alembic.command", "alembic.config", "psycopg"]


def new_process(target: Callable[..., None], *arguments: object) -> ForkServerProcess:
    """Return a process that is forked from one without threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context.Process(target=target, args=arguments)


def open_and_die(url: str, statements: int) -> None:
    """Open a store, and kill the process before the last of `statements` changes."""

    @sa.event.listens_for(sa.Engine, "before_cursor_execute")
    def count(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        nonlocal statements
        if statement.split()[0] in ("ALTER", "CREATE", "DROP", "INSERT", "UPDATE", "DELETE"):
            statements -= 1
            if not statements:
                os.kill(os.getpid(), signal.SIGKILL)

    Store.open(url).close()


def open_store(url: str) -> None:
    """Open a store that has two trained groups."""
    with Store.open(url) as store:
        assert store.group_counts()["trained"] == 2
