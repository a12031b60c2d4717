"""The processes of a run on several machines: which place each has, where it is, whether it runs.

A place is a role and an index, such as engine 1. A process claims it, which begins a new epoch, and shows by
its heartbeats that it is alive. A place that its process has left, or has not beaten for `DEAD_AFTER_S`, can
be claimed by another; the earlier process then finds at its next heartbeat that its epoch is over. All times
are those of the database, so the clocks of the machines need not agree.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, cast

import sqlalchemy as sa

from areal_agents.store.errors import Conflict, NotFound
from areal_agents.store.schema import roles, store_meta

Role = Literal["supervisor", "engine", "proxy", "rollout", "sandbox", "trainer"]
SERVERS: tuple[Role, ...] = ("engine", "proxy", "sandbox")  # those that other machines call over HTTP

BEAT_S = 2.0  # between two heartbeats
DEAD_AFTER_S = 20.0  # without a heartbeat
_RUN = "run"  # the key of the run's record in store_meta


@dataclass(frozen=True, slots=True)
class RoleRow:
    """A place, and the process that has it or was the last to have it.

    Attributes:
        url: where the others reach the process; None: it is not reached, or not yet.
        beat_at: the time of its last heartbeat in seconds since the epoch of Unix, by the database's clock.
        age_s: seconds since then, by the same clock.
    """

    role: Role
    index: int
    epoch: int
    state: Literal["running", "ended"]
    url: str | None
    host: str
    pid: int
    beat_at: float
    age_s: float

    @property
    def is_alive(self) -> bool:
        """Whether the process is running, as far as its heartbeats tell."""
        return self.state == "running" and self.age_s < DEAD_AFTER_S


def claim(
    connection: sa.Connection, role: Role, index: int, *, host: str, pid: int, gone: int | None
) -> RoleRow:
    """Take a place, and begin its next epoch.

    Args:
        gone: the epoch whose process is known to have ended, so that its last heartbeat need not become old;
            None: nothing is known.

    Raises:
        Conflict: another process has the place.
    """
    found = of(connection, role, index)
    if found is not None and found.is_alive and found.epoch != gone:
        raise _taken(found)
    now = database_now(connection)
    values = {
        "epoch": 1 if found is None else found.epoch + 1,
        "state": "running",
        "url": None,
        "host": host,
        "pid": pid,
        "started_at": now,
        "beat_at": now,
    }
    if found is None:
        connection.execute(sa.insert(roles).values(role=role, index=index, **values))
    else:
        which = sa.and_(_is(role, index), roles.c.epoch == found.epoch)
        if found.epoch != gone:  # a heartbeat, which waits for no claim, may have come since it was read
            which = sa.and_(which, roles.c.beat_at == found.beat_at)
        changed = connection.execute(sa.update(roles).where(which).values(**values))
        if not changed.rowcount:
            raise _taken(cast(RoleRow, of(connection, role, index)))
    return cast(RoleRow, of(connection, role, index))


def beat(connection: sa.Connection, role: Role, index: int, epoch: int, *, url: str | None) -> bool:
    """Write a heartbeat, and the address; return whether the epoch is still that of the place."""
    changed = connection.execute(
        sa.update(roles)
        .where(_is(role, index), roles.c.epoch == epoch)
        .values(beat_at=database_now(connection), url=url)
    )
    return changed.rowcount == 1


def leave(connection: sa.Connection, role: Role, index: int, epoch: int) -> None:
    """Leave a place, unless another process has it already."""
    connection.execute(
        sa.update(roles).where(_is(role, index), roles.c.epoch == epoch).values(state="ended", url=None)
    )


def of(connection: sa.Connection, role: Role, index: int) -> RoleRow | None:
    """Return the row of a place; None if no process ever had it."""
    rows = _rows(connection, _is(role, index))
    return rows[0] if rows else None


def all_of(connection: sa.Connection, role: Role | None = None) -> list[RoleRow]:
    """Return the rows of a role, or of all roles, by role and index."""
    return _rows(connection, sa.true() if role is None else roles.c.role == role)


def write_run(connection: sa.Connection, record: dict[str, Any]) -> None:
    """Write what each process of the run reads first; see `cluster.run_record`."""
    value = json.dumps(record)
    changed = connection.execute(sa.update(store_meta).where(store_meta.c.key == _RUN).values(value=value))
    if not changed.rowcount:
        connection.execute(sa.insert(store_meta).values(key=_RUN, value=value))


def read_run(connection: sa.Connection) -> dict[str, Any]:
    """Return what `write_run` wrote. Raises NotFound if no run was started on the store."""
    value = connection.execute(
        sa.select(store_meta.c.value).where(store_meta.c.key == _RUN)
    ).scalar_one_or_none()
    if value is None:
        raise NotFound("no run on several machines was started with this store")
    return cast("dict[str, Any]", json.loads(value))


def _taken(row: RoleRow) -> Conflict:
    return Conflict(
        f"{row.role} {row.index} of this run is running: process {row.pid} on {row.host}, with a heartbeat "
        f"{row.age_s:.0f} s ago"
    )


def _is(role: Role, index: int) -> sa.ColumnElement[bool]:
    return sa.and_(roles.c.role == role, roles.c.index == index)


def _rows(connection: sa.Connection, which: sa.ColumnElement[bool]) -> list[RoleRow]:
    now = database_now(connection)
    columns = [roles.c[name] for name in ("role", "index", "epoch", "state", "url", "host", "pid", "beat_at")]
    found = connection.execute(sa.select(*columns).where(which).order_by(roles.c.role, roles.c.index)).all()
    return [
        RoleRow(role, index, epoch, state, url, host, pid, beat_at, max(0.0, now - beat_at))
        for role, index, epoch, state, url, host, pid, beat_at in found
    ]


def database_now(connection: sa.Connection) -> float:
    """Return the time of the database in seconds since the epoch of Unix."""
    if connection.dialect.name == "sqlite":
        query = "SELECT (julianday('now') - 2440587.5) * 86400.0"
    else:
        query = "SELECT extract(epoch FROM clock_timestamp())::double precision"
    return float(connection.exec_driver_sql(query).scalar_one())
