"""Writes and reads of the published policy versions, which define the current weights."""

from __future__ import annotations

import time

import sqlalchemy as sa

from areal_agents.store.errors import Conflict
from areal_agents.store.rows import CanaryState, VersionRow
from areal_agents.store.schema import leases, versions

# Versions for every replica: all but candidates, unless they were promoted.
IS_STABLE = sa.or_(versions.c.canary.is_(None), versions.c.canary == "promoted")
_LATEST = sa.select(versions).order_by(versions.c.version.desc()).limit(1)


def insert_version(
    connection: sa.Connection,
    version: int,
    *,
    step: int,
    path: str,
    checksum: str | None,
    folder_pending: bool,
    object_folder: str | None = None,
    canary: CanaryState | None = None,
    share: float | None = None,
) -> None:
    """Publish a version. Raises Conflict unless its number is above every published one."""
    largest = max_version(connection)
    if version <= largest:
        raise Conflict(
            f"version {version} cannot be published after version {largest}: numbers are never reused"
        )
    connection.execute(
        sa.insert(versions).values(
            version=version,
            step=step,
            path=path,
            checksum=checksum,
            object_folder=object_folder,
            published_at=time.time(),
            folder_pending=1 if folder_pending else None,
            canary=canary,
            share=share,
        )
    )


def mark_folder_written(connection: sa.Connection, version: int) -> None:
    """Record that the folder of a published version is complete."""
    connection.execute(sa.update(versions).where(versions.c.version == version).values(folder_pending=None))


def latest_version(connection: sa.Connection) -> VersionRow | None:
    """Return the version that was published last, or None before the first."""
    row = connection.execute(_LATEST).one_or_none()
    return None if row is None else version_row(row)


def version_row(row: sa.Row) -> VersionRow:
    """Return a row of the table."""
    return VersionRow(**{**row._mapping, "folder_pending": bool(row.folder_pending)})


def published_versions(connection: sa.Connection) -> list[VersionRow]:
    """Return every published version, oldest first."""
    rows = connection.execute(sa.select(versions).order_by(versions.c.version))
    return [version_row(row) for row in rows]


def object_folders(connection: sa.Connection) -> set[str]:
    """Return the folders that published versions have in an object storage."""
    return set(
        connection.execute(
            sa.select(versions.c.object_folder).where(versions.c.object_folder.is_not(None))
        ).scalars()
    )


def max_version(connection: sa.Connection) -> int:
    """Return the largest version number that was ever published, or -1 before the first."""
    largest = connection.execute(sa.select(sa.func.max(versions.c.version))).scalar_one()
    return -1 if largest is None else largest


def steps_behind(connection: sa.Connection, version: int) -> dict[int, int]:
    """Return by how many steps each version from before a resume lags behind `version`; below 0 if it leads.

    Between two versions without a resume in between there are as many steps as numbers, so those are omitted.
    If `version` was never published, the result is empty.
    """
    step = connection.execute(
        sa.select(versions.c.step).where(versions.c.version == version)
    ).scalar_one_or_none()
    if step is None:
        return {}
    rows = connection.execute(
        sa.select(versions.c.version, versions.c.step).where(
            versions.c.version - versions.c.step != version - step
        )
    )
    return {row.version: step - row.step for row in rows}


def oldest_served(connection: sa.Connection) -> int:
    """Return a lower bound on the version that engines serve from now on.

    The row of a version is written before the version is swapped in, and the groups trained into it are
    marked after the swap, so the newest version may not be served yet while no group is marked as trained
    into it. The bound is exact from the first trained batch after a start or resume, and at most one too low
    before. It is 0 before the first version. With a canary the stable version is served for as long as
    candidates are trained, compared and rolled back.
    """
    first, newest = connection.execute(
        sa.select(sa.func.min(versions.c.version), sa.func.max(versions.c.version))
    ).one()
    if newest is None:
        return 0
    trained = connection.execute(
        sa.select(sa.func.max(leases.c.version)).where(leases.c.state == "trained")
    ).scalar_one()
    bound = max(first, newest - 1, -1 if trained is None else trained)
    had_canary = sa.select(sa.func.count()).where(versions.c.canary.is_not(None))
    if not connection.execute(had_canary).scalar_one():
        return bound
    stable = sa.select(sa.func.max(versions.c.version)).where(IS_STABLE)
    # The row of a new stable version is written before its swap.
    before = sa.select(sa.func.max(versions.c.version)).where(
        IS_STABLE, versions.c.version < stable.scalar_subquery()
    )
    return min(bound, connection.execute(sa.func.coalesce(before.scalar_subquery(), first)).scalar_one())
