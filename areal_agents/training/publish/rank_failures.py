"""Makes a call on every rank; when it fails on one rank, no other rank waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from areal_agents.errors import EngineUnavailable, TrainingError
from areal_agents.training.distributed import Ranks

T = TypeVar("T")


class EnginesLost(TrainingError):
    """Raised on the other ranks when the first rank raises EngineUnavailable; all ranks can recover from
    it."""


def on_every_rank(ranks: Ranks, call: Callable[[], T]) -> T:
    """Make the call on every rank; if it fails on one rank, it fails on all. Collective.

    Raises:
        Exception: on a rank that failed, its own error.
        EnginesLost: on the other ranks, if that error was EngineUnavailable.
        TrainingError: on the other ranks, if it was any other error.
    """
    failure: Exception | None = None
    try:
        result = call()
    except Exception as error:
        failure = error
    if not ranks.any(failure is not None):
        return result
    lost = ranks.any(isinstance(failure, EngineUnavailable))
    if failure is not None:
        raise failure
    if lost:
        raise EnginesLost("no engine answers the first rank; see its log")
    raise TrainingError("another rank failed while a version was published; see its log")
