"""The forks of an episode (`areal-agents fork`), as branches from the turn that they leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_agents.inspection.forks import LONGEST_REPLY
from areal_agents.store import pages, reads
from areal_agents.view.runs import Run

_MOST = 64  # the newest are shown


def shown_forks(run: Run, episode_id: str) -> list[dict[str, Any]]:
    """Return the newest forks of an episode that got as far as sampling its turn again, the oldest first."""
    if run.forks is None:
        return []
    with run.forks.read() as connection:
        found = reads.summaries(connection, metadata={"forked_from": episode_id})
        newest = [fork for fork in found if fork.turns > fork.metadata["given"]][-_MOST:]
        out = []
        for fork in newest:
            turns = list(pages.kept_turns(connection, fork.id).values())
            reply = turns[fork.metadata["given"]].reply if len(turns) == fork.turns else None
            out.append(
                {
                    "id": fork.id,
                    "turn_id": fork.metadata["turn_id"],
                    "number": fork.metadata["fork"],
                    "policy": fork.metadata["policy"],
                    "status": fork.status,
                    "score": fork.score,
                    "text": "" if reply is None else reply.content.strip()[:LONGEST_REPLY],
                    "call": reply.tool_calls[0].name if reply is not None and reply.tool_calls else None,
                }
            )
        return out


def shown_origin(metadata: Mapping[str, Any], *, of_run: bool) -> dict[str, Any] | None:
    """Return the turn that a fork leaves, from its metadata; None for an episode that is no fork.

    Args:
        of_run: whether the fork is in the store of the run itself, which then lacks the recorded episode
            (`is_here` is False), and not in that of the run's forks.
    """
    if not {"forked_from", "turn", "turn_id", "policy", "seed"} <= metadata.keys():
        return None
    return {
        "episode": metadata["forked_from"],
        "turn": metadata["turn"],
        "turn_id": metadata["turn_id"],
        "policy": metadata["policy"],
        "seed": metadata["seed"],
        "is_here": not of_run,
    }
