"""The canary: which version is a candidate, its scores and its verdict, and the orders of the operator.

At most one version is a candidate. Its row is the truth: replicas of the canary serve it as long as it is
one, and all replicas serve the newest of the other versions. A verdict and what follows from it are one
transaction, so a trainer that dies is never between them.

The trainer writes the rows of versions. The operator's command writes its orders to `store_meta`, and nothing
else does; an order names the candidate that it is for, and is void for any other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import orjson
import sqlalchemy as sa

from areal_agents.store.errors import Conflict
from areal_agents.store.rows import SCORED, CanaryState, ScoredConversation, ServedVersions
from areal_agents.store.schema import episodes, rewards, store_meta, turns, versions
from areal_agents.store.versions import IS_STABLE, insert_version, version_row

Order = Literal["promote", "roll_back"]

_FROZEN, _ORDER = "canary.frozen", "canary.order"


def insert_candidate(connection: sa.Connection, version: int, *, step: int, path: str, share: float) -> None:
    """Publish a version for the canary only. Raises Conflict if there is a candidate."""
    served = served_versions(connection)
    if served is None:
        raise Conflict(f"version {version} cannot be a candidate, because no version is served yet")
    if served.candidate is not None:
        raise Conflict(
            f"version {version} cannot be a candidate, because version {served.candidate.version} is one"
        )
    insert_version(
        connection,
        version,
        step=step,
        path=path,
        checksum=None,
        folder_pending=False,
        canary="candidate",
        share=share,
    )


def begin_comparison(connection: sa.Connection, version: int) -> None:
    """Compare the conversations that are opened from now on, unless the comparison has begun."""
    newest = sa.select(sa.func.coalesce(sa.func.max(episodes.c.seq), 0)).scalar_subquery()
    connection.execute(
        sa.update(versions)
        .where(versions.c.version == version, versions.c.canary_after.is_(None))
        .values(canary_after=newest)
    )


def promote_candidate(connection: sa.Connection, version: int, verdict: Mapping[str, Any]) -> None:
    """Make the candidate the version of all replicas. Raises Conflict if it is not the candidate."""
    _decide(connection, version, "promoted", verdict)


def roll_back_candidate(
    connection: sa.Connection,
    version: int,
    verdict: Mapping[str, Any],
    *,
    restored: int,
    step: int,
    path: str,
) -> None:
    """End the candidate, and publish the weights before it as version `restored`, in one transaction.

    Raises Conflict if it is not the candidate, or if the number was used.
    """
    _decide(connection, version, "rolled_back", verdict)
    insert_version(connection, restored, step=step, path=path, checksum=None, folder_pending=False)


def _decide(connection: sa.Connection, version: int, state: CanaryState, verdict: Mapping[str, Any]) -> None:
    changed = connection.execute(
        sa.update(versions)
        .where(versions.c.version == version, versions.c.canary == "candidate")
        .values(canary=state, verdict={**verdict, "decided_at": time.time()})
    )
    if changed.rowcount != 1:
        raise Conflict(f"version {version} is not a candidate, so it cannot be {state}")


def served_versions(connection: sa.Connection) -> ServedVersions | None:
    """Return what replicas serve, or None before the first version."""
    newest = sa.select(versions).order_by(versions.c.version.desc()).limit(1)
    stable = connection.execute(newest.where(IS_STABLE)).one_or_none()
    if stable is None:
        return None
    candidate = connection.execute(newest.where(versions.c.canary == "candidate")).one_or_none()
    return ServedVersions(version_row(stable), None if candidate is None else version_row(candidate))


def scored_conversations(
    connection: sa.Connection, *, after: int, settle_s: float, now: float
) -> list[ScoredConversation]:
    """Return the rewarded implicit training episodes that ended more than `settle_s` seconds before `now`.

    They are in the order in which they ended. A reward that came later than `settle_s` after the end does not
    count, so that when an episode is counted does not depend on its score.

    Args:
        after: the number of an episode; only those that were opened later are returned.
    """
    oldest = sa.select(sa.func.min(turns.c.version_min)).where(turns.c.episode_id == episodes.c.id)
    query = (
        sa.select(episodes.c.id, sa.func.sum(rewards.c.value), oldest.scalar_subquery())
        .join(rewards, rewards.c.episode_id == episodes.c.id)
        .where(
            episodes.c.seq > after,
            episodes.c.split == "train",
            episodes.c.implicit_key.is_not(None),
            episodes.c.status.in_(SCORED),
            episodes.c.ended_at <= now - settle_s,
            rewards.c.created_at <= episodes.c.ended_at + settle_s,
        )
        .group_by(episodes.c.seq)
        .order_by(episodes.c.ended_at, episodes.c.seq)
    )
    return [
        ScoredConversation(episode_id, score, -1 if version is None else version)
        for episode_id, score, version in connection.execute(query)
    ]


def freeze(connection: sa.Connection, frozen: bool) -> None:
    """Order that nothing is trained, published or decided until this is taken back."""
    _write(connection, _FROZEN, frozen)


def is_frozen(connection: sa.Connection) -> bool:
    """Whether the operator has frozen the run."""
    return bool(_read(connection, _FROZEN))


def give_order(connection: sa.Connection, version: int, order: Order) -> None:
    """Order what becomes of the candidate. Raises Conflict if it is not the candidate."""
    served = served_versions(connection)
    if served is None or served.candidate is None or served.candidate.version != version:
        raise Conflict(f"version {version} is not a candidate")
    _write(connection, _ORDER, {"version": version, "order": order})


def order_for(connection: sa.Connection, version: int) -> Order | None:
    """Return the operator's order for a candidate; None if there is none."""
    order = _read(connection, _ORDER)
    return order["order"] if order and order["version"] == version else None


def _write(connection: sa.Connection, key: str, value: Any) -> None:
    text = orjson.dumps(value).decode()
    if not connection.execute(
        sa.update(store_meta).where(store_meta.c.key == key).values(value=text)
    ).rowcount:
        connection.execute(sa.insert(store_meta).values(key=key, value=text))


def _read(connection: sa.Connection, key: str) -> Any:
    text = connection.execute(
        sa.select(store_meta.c.value).where(store_meta.c.key == key)
    ).scalar_one_or_none()
    return None if text is None else orjson.loads(text)
