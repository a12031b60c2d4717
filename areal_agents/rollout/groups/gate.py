"""The staleness gate: limits how far submission may run ahead of the trainer.

Training episodes submitted and not yet trained never exceed (η + 1) · B, B = groups × group size. A
submitted group counts with all its places, opened or not, so that a retry never needs room; the count
comes from the store's rows each time, so drops, restarts and changes of B cannot make it drift. The
surplus of an over-sampled group does not count: it is never trained.
"""

from __future__ import annotations


def admissible_groups(*, submitted: int, groups: int, max_staleness: int | None, needed: int) -> int:
    """How many more groups may be submitted now: (η + 1) · groups less those submitted already.

    Both sides of the bound divided by the group size. Never zero while the trainer lacks groups for a
    batch, since then fewer than `groups` are submitted: the gate cannot deadlock. Without a bound as
    many as the rest of the run needs.

    Args:
        submitted: training groups that are neither trained nor dropped.
        groups: groups in a training batch.
        max_staleness: η, in versions; None: no bound.
        needed: groups that the steps still to come train on.
    """
    if submitted < 0 or groups < 1 or (max_staleness is not None and max_staleness < 0):
        raise ValueError(
            "expected submitted and max_staleness of at least 0 and groups of at least 1, "
            f"got {submitted}, {max_staleness} and {groups}"
        )
    bound = needed if max_staleness is None else (max_staleness + 1) * groups
    return max(0, bound - submitted)
