"""The simulated loop: its invariants, its times in simple cases, and the measurements of the paper."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_cluster import THROUGHPUT, throughput

from areal_agents.simulate import LogNormal, LogNormalWork, Scenario, StepTime, simulate
from areal_agents.simulate.engine import EngineModel

CONSTANT = Scenario(
    work=LogNormalWork(LogNormal(50)), groups=4, group_size=4, max_staleness=0, concurrency=64,
    step_time=StepTime(0.01, 0.001), slots=64, trainer_s=0.5, publish_s=0.25, steps=12, warm_up=2,
)  # fmt: skip
UNEVEN = replace(
    CONSTANT,
    work=LogNormalWork(LogNormal(50, 1.0, 400), turns=3, tool_s=LogNormal(0.3, 1.0)),
    steps=20, warm_up=8, pause_s=0.02, recompute_s_per_token=1e-5, trainer_s=0.2, trainer_s_per_token=1e-4,
)  # fmt: skip

scenarios = st.builds(
    Scenario,
    work=st.builds(
        LogNormalWork,
        tokens=st.builds(LogNormal, st.floats(1, 100), st.sampled_from([0.0, 0.5, 1.5]), st.just(500.0)),
        turns=st.integers(1, 3),
        tool_s=st.builds(LogNormal, st.floats(0, 2), st.sampled_from([0.0, 1.0])),
    ),
    groups=st.integers(1, 4),
    group_size=st.integers(1, 4),
    max_staleness=st.none() | st.integers(0, 5),
    concurrency=st.integers(1, 40),
    step_time=st.builds(StepTime, st.floats(0.001, 0.1), st.floats(0, 0.01)),
    engines=st.integers(1, 3),
    slots=st.integers(1, 16),
    call_s=st.floats(0, 0.2),
    trainer_s=st.floats(0, 2),
    trainer_s_per_token=st.floats(0, 0.01),
    publish_s=st.floats(0, 0.5),
    pause_s=st.floats(0, 0.5),
    recompute_s_per_token=st.floats(0, 1e-3),
    interruptible=st.booleans(),
    steps=st.integers(2, 12),
    seed=st.integers(0, 9),
)


@settings(max_examples=150, deadline=None)
@given(scenarios)
def test_every_group_is_accounted_for_and_the_bounds_hold(scenario: Scenario) -> None:
    outcome = simulate(scenario)
    bound = scenario.max_staleness
    assert outcome.trained == scenario.steps * scenario.groups
    assert outcome.submitted == outcome.trained + outcome.in_flight
    assert min(outcome.staleness, default=0) >= 0
    assert 0 <= outcome.trainer_idle <= 1 and 0 <= outcome.rollout_idle <= 1
    if bound is not None:
        assert outcome.most_in_flight <= (bound + 1) * scenario.groups
        assert outcome.group_staleness <= bound  # the gate bounds only the mean
        assert max(outcome.staleness, default=0) <= bound  # consumed tokens have a hard bound
    if bound == 0:
        assert outcome.masked == 0 and outcome.overlap_s == 0


@pytest.mark.parametrize("swap", [{}, {"pause_s": 0.1}, {"interruptible": False}])
def test_a_synchronous_step_is_generation_then_training(swap: dict) -> None:
    # 16 requests of 50 tokens at 0.01 + 16 · 0.001 s a step, then 0.5 + 0.25 s. Nothing runs at a swap, and
    # its pause is over when the trainer has published.
    outcome = simulate(replace(CONSTANT, **swap))
    assert outcome.step_s == pytest.approx(50 * 0.026 + 0.75)
    assert outcome.trainer_idle == pytest.approx(1.3 / 2.05)
    assert outcome.tokens_per_s == pytest.approx(16 * 50 / 2.05)
    assert outcome.running == pytest.approx(16)


def test_an_asynchronous_step_takes_the_longer_of_generation_and_training() -> None:
    trainer_bound = simulate(replace(CONSTANT, max_staleness=4, trainer_s=3.0, warm_up=6))
    assert trainer_bound.step_s == pytest.approx(3.25)
    assert trainer_bound.group_staleness == pytest.approx(4)
    # 32 episodes at a time end together: two batches every 50 · 0.042 s, each trained in 0.2 s.
    engine_bound = simulate(
        replace(CONSTANT, max_staleness=3, concurrency=32, trainer_s=0.2, publish_s=0.0, steps=18)
    )
    assert engine_bound.step_s == pytest.approx(50 * 0.042 / 2, rel=0.02)


def test_the_slots_of_an_engine_bound_its_running_requests() -> None:
    # 16 requests in 4 slots: four waves.
    outcome = simulate(replace(CONSTANT, slots=4))
    assert outcome.step_s == pytest.approx(4 * 50 * 0.014 + 0.75)


def test_engines_share_the_episodes() -> None:
    outcome = simulate(replace(CONSTANT, engines=2))
    assert outcome.step_s == pytest.approx(50 * 0.018 + 0.75)


def test_tools_and_calls_add_to_the_time_of_a_step() -> None:
    work = LogNormalWork(LogNormal(50), turns=3, tool_s=LogNormal(0.4))
    outcome = simulate(replace(CONSTANT, work=work, call_s=0.1))
    assert outcome.step_s == pytest.approx(3 * 50 * 0.026 + 3 * 0.1 + 2 * 0.4 + 0.75)


def test_throughput_grows_with_the_staleness_bound() -> None:
    speeds = [simulate(replace(UNEVEN, max_staleness=bound)).tokens_per_s for bound in (0, 1, 2, 4, 8)]
    assert all(later >= 0.98 * earlier for earlier, later in zip(speeds, speeds[1:], strict=False)), speeds
    assert speeds[3] > 1.3 * speeds[0]


def test_a_swap_that_waits_for_running_requests_takes_longer() -> None:
    interrupted, drained = (
        simulate(replace(UNEVEN, max_staleness=4, interruptible=mode)) for mode in (True, False)
    )
    assert drained.step_s > 1.1 * interrupted.step_s


def test_tokens_are_attributed_to_the_version_that_sampled_them() -> None:
    engine = EngineModel(StepTime(1.0), slots=2)
    engine.submit(10, "a")
    assert engine.advance(4.0) == []
    engine.swap(pause_s=2.0, recompute_s_per_token=0.25)  # 4 recomputed tokens add 1 s: 3 s in all
    engine.submit(3, "b")
    assert engine.next_end() == 4 + 3 + 3
    (b,) = engine.advance(10.0)
    (a,) = engine.advance(13.0)
    assert (b.owner, b.tokens, a.owner, a.tokens) == ("b", {1: 3.0}, "a", {0: 4.0, 1: 6.0})
    assert engine.busy_s == 10 and engine.retracted == 4


def test_log_normal_has_its_mean() -> None:
    values = LogNormal(48, 1.0).sample(np.random.default_rng(0), 200_000)
    assert values.mean() == pytest.approx(48, rel=0.02)
    assert np.log(values).std() == pytest.approx(1.0, rel=0.02)
    assert LogNormal(48, 1.0, 100).sample(np.random.default_rng(0), 1000).max() == 100


@pytest.fixture(scope="module")
def synchronous() -> float:
    """The throughput of synchronous training."""
    return throughput(0, steps=6)


@pytest.mark.parametrize("bound", [1, 2, 4, 8])
def test_the_speedup_over_synchronous_training_is_near_the_published_one(
    bound: int, synchronous: float
) -> None:
    ratio = throughput(bound, steps=6) / synchronous
    assert ratio == pytest.approx(THROUGHPUT[bound] / THROUGHPUT[0], rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("bound", sorted(THROUGHPUT))
def test_the_throughput_is_near_the_published_table(bound: int) -> None:
    assert throughput(bound) == pytest.approx(THROUGHPUT[bound], rel=0.15)


def test_invalid_values_are_refused() -> None:
    with pytest.raises(ValueError, match="groups must be at least 1, got 0"):
        replace(CONSTANT, groups=0)
    with pytest.raises(ValueError, match="pause_s must be at least 0, got nan"):
        replace(CONSTANT, pause_s=math.nan)
    with pytest.raises(ValueError, match="must be at least 0 and not both 0"):
        StepTime(0.0, 0.0)
