"""AReaL's published throughput by η (arXiv 2505.24298), and a cluster that explains it.

The figures are the effective training throughput in thousand tokens per second, of a 1.5B model on 8 H800
GPUs, with 8k of context and batches of 64 × 16. Values that the paper does not give are derived or fitted
here; docs/simulator.md describes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from areal_agents.simulate.engine import StepTime
from areal_agents.simulate.loop import simulate
from areal_agents.simulate.scenario import Scenario
from areal_agents.simulate.work import LogNormal, LogNormalWork

THROUGHPUT: Mapping[int, float] = {0: 27.1, 1: 47.8, 2: 47.8, 4: 49.0, 8: 51.5}

CLUSTER = Scenario(
    work=LogNormalWork(LogNormal(mean=4000, sigma=0.7, cap=7168)),  # fitted; the cap is 8k minus a prompt
    groups=64,
    group_size=16,
    max_staleness=0,
    engines=6,  # AReaL's ratio of 3:1 on 8 GPUs; the other two GPUs train
    slots=256,  # assumed, as are the swaps
    concurrency=6 * 256,
    step_time=StepTime(base_s=0.004, per_request_s=5e-5),  # fitted: weights and overheads; keys and values
    trainer_s_per_token=1.9e-5,  # fitted: 53k tokens/s on two GPUs
    publish_s=3.0,
    pause_s=2.0,
    recompute_s_per_token=1 / 100_000,
)


def throughput(bound: int, *, steps: int = 12) -> float:
    """Return the thousand tokens per second that CLUSTER trains at η = `bound`, once the queue is filled."""
    warm_up = 4 + 2 * bound
    scenario = replace(CLUSTER, max_staleness=bound, steps=warm_up + steps, warm_up=warm_up)
    return simulate(scenario).tokens_per_s / 1000
