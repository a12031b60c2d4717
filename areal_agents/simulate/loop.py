"""Simulates the training loop by discrete events: gate, groups, engines, trainer, and swaps.

The rules are those of the real loop. Groups are submitted in order while those submitted and not yet trained
are at most (η + 1) · groups; their episodes run in order, `concurrency` at a time; the trainer takes the
oldest complete groups as soon as there are enough for a batch; a step ends with a swap in every engine. A
step trains weights of version v and publishes v + 1. Tokens older than η are not trained.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from areal_agents.simulate.engine import NEVER, EngineModel, Generated
from areal_agents.simulate.scenario import Scenario
from areal_agents.simulate.work import EpisodePlan


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulated run; times are in seconds, over the counted steps unless stated otherwise.

    Attributes:
        step_s: mean time between the ends of two steps.
        tokens_per_s: sampled tokens of the batches per second, including masked ones.
        trainer_idle: share of the time in which the trainer waited for groups.
        rollout_idle: share of the time in which an engine generated nothing, as a mean over the engines.
        running: mean number of running requests in one engine while it generates.
        staleness: number of trained tokens by their staleness, without masked ones.
        masked: share of the batches' tokens that were older than η.
        group_staleness: mean of (version that trained a group − version at its submission).
        submitted, trained, in_flight: number of groups over the whole run, including the warm-up; in_flight
            at its end.
        most_in_flight: largest number of groups that were submitted and not yet trained.
        overlap_s: time of the whole run in which trainer and engines worked at the same time.
        end_s: when the last step ended.
    """

    step_s: float
    tokens_per_s: float
    trainer_idle: float
    rollout_idle: float
    running: float
    staleness: dict[int, float]
    masked: float
    group_staleness: float
    submitted: int
    trained: int
    in_flight: int
    most_in_flight: int
    overlap_s: float
    end_s: float

    @property
    def staleness_mean(self) -> float:
        """The mean staleness of the trained tokens."""
        total = sum(self.staleness.values())
        return sum(age * tokens for age, tokens in self.staleness.items()) / total if total else 0.0


def simulate(scenario: Scenario) -> SimulationResult:
    """Simulate `scenario` to its last step."""
    return _Simulation(scenario).run()


@dataclass(slots=True, eq=False)
class _Group:
    number: int
    version: int  # the version at its submission
    missing: int
    tokens: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class _SimulatedEpisode:
    group: _Group
    plan: EpisodePlan
    engine: int  # all its turns run on this engine
    turn: int = 0


@dataclass(slots=True)
class _Step:
    """A trained batch, and the counters at its end."""

    ended: float
    waited: float
    staleness: Counter[int]
    masked: float
    group_ages: list[int]
    busy_s: float
    request_s: float


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self._s = scenario
        self._random = np.random.default_rng(scenario.seed)
        self._engines = [EngineModel(scenario.step_time, scenario.slots) for _ in range(scenario.engines)]
        self._episodes = [0] * scenario.engines
        self._events: list[tuple[float, int, str, _SimulatedEpisode | None]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._version = 0
        self._submitted = 0
        self._most = 0
        self._running = 0
        self._places: deque[_Group] = deque()  # one entry per episode that has not started
        self._complete: list[tuple[int, _Group]] = []
        self._training: list[_Group] | None = None
        self._draining = False
        self._waiting_since = self._waited = 0.0
        self._overlap = 0.0
        self._steps: list[_Step] = []

    def run(self) -> SimulationResult:
        """Run until the last step is trained."""
        self._fill()
        while len(self._steps) < self._s.steps:
            self._advance()
        return self._outcome()

    # -- time -----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Advance to the time of the next event, and process the events of that time."""
        next_event = self._events[0][0] if self._events else NEVER
        now = min([next_event, *(engine.next_end() for engine in self._engines)])
        assert now < NEVER, "no event is left before the last step"
        busy = sum(engine.busy_s for engine in self._engines)
        ended: list[Generated] = [one for engine in self._engines for one in engine.advance(now)]
        worked = (sum(engine.busy_s for engine in self._engines) - busy) / len(self._engines)
        if self._training is not None and not self._draining:
            self._overlap += worked
        self._now = now
        for one in ended:
            self._generated_turn(one)
        while self._events and self._events[0][0] <= now:
            _, _, kind, episode = heapq.heappop(self._events)
            if kind == "trained":
                self._draining = True
            elif kind == "published":
                self._published()
            else:
                assert episode is not None
                self._call(episode)
        if self._draining:
            self._swap()

    def _at(self, delay: float, kind: str, episode: _SimulatedEpisode | None = None) -> None:
        heapq.heappush(self._events, (self._now + delay, next(self._order), kind, episode))

    # -- rollout --------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Start episodes up to `concurrency`, and submit groups as the gate allows."""
        while self._running < self._s.concurrency and (self._places or self._admit()):
            self._running += 1
            engine = min(range(len(self._engines)), key=self._episodes.__getitem__)
            self._episodes[engine] += 1
            episode = _SimulatedEpisode(self._places.popleft(), self._s.work.sample(self._random), engine)
            self._at(self._s.call_s, "call", episode)

    def _admit(self) -> bool:
        in_flight = self._submitted - len(self._steps) * self._s.groups
        bound = self._s.max_staleness
        if bound is not None and in_flight >= (bound + 1) * self._s.groups:
            return False
        group = _Group(self._submitted, self._version, self._s.group_size)
        self._submitted += 1
        self._most = max(self._most, in_flight + 1)
        self._places.extend([group] * self._s.group_size)
        return True

    def _call(self, episode: _SimulatedEpisode) -> None:
        self._engines[episode.engine].submit(episode.plan.tokens[episode.turn], episode)

    def _generated_turn(self, one: Generated) -> None:
        episode: _SimulatedEpisode = one.owner
        episode.group.tokens.update(one.tokens)
        if episode.turn + 1 < len(episode.plan.tokens):
            self._at(episode.plan.between[episode.turn] + self._s.call_s, "call", episode)
            episode.turn += 1
            return
        self._running -= 1
        self._episodes[episode.engine] -= 1
        episode.group.missing -= 1
        if not episode.group.missing:
            heapq.heappush(self._complete, (episode.group.number, episode.group))
            self._train()
        self._fill()

    # -- training -------------------------------------------------------------------------------

    def _train(self) -> None:
        """Start the next batch if the trainer is free and the batch is complete."""
        if self._training is not None or len(self._complete) < self._s.groups:
            return
        self._training = [heapq.heappop(self._complete)[1] for _ in range(self._s.groups)]
        tokens = sum(sum(group.tokens.values()) for group in self._training)
        self._waited = self._now - self._waiting_since
        self._at(self._s.trainer_s + self._s.trainer_s_per_token * tokens, "trained")

    def _swap(self) -> None:
        """Swap the weights: at once, or when the engines are empty if they are not interruptible."""
        if not self._s.interruptible:
            for engine in self._engines:
                engine.hold(True)
            if any(engine.running for engine in self._engines):
                return
        self._draining = False
        for engine in self._engines:
            engine.swap(pause_s=self._s.pause_s, recompute_s_per_token=self._s.recompute_s_per_token)
            engine.hold(False)
        self._version += 1
        self._at(self._s.publish_s, "published")

    def _published(self) -> None:
        assert self._training is not None
        trained_at = self._version - 1
        ages: Counter[int] = Counter()
        for group in self._training:
            for version, tokens in group.tokens.items():
                ages[trained_at - version] += tokens
        bound = self._s.max_staleness
        kept = Counter({age: n for age, n in ages.items() if bound is None or age <= bound})
        self._steps.append(
            _Step(
                ended=self._now,
                waited=self._waited,
                staleness=kept,
                masked=sum(ages.values()) - sum(kept.values()),
                group_ages=[trained_at - group.version for group in self._training],
                busy_s=sum(engine.busy_s for engine in self._engines),
                request_s=sum(engine.request_s for engine in self._engines),
            )
        )
        self._training = None
        self._waiting_since = self._now
        self._train()
        self._fill()

    # -- results --------------------------------------------------------------------------------

    def _outcome(self) -> SimulationResult:
        warm_up = self._s.warm_up
        counted = self._steps[warm_up:]
        before = self._steps[warm_up - 1] if warm_up else None
        span = counted[-1].ended - (before.ended if before else 0.0)
        busy = counted[-1].busy_s - (before.busy_s if before else 0.0)
        requests = counted[-1].request_s - (before.request_s if before else 0.0)
        staleness: Counter[int] = sum((step.staleness for step in counted), Counter())
        masked = sum(step.masked for step in counted)
        tokens = sum(staleness.values())
        engines = len(self._engines)
        trained = len(self._steps) * self._s.groups
        return SimulationResult(
            step_s=span / len(counted),
            tokens_per_s=(tokens + masked) / span,
            trainer_idle=sum(step.waited for step in counted) / span,
            rollout_idle=max(0.0, 1 - busy / (span * engines)),
            running=requests / busy if busy else 0.0,
            staleness=dict(sorted(staleness.items())),
            masked=masked / (tokens + masked),
            group_staleness=float(np.mean([age for step in counted for age in step.group_ages])),
            submitted=self._submitted,
            trained=trained,
            in_flight=self._submitted - trained,
            most_in_flight=self._most,
            overlap_s=self._overlap,
            end_s=self._now,
        )
