"""Swaps a recorded version into the engines, and waits for engines that are lost during the swap.

If some engines are lost, the version is delivered without them; the process that routes requests updates them
before they serve again. If all are lost, the version waits until one is back and is delivered again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PretrainedConfig

from areal_agents.errors import EngineError, EngineUnavailable
from areal_agents.inference.engine import Engine
from areal_agents.training.distributed import Ranks
from areal_agents.training.publish.checksums import EngineComparison
from areal_agents.training.publish.fleet import EventLoopThread, Fleet
from areal_agents.training.publish.host_copy import HostCopy
from areal_agents.training.publish.preflight import Reachable, WaitLimit, check_engines
from areal_agents.training.publish.rank_failures import EnginesLost, on_every_rank
from areal_agents.training.publish.transports import Delivered, Transport

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # interval between two attempts to deliver a version


class Swapper:
    """Swaps versions into the engines. Every rank has one.

    Args:
        loop, engines: the engines and the event loop on which they are called; given only on the first rank.
        trained: the config of the model that engines must serve.
        wait_s: longest time that one version waits for engines to come back.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Ranks,
        loop: EventLoopThread | None,
        engines: Sequence[Engine],
        trained: PretrainedConfig,
        *,
        wait_s: float,
    ) -> None:
        self._transport, self._ranks, self._loop = transport, ranks, loop
        self._engines, self._trained, self._wait_s = tuple(engines), trained, wait_s

    def swap(
        self,
        version: int,
        path: Path,
        checks: EngineComparison | None,
        copy: HostCopy | None = None,
        *,
        engines: Sequence[Engine] | None = None,
        again: bool = False,
    ) -> tuple[Fleet, Delivered]:
        """Swap in the version whose folder is `path`; return the engines that serve it and the result of the
        delivery. Collective.

        Args:
            checks: compares engines with the version. copy: see Transport.deliver.
            engines: the engines to swap it into; None: all.
            again: whether engines may have the version already.

        Raises:
            EngineError: no engine took the version, or the weights of one differ from those that `checks`
                compares with.
            TrainingError: on the other ranks in these cases.
        """
        wait_limit, pause_s = WaitLimit(self._wait_s), _FIRST_PAUSE_S
        while True:
            fleet = Fleet(self._engines if engines is None else engines, version)
            try:
                delivered = self._attempt(fleet, path, wait_limit, checks, copy, again=again)
            except (EngineUnavailable, EnginesLost) as error:
                self._wait(wait_limit, pause_s, checks, error)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except EngineError:
                _raise_difference(checks)
                raise
            else:
                on_every_rank(self._ranks, lambda: _raise_difference(checks))
                return fleet, delivered

    def _attempt(
        self,
        fleet: Fleet,
        path: Path,
        wait_limit: WaitLimit,
        checks: EngineComparison | None,
        copy: HostCopy | None,
        *,
        again: bool,
    ) -> Delivered:
        reachable = on_every_rank(
            self._ranks,
            lambda: (
                self._loop.run(check_engines(fleet, self._trained, wait_limit)) if self._loop else Reachable()
            ),
        )
        if again:
            reachable = replace(reachable, were_lost=True)
        fleet.were_lost = reachable.were_lost
        return self._transport.deliver(fleet, path, reachable, checks, copy)

    def _wait(
        self, wait_limit: WaitLimit, pause_s: float, checks: EngineComparison | None, lost: Exception
    ) -> None:
        """Wait before another attempt; raise `lost` if the time limit has passed. Collective."""

        def wait() -> None:
            if self._loop is None:
                return
            _raise_difference(checks)
            self._loop.run(wait_limit.wait(pause_s, lost))
            logger.warning("engines were lost, delivering the version again: %s", lost)

        on_every_rank(self._ranks, wait)


def _raise_difference(checks: EngineComparison | None) -> None:
    """Raise the error of differing weights first: it says more than that another engine was lost or refused
    the version."""
    if checks is not None:
        checks.raise_difference()
