"""Which proxy may write to an open episode: its owner, where several proxies use one store.

The check is part of the transaction of the write. A proxy that was cut off, and whose episode another one has
taken over, can therefore write nothing to it afterwards.
"""

from __future__ import annotations

import sqlalchemy as sa

from areal_agents.store.errors import OwnedElsewhere
from areal_agents.store.schema import episodes


def claim_episode(connection: sa.Connection, episode_id: str, expected_owner: str | None, owner: str) -> bool:
    """Make `owner` the owner of an open episode if `expected_owner` is; return whether it was."""
    claimed = connection.execute(
        sa.update(episodes)
        .where(
            episodes.c.id == episode_id,
            episodes.c.status == "open",
            episodes.c.owner.is_not_distinct_from(expected_owner),
        )
        .values(owner=owner)
    )
    return claimed.rowcount == 1


def refuse_other_owner(episode_id: str, status: str, found: str | None, owner: str | None) -> None:
    """Raise OwnedElsewhere if an episode is open and the owner found is not `owner`, unless that is None."""
    if owner is not None and status == "open" and found != owner:
        raise OwnedElsewhere(f"episode {episode_id} was taken over by another proxy; try again")
