"""The staleness gate, which bounds how far submission may be ahead of the trainer.

The number of training episodes that are submitted and not yet trained never exceeds (η + 1) · B, where B =
groups × group size. A submitted group counts with its full size, whether its episodes are opened or not, so a
retry is always admitted. The count is read from the store's rows each time, so drops, restarts and changes of
B do not make it drift. The surplus of an over-sampled group does not count, because it is never trained.
"""

from __future__ import annotations


def admissible_groups(*, submitted: int, groups: int, max_staleness: int | None, needed: int) -> int:
    """Return how many more groups may be submitted now: (η + 1) · groups minus those already submitted.

    This is the bound on episodes divided by the group size. It is never 0 while the trainer lacks groups for
    a batch, because then fewer than `groups` are submitted, so the gate cannot deadlock. Without a bound on
    staleness, as many groups may be submitted as the rest of the run needs.

    Args:
        submitted: the number of training groups that are neither trained nor dropped.
        groups: the number of groups in a training batch.
        max_staleness: η, in versions; None: no bound.
        needed: the number of groups that the remaining steps train on.
    """
    if submitted < 0 or groups < 1 or (max_staleness is not None and max_staleness < 0):
        raise ValueError(
            "expected submitted and max_staleness of at least 0 and groups of at least 1, "
            f"got {submitted}, {max_staleness} and {groups}"
        )
    bound = needed if max_staleness is None else (max_staleness + 1) * groups
    return max(0, bound - submitted)
