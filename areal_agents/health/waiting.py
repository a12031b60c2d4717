"""Says what a run waits for, when it has made no progress for longer than usual."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median
from typing import Any

import httpx

from areal_agents.direct_http import direct_client
from areal_agents.store import Activity, Store
from areal_agents.store.roles import Role

LEAST_S = 60.0  # a run is not looked at before so long without a step
SLOWER = 4.0  # nor before so many times the median step
LOOK_EVERY_S = 10.0
PROBE_S = 2.0  # longest wait for the answer of one server
QUIET_S = 30.0  # agents that have called no model for so long are named


class Waiting:
    """Looks at a run that makes no progress.

    Args:
        engines: the URLs of the engines; (): they are not asked whether they answer.
        proxy: the URL of the proxy.
        groups: the number of groups of a batch.
        places: the role and index of each process of a run on several machines.
        now: the time in seconds.
    """

    def __init__(
        self,
        engines: Sequence[str],
        proxy: str,
        *,
        groups: int,
        places: Collection[tuple[Role, int]] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines, self._proxy, self._groups = engines, proxy, groups
        self._places = places
        self._now = now
        self._rows = -1
        self._since = self._looked = now()
        self._said: str | None = None

    def check(self, rows: Sequence[Mapping[str, Any]], groups: Mapping[str, int], store: Store) -> str | None:
        """Return what the run waits for, or None if it makes progress; cheap, so it can be called often.

        Args:
            rows: the rows of metrics.jsonl.
            groups: the number of training groups in each state.
        """
        now = self._now()
        if len(rows) != self._rows:
            self._rows, self._since, self._said = len(rows), now, None
        usual = median([row["step_s"] for row in rows[-20:]]) if rows else 0.0
        if now - self._since < max(LEAST_S, SLOWER * usual) or now - self._looked < LOOK_EVERY_S:
            return self._said
        self._looked = now
        what = self._absent(groups, store) or self.reason(groups, store.activity(), started=bool(rows))
        self._said = f"no step for {now - self._since:.0f} s: {what}"
        return self._said

    def reason(self, groups: Mapping[str, int], activity: Activity, *, started: bool) -> str:
        """Return what the next step waits for; asks the servers whether they answer.

        Args:
            started: whether there has been a step.
        """
        dead = [url for url in self._engines if not _answers(url)]
        if dead and len(dead) == len(self._engines):
            return f"no engine answers ({', '.join(dead)}); see the log of the engine"
        if not _answers(self._proxy):
            return f"the proxy does not answer ({self._proxy}); see logs/proxy.log"
        lost = f". {len(dead)} of {len(self._engines)} engines do not answer: {', '.join(dead)}" * bool(dead)
        return self._of_a_serving_run(groups, activity, started) + lost

    def _absent(self, groups: Mapping[str, int], store: Store) -> str | None:
        """Return which places of a run on several machines no process has; None if all are taken."""
        alive = {(row.role, row.index) for row in store.role_rows() if row.is_alive} if self._places else ()
        # A rollout process may end before the last steps are trained.
        has_groups = self._ready(groups) >= self._groups
        wanted = [place for place in self._places if not (has_groups and place[0] == "rollout")]
        absent = [f"{role} {index}" for role, index in wanted if (role, index) not in alive]
        if not absent:
            return None
        return f"no process is {', '.join(absent)}; what started it has to start it again"

    def _ready(self, groups: Mapping[str, int]) -> int:
        return groups.get("complete", 0) + groups.get("leased", 0)

    def _of_a_serving_run(self, groups: Mapping[str, int], activity: Activity, started: bool) -> str:
        ready = self._ready(groups)
        if ready >= self._groups:
            return (
                f"{ready} groups are ready, and the trainer has not finished its step; areal-agents diagnose "
                "shows where each of its ranks is"
            )
        missing = f"the trainer has {ready} of the {self._groups} groups of a batch"
        if activity.unrewarded:
            return f"{missing}, and {activity.unrewarded} ended episodes wait for their reward"
        if activity.open_evaluations and not started:
            return f"training begins when the {activity.open_evaluations} open held-out episodes have ended"
        if not activity.open_episodes:
            return f"{missing}, and no episode is running; see logs/rollout.log"
        assert activity.oldest_opened_at is not None
        age = time.time() - activity.oldest_opened_at
        running = (
            f"{missing}; {activity.open_episodes} episodes are running; the oldest began {age:.0f} s ago"
        )
        quiet = None if activity.last_turn_at is None else time.time() - activity.last_turn_at
        if quiet is None or quiet > QUIET_S:
            since = "yet" if quiet is None else f"for {quiet:.0f} s"
            return (
                f"{running} ({activity.oldest_id}); no model call has ended {since}: the agents, their "
                "tools or their environment wait"
            )
        return f"{running}; the last model call ended {quiet:.0f} s ago"


def _answers(url: str) -> bool:
    try:
        with direct_client(timeout_s=PROBE_S) as client:
            return client.get(url + "/health").status_code < 500
    except httpx.HTTPError:
        return False
