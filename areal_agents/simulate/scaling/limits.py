"""What a cluster comes near to: each limit, and the share of it that the estimated run uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from areal_agents.simulate.scaling.cluster import USED, ClusterEstimate, Costs
from areal_agents.simulate.scaling.inputs import ScalingInputs


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit; with a load above 1 the run is slower than estimated, or does not start.

    Attributes:
        is_setting: whether a number in a configuration or a check of it is the limit, and not a capacity.
    """

    name: str
    load: float
    is_setting: bool


def limits(inputs: ScalingInputs, costs: Costs, size: ClusterEstimate) -> list[Limit]:
    """Return every limit with its load, in a fixed order."""
    settings = [Limit(name, load, True) for name, load in _settings(inputs, size)]
    return [*settings, *(Limit(name, load, False) for name, load in _capacities(inputs, costs, size))]


def first(found: list[Limit], *, is_setting: bool) -> Limit | None:
    """Return the limit that is exceeded most; None if none is."""
    exceeded = [limit for limit in found if limit.is_setting == is_setting and limit.load >= 1]
    return max(exceeded, key=lambda limit: limit.load, default=None)


def _settings(inputs: ScalingInputs, size: ClusterEstimate) -> Iterator[tuple[str, float]]:
    yield "`max_connections` of PostgreSQL", size.connections / inputs.max_connections
    yield "`engine.replicas`", size.engines / inputs.most_engines
    yield "`cluster.proxies`", size.proxies / inputs.most_proxies
    yield "`cluster.rollouts`", size.rollouts / inputs.most_rollouts


def _capacities(inputs: ScalingInputs, costs: Costs, size: ClusterEstimate) -> Iterator[tuple[str, float]]:
    in_flight = (inputs.max_staleness + 1) * size.groups * inputs.group_size
    held = size.engines * costs.engine.slots
    reading = size.reads_per_s * inputs.read_ms / 1e3 + size.read_rows_per_s * inputs.row_us / 1e6
    # Only the trainer and the rollout processes wait for commits, and of heartbeats nobody is told.
    told_of = size.commits_per_s - size.beats_per_s
    notifying = told_of * (size.rollouts + 1) * inputs.notification_us / 1e6
    beating = size.beats_per_s * inputs.beat_ms / 1e3
    writing = size.calls_per_s * inputs.turn_ms / 1e3  # a proxy writes all that waits in one transaction
    may_take_s = inputs.sync_share * size.step_s
    exchange_s = costs.trainer.exchange_s(size.trainers)
    yield "health checks, in each proxy", size.check_share / inputs.proxy_share
    yield "health checks, in the database", reading / inputs.database_cores
    yield "notifications of commits", notifying / inputs.database_cores
    yield "heartbeats, in the database", beating / inputs.database_cores
    yield "writers of the store, one at a time", writing
    yield f"publishing, `{USED}`", size.publications[USED].trainer_s / may_take_s
    yield "contexts read again after a swap", size.refill_s / may_take_s
    yield "staleness: episodes at a time", held / in_flight
    yield "network of the trainer's shards", exchange_s / costs.trainer.microbatch_s
