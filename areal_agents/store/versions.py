"""Writes and reads of the published policy versions: the truth about which weights are current."""

from __future__ import annotations

import time

import sqlalchemy as sa

from areal_agents.store.errors import Conflict
from areal_agents.store.rows import VersionRow
from areal_agents.store.schema import checkpoints, versions


def insert_version(
    connection: sa.Connection, version: int, *, step: int, path: str, checksum: str | None
) -> None:
    """Publish a version. Conflict unless its number is above every number ever published."""
    largest = max_version(connection)
    if version <= largest:
        raise Conflict(
            f"version {version} cannot be published after version {largest}: numbers are never reused"
        )
    connection.execute(
        sa.insert(versions).values(
            version=version, step=step, path=path, checksum=checksum, published_at=time.time()
        )
    )


def latest_version(connection: sa.Connection) -> VersionRow | None:
    """The version published last, None before the first."""
    row = connection.execute(sa.select(versions).order_by(versions.c.version.desc()).limit(1)).one_or_none()
    return VersionRow(**row._mapping) if row is not None else None


def max_version(connection: sa.Connection) -> int:
    """The largest version number ever published, -1 before the first."""
    largest = connection.execute(sa.select(sa.func.max(versions.c.version))).scalar_one()
    return -1 if largest is None else largest


def latest_checkpoint(connection: sa.Connection) -> int | None:
    """The step of the newest checkpoint, None without one."""
    return connection.execute(sa.select(sa.func.max(checkpoints.c.step))).scalar_one()
