"""The wait of `loop: one_step_off`: weights are swapped only while no training episode is being generated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from areal_agents.errors import TrainingError
from areal_agents.store import Store

_LOOK_S = 1.0  # how long a stop can go unnoticed


def wait_until_whole(
    store: Store,
    *,
    groups: int,
    data_ended: Callable[[], bool],
    timeout_s: float,
    stop: threading.Event,
) -> None:
    """Return once the next batch is whole and no group is in the making, or at once if asked to stop.

    Weights that are swapped then meet no generation of a training episode: every batch is of one version.
    While the batch that was trained is still leased and η is 1, the gate admits just one batch beside it.

    Args:
        groups: in a batch.
        data_ended: whether every group that the data has was begun. Then a batch that lacks one, for
            example of a group that was dropped, stays as it is, and is not waited for.

    Raises:
        TrainingError: that did not happen within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    no_more = False
    while not stop.is_set():
        cursor = store.cursor()
        counts = store.group_counts()
        # What a resume or a smaller batch has left beyond the gate is held back, so it is not in the making.
        admitted = store.untrained_groups()[: 2 * groups]
        if not any(group.is_pending for group in admitted):
            if no_more or counts["complete"] >= groups:
                return
            if data_ended():
                no_more = True
                continue  # the last group may have begun after the look
        left = deadline - time.monotonic()
        if left <= 0:
            raise TrainingError(
                f"the batch being generated was not whole when the time ran out (trainer.batch_timeout_s); "
                f"one_step_off swaps weights between batches only; the store has {counts}"
            )
        store.wait(cursor, min(_LOOK_S, left))
