"""The staleness gate: how far submission may run ahead of the trainer.

Training episodes submitted and not yet trained never exceed (η + 1) · B, B = groups × group size. A
submitted group counts with all its places, opened or not, so that a retry never needs room; the count
comes from the store's rows each time, so drops, restarts and changes of B cannot make it drift.
"""

from __future__ import annotations


def admissible_groups(*, submitted: int, groups: int, max_staleness: int) -> int:
    """How many more groups may be submitted now: (η + 1) · groups less those submitted already.

    Both sides of the bound divided by the group size. Never zero while the trainer lacks groups for a
    batch, since then fewer than `groups` are submitted: the gate cannot deadlock.

    Args:
        submitted: training groups that are neither trained nor dropped.
        groups: groups in a training batch.
        max_staleness: η, in versions.
    """
    if submitted < 0 or groups < 1 or max_staleness < 0:
        raise ValueError(
            "expected submitted and max_staleness of at least 0 and groups of at least 1, "
            f"got {submitted}, {max_staleness} and {groups}"
        )
    return max(0, (max_staleness + 1) * groups - submitted)
