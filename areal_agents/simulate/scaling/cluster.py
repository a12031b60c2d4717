"""One cluster: the split of its GPUs, the simulated run, and the load of proxies, store and network.

The split is the one whose two sides take equally long by arithmetic. The simulator then runs a slice of the
cluster: a few engines with their share of the batch, a trainer whose batches take as long as the whole one's,
and the swaps of the whole cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from areal_agents.errors import ConfigError
from areal_agents.simulate.engine import StepTime
from areal_agents.simulate.loop import SimulationResult, simulate
from areal_agents.simulate.scaling.inputs import ScalingInputs
from areal_agents.simulate.scaling.work import (
    EngineCosts,
    EpisodeCosts,
    ModelCosts,
    TrainerCosts,
    engine_costs,
    episode_costs,
    model_costs,
    trainer_costs,
)
from areal_agents.simulate.scenario import Scenario
from areal_agents.simulate.work import LogNormalWork

Transport = Literal["disk", "broadcast", "delta", "lora"]
TRANSPORTS: tuple[Transport, ...] = ("disk", "broadcast", "delta", "lora")
USED: Transport = "broadcast"  # in the simulated run

_SLICE = (3, 6)  # engines of the simulated slice
_COUNTED = 8  # simulated batches that are counted
_DELTA_BYTES = 3  # bytes sent per changed byte in bfloat16: the value and its position, see docs/metrics.md
_HOUR_S, _DAY_S = 3600.0, 86_400.0


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of one episode on one engine and one trainer, the same for every size of the cluster."""

    model: ModelCosts
    episode: EpisodeCosts
    engine: EngineCosts
    trainer: TrainerCosts


@dataclass(frozen=True, slots=True)
class Publication:
    """One version on its way to the engines.

    Attributes:
        sent_bytes: what leaves the trainer.
        received_bytes: what arrives, summed over the engines.
        trainer_s: the time of the trainer.
        pause_s: the part of it in which engines pause.
    """

    sent_bytes: float
    received_bytes: float
    trainer_s: float
    pause_s: float


@dataclass(frozen=True, slots=True)
class ClusterEstimate:
    """The estimate of one size; rates are per second of the simulated run.

    Attributes:
        gpus, engines, trainers: GPUs, replicas of the engine, and GPUs that train.
        groups: groups in a batch.
        open_episodes: episodes at a time.
        simulated: the run of a slice of the cluster.
        tokens_per_s: sampled tokens of the whole cluster.
        publications: a version by each transport.
        refill_s: how long an engine recomputes its contexts after a swap.
        proxies, rollouts: processes.
        call_ms: processor time of a call in a proxy.
        check_share: share of a core that the health checks take in each proxy.
        proxy_mb: memory of a proxy.
        processes: all processes with a row in the table of roles.
        writes_per_s: rows that are inserted or updated in the store.
        commits_per_s: transactions, if each call, episode and heartbeat has its own.
        store_bytes_per_s: of the turns.
        reads_per_s, read_rows_per_s: by the proxies' health checks and reads of addresses.
    """

    gpus: int
    engines: int
    trainers: int
    groups: int
    open_episodes: float
    simulated: SimulationResult
    tokens_per_s: float
    publications: dict[Transport, Publication]
    refill_s: float
    proxies: int
    rollouts: int
    processes: int
    calls_per_s: float
    episodes_per_s: float
    call_ms: float
    check_share: float
    proxy_mb: float
    turn_bytes: float
    writes_per_s: float
    commits_per_s: float
    store_bytes_per_s: float
    beats_per_s: float
    reads_per_s: float
    read_rows_per_s: float
    connections: int
    dollars_per_day: float

    @property
    def step_s(self) -> float:
        """Seconds of a training step."""
        return self.simulated.step_s

    @property
    def dollars_per_million_tokens(self) -> float:
        """The cost of a million sampled tokens, trained."""
        return self.dollars_per_day / (self.tokens_per_s * _DAY_S) * 1e6


def costs_of(inputs: ScalingInputs) -> Costs:
    """Return the costs per episode, engine and trainer. Raises ConfigError for a model that does not fit."""
    model, episode = model_costs(inputs.model, lora_rank=inputs.lora_rank), episode_costs(inputs)
    try:
        return Costs(
            model, episode, engine_costs(inputs, model, episode), trainer_costs(inputs, model, episode)
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def estimate(inputs: ScalingInputs, costs: Costs, *, gpus: int) -> ClusterEstimate | None:
    """Return the estimate for `gpus`; None if the model cannot be trained on so few."""
    groups = groups_of(inputs, gpus)
    possible = splits(inputs, costs, gpus=gpus)
    if not possible:
        return None
    engines, trainers = min(possible, key=lambda split: step_s(inputs, costs, groups, *split))
    return _estimate(inputs, costs, gpus, engines, trainers)


def groups_of(inputs: ScalingInputs, gpus: int) -> int:
    """Return the groups in a batch of a cluster."""
    return min(inputs.most_groups, max(1, round(inputs.groups_per_gpu * gpus)))


def splits(inputs: ScalingInputs, costs: Costs, *, gpus: int) -> list[tuple[int, int]]:
    """Return the possible numbers of engines and training GPUs. Beyond one node, the trainer has whole
    nodes."""
    unit, node = inputs.model.gpus_per_engine, inputs.gpus_per_node
    return [
        (engines, trainers)
        for engines in range(1, (gpus - 1) // unit + 1)
        for trainers in [gpus - engines * unit]
        if trainers >= costs.trainer.least_gpus and (gpus <= node or trainers % node == 0)
    ]


def step_s(inputs: ScalingInputs, costs: Costs, groups: int, engines: int, trainers: int) -> float:
    """Return the seconds of a step by arithmetic: the slower side, each with its part of a swap."""
    batch = groups * inputs.group_size
    each = min(costs.engine.slots, (inputs.max_staleness + 1) * batch / engines)
    swap = publication(inputs, costs.model, USED, engines)
    rate = engines * costs.engine.tokens_per_s(each, costs.episode)
    rollout = batch * costs.episode.sampled_tokens / rate + swap.pause_s + costs.engine.refill_s
    return max(rollout, costs.trainer.batch_s(trainers, batch) + swap.trainer_s)


def publication(inputs: ScalingInputs, model: ModelCosts, transport: Transport, engines: int) -> Publication:
    """Return what it takes to publish a version to so many engines."""
    whole, network = model.weight_bytes, inputs.network * inputs.network_share
    calls = engines * inputs.control_calls * inputs.control_ms / 1000
    buckets = engines * math.ceil(whole / inputs.bucket_bytes) * inputs.control_ms / 1000
    if transport in ("disk", "lora"):
        size = whole if transport == "disk" else model.adapter_bytes
        read = engines * size / inputs.files_read + calls
        pause = read if transport == "disk" else 0.0
        return Publication(size, engines * size, size / inputs.files_write + read, pause)
    if transport == "broadcast":
        wire = whole / network + buckets + calls  # each member of the group passes on what it receives
        return Publication(whole, engines * whole, wire, wire)
    sent = engines * min(1.0, _DELTA_BYTES * inputs.density) * whole
    wire = sent / network + buckets + calls
    return Publication(sent, sent, wire, calls)  # a staging engine pauses for the swap alone


def _estimate(inputs: ScalingInputs, costs: Costs, gpus: int, engines: int, trainers: int) -> ClusterEstimate:
    groups = groups_of(inputs, gpus)
    batch = groups * inputs.group_size
    publications = {name: publication(inputs, costs.model, name, engines) for name in TRANSPORTS}
    scenario = slice_of(inputs, costs, groups=groups, engines=engines, trainers=trainers)
    simulated = simulate(scenario)
    episodes_per_s = batch / simulated.step_s
    calls_per_s = episodes_per_s * inputs.turns
    open_episodes = min(engines * costs.engine.slots, (inputs.max_staleness + 1) * batch)

    call_ms = (
        inputs.call_ms
        + inputs.call_ms_per_1k_prompt * costs.episode.prompt / 1000
        + inputs.call_ms_per_1k_sampled * costs.episode.sampled / 1000
    )
    looking_ms = inputs.check_ms / inputs.check_s + inputs.address_us / 1000 / inputs.look_s
    check_share = engines * looking_ms / 1000
    left = inputs.proxy_share - check_share
    proxies = math.ceil(calls_per_s * call_ms / 1000 / (left if left > 0 else inputs.proxy_share))

    nodes = math.ceil(trainers / inputs.gpus_per_node)
    rollouts = math.ceil(open_episodes / inputs.episodes_per_rollout)
    processes = engines + proxies + rollouts + nodes + 1
    # A process that serves or trains has a second one beside it, which has the place in the table of roles.
    connections = inputs.connections * (processes + proxies + rollouts + 1)
    beats = processes / inputs.beat_s
    # of an episode: opened, ended, its reward; of a group: task, group, completion, lease, its end
    rows_per_episode = inputs.turns + 3 + 5 / inputs.group_size
    commits_per_episode = inputs.turns + 3
    turn_bytes = (
        costs.episode.sampled * (12 + inputs.text_per_token)  # id, logprob and version of a token
        + (costs.episode.rows / inputs.turns - costs.episode.sampled) * (4 + inputs.text_per_token)
        + inputs.turn_overhead_bytes
    )
    checks, looks = proxies * engines / inputs.check_s, proxies / inputs.look_s
    return ClusterEstimate(
        gpus=gpus,
        engines=engines,
        trainers=trainers,
        groups=groups,
        open_episodes=open_episodes,
        simulated=simulated,
        tokens_per_s=simulated.tokens_per_s * groups / scenario.groups,
        publications=publications,
        refill_s=costs.engine.refill_s,
        proxies=proxies,
        rollouts=rollouts,
        processes=processes,
        calls_per_s=calls_per_s,
        episodes_per_s=episodes_per_s,
        call_ms=call_ms,
        check_share=check_share,
        proxy_mb=inputs.proxy_mb + inputs.episode_mb * open_episodes / proxies,
        turn_bytes=turn_bytes,
        writes_per_s=episodes_per_s * rows_per_episode + beats,
        commits_per_s=episodes_per_s * commits_per_episode + beats,
        store_bytes_per_s=calls_per_s * turn_bytes,
        beats_per_s=beats,
        reads_per_s=checks + looks,
        read_rows_per_s=checks + looks * engines,
        connections=connections,
        dollars_per_day=gpus * inputs.gpu_hour * _DAY_S / _HOUR_S,
    )


def slice_of(inputs: ScalingInputs, costs: Costs, *, groups: int, engines: int, trainers: int) -> Scenario:
    """Return the part of the cluster that is simulated: engines and groups in nearly the same proportion."""
    few, most = _SLICE
    part = (engines, groups)
    if engines > most:
        part = min(
            ((count, max(1, round(groups * count / engines))) for count in range(few, most + 1)),
            key=lambda pair: abs(pair[1] / pair[0] * engines / groups - 1),
        )
    count, own_groups = part
    own, batch = own_groups * inputs.group_size, groups * inputs.group_size
    swap = publication(inputs, costs.model, USED, engines)
    warm_up = inputs.max_staleness + 2  # the gate is full by then
    return Scenario(
        work=LogNormalWork(inputs.tokens.log_normal(), inputs.turns, inputs.tool_s.log_normal()),
        groups=own_groups,
        group_size=inputs.group_size,
        max_staleness=inputs.max_staleness,
        concurrency=count * costs.engine.slots,
        step_time=StepTime(costs.engine.base_s, costs.engine.per_request_s),
        engines=count,
        slots=costs.engine.slots,
        trainer_s_per_token=costs.trainer.batch_s(trainers, batch) / (own * costs.episode.sampled_tokens),
        publish_s=swap.trainer_s,
        pause_s=swap.pause_s + costs.engine.refill_s,
        steps=warm_up + _COUNTED,
        warm_up=warm_up,
    )
