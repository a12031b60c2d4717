"""The estimate for large clusters: its figures equal independent calculations, and the page shows the output
of the program."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from annotated_types import Le
from typer.testing import CliRunner

from areal_agents.algorithms.packing.flops import ModelShape
from areal_agents.cli import app
from areal_agents.cluster.config import ClusterConfig
from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Turn
from areal_agents.errors import ConfigError
from areal_agents.inference.config import EngineConfig
from areal_agents.inference.pool.addresses import LOOK_S
from areal_agents.inference.pool.limits import PoolLimits
from areal_agents.simulate import simulate
from areal_agents.simulate.parameters import Distribution
from areal_agents.simulate.scaling.cluster import (
    TRANSPORTS,
    ClusterEstimate,
    Costs,
    costs_of,
    estimate,
    publication,
    slice_of,
    splits,
    step_s,
)
from areal_agents.simulate.scaling.inputs import ScalingInputs, listed, read_inputs
from areal_agents.simulate.scaling.limits import limits
from areal_agents.simulate.scaling.tables import ScalingReport, scaling_report
from areal_agents.simulate.scaling.work import mean
from areal_agents.simulate.work import LogNormal
from areal_agents.store.codec import encode_turn
from areal_agents.store.roles import BEAT_S

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "scaling.md").read_text()

# Two turns of exactly 100 tokens without tools, so that the simulation takes no time.
SHORT = ("turns=2", "tokens={mean: 100}", "tool_s={mean: 0}", "group_size=4")


@pytest.fixture(scope="module")
def report() -> ScalingReport:
    """The report that the page shows."""
    return scaling_report(read_inputs(()))


def _costs(*overrides: str) -> tuple[ScalingInputs, Costs]:
    inputs = read_inputs(overrides)
    return inputs, costs_of(inputs)


def _size(*overrides: str, gpus: int) -> tuple[ScalingInputs, Costs, ClusterEstimate]:
    inputs, costs = _costs(*overrides)
    size = estimate(inputs, costs, gpus=gpus)
    assert size is not None
    return inputs, costs, size


# -- the page ---------------------------------------------------------------------------------------


def test_the_tables_of_the_page_are_what_the_program_prints(report: ScalingReport) -> None:
    names = [name for name, _ in report.tables()]
    missing = [name for name, text in report.tables() if text not in PAGE]
    assert not missing, "write the output of areal-agents simulate --scaling into docs/scaling.md"
    assert len(names) == 7


@pytest.mark.slow
def test_the_tables_of_the_larger_model_are_what_the_program_prints() -> None:
    tables = dict(scaling_report(read_inputs(["model=Qwen3-32B"])).tables())
    assert tables["GPUs and speed"] in PAGE and tables["Limits"] in PAGE


def test_the_page_says_first_that_nothing_was_run() -> None:
    assert "Nothing on this page was run" in PAGE.split("\n\n")[1]
    assert PAGE.split("\n## ")[-1].startswith("What would prove it wrong")


# -- the costs of a model and an episode --------------------------------------------------------------


@pytest.mark.parametrize(("name", "counted"), [("Qwen3-8B", 8_190_735_360), ("Qwen3-32B", 32_762_123_264)])
def test_a_model_has_the_weights_and_flops_of_its_published_shape(name: str, counted: int) -> None:
    inputs, costs = _costs(f"model={name}")
    model, shape = costs.model, inputs.model
    assert model.parameters == pytest.approx(counted, rel=1e-3)  # without the norms
    assert model.cache_bytes == 2 * shape.layers * shape.kv_heads * shape.head_dim * 2
    other = ModelShape(
        layers=shape.layers, hidden=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, intermediate=shape.intermediate, vocab=shape.vocab,
    )  # fmt: skip
    rows = 5000
    exact = other.flops(rows=rows, pairs=sum(range(1, rows + 1)), predictions=700)
    assert model.forward_flops(rows=rows, predictions=700) == pytest.approx(exact, rel=1e-3)


def test_an_adapter_has_two_thin_matrices_for_each_matrix() -> None:
    _, costs = _costs("lora_rank=8")
    by_hand = 36 * 8 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    assert costs.model.adapter_bytes == 4 * by_hand


def test_an_episode_is_counted_turn_by_turn() -> None:
    inputs, costs = _costs("turns=3", "tokens={mean: 10}", "first_prompt_tokens=100", "new_prompt_tokens=7")
    episode = costs.episode
    assert episode.prompt == np.mean([100, 117, 134])
    assert episode.context == np.mean([105, 122, 139])
    assert (episode.rows, episode.sampled_tokens) == (144, 30)
    assert episode.new_prompt == 114 / 30
    assert mean(inputs.tool_s) == pytest.approx(
        LogNormal(3, 1, 60).sample(np.random.default_rng(0), 400_000).mean(), rel=0.01
    )
    assert mean(Distribution(mean=9, cap=4)) == 4


def test_the_costs_of_an_engine_and_the_trainer_equal_those_by_hand() -> None:
    inputs, costs = _costs()
    model, episode, engine, trainer = costs.model, costs.episode, costs.engine, costs.trainer
    free = 79.6 * 1024**3 * 0.85 - 16.38e9
    assert engine.slots == int(free / (episode.context * 147_456))
    assert engine.base_s == pytest.approx(2e-3 + 16.38e9 / (3.35e12 * 0.7), rel=1e-3)
    decode = 3e-5 + episode.context * 147_456 / (3.35e12 * 0.7)
    a_token = (model.row_flops + model.pair_flops * episode.context) / (989e12 * 0.33)
    assert engine.per_request_s == pytest.approx(decode + episode.new_prompt * a_token)

    running = engine.running(20, episode)
    call_s = episode.sampled * (engine.base_s + running * engine.per_request_s)
    assert running / 20 == pytest.approx(call_s / (call_s + episode.tool_s), rel=1e-6)
    rate = engine.tokens_per_s(20, episode)
    assert rate == pytest.approx(20 * episode.sampled / (call_s + episode.tool_s), rel=1e-6)
    assert engine.tokens_per_s(1000, episode) == engine.tokens_per_s(engine.slots, episode)

    forward = model.forward_flops(rows=episode.rows, predictions=episode.sampled_tokens)
    assert trainer.gpu_s_per_episode == pytest.approx(4 * forward / (989e12 * 0.33))
    assert trainer.batch_s(8, 100) == pytest.approx(100 * trainer.gpu_s_per_episode / 8)
    assert trainer.exchange_s(1) == 0
    assert trainer.exchange_s(8) == pytest.approx(8 * model.parameters / (450e9 * 0.8))
    assert trainer.exchange_s(16) == pytest.approx(8 * model.parameters / (50e9 * 0.8))
    _, slow = _costs("network=1e9")
    exposed = slow.trainer.exchange_s(16) / slow.trainer.microbatch_s
    assert exposed > 1 and slow.trainer.batch_s(16, 100) == pytest.approx(exposed * trainer.batch_s(16, 100))


def test_the_prefill_share_follows_from_published_measurements() -> None:
    shape = "model={layers: 40, hidden: 5120, intermediate: 17408, heads: 40}"
    flops = costs_of(read_inputs([shape])).model.forward_flops(rows=32_000, predictions=0) / 32_000
    assert ScalingInputs().prefill_share == pytest.approx(8299 * flops / 989e12, abs=0.01)


def test_the_times_of_a_transaction_equal_those_of_the_benchmark() -> None:
    fixed, turn = 0.00129, ScalingInputs().turn_ms / 1000  # seconds of a transaction, and of each turn in it
    # 64 writers, each waiting for the commit of its turn, are divided among processes that write in turn.
    assert 64 / (4 * (fixed + 16 * turn)) == pytest.approx(np.mean([3040, 3528, 3762]), rel=0.01)
    assert 64 / (fixed + 64 * turn) == pytest.approx(4347, rel=0.01)


# -- the size of a cluster ----------------------------------------------------------------------------


def test_the_smallest_trainer_is_that_of_the_memory_table() -> None:
    rows = {
        cells[1].strip(): [float(cell) for cell in cells[2:8]]
        for line in (ROOT / "docs" / "gpus.md").read_text().splitlines()
        if line.startswith(("| 8B", "| 32B"))
        for cells in [line.split("|")]
    }
    for name, row in rows.items():
        inputs, costs = _costs(f"model=Qwen3-{name}")
        for gpus, listed_gib in zip((4, 8, 16), row[2:5], strict=True):
            needed = 16 * costs.model.parameters / 2**30 / gpus + inputs.model.trainer_gib
            assert needed == pytest.approx(listed_gib, abs=0.2)
        least = costs.trainer.least_gpus
        room = 79.6 * 0.97 - 1.5
        fixed = inputs.model.trainer_gib
        assert 16 * costs.model.parameters / 2**30 / least + fixed <= room
        assert 16 * costs.model.parameters / 2**30 / (least - 1) + fixed > room


def test_splits_keep_whole_engines_and_whole_nodes() -> None:
    inputs, costs = _costs()
    assert splits(inputs, costs, gpus=8) == [(5, 3), (4, 4), (3, 5), (2, 6), (1, 7)][::-1]
    assert all(trainers % 8 == 0 for _, trainers in splits(inputs, costs, gpus=64))
    inputs, costs = _costs("model=Qwen3-32B")
    assert splits(inputs, costs, gpus=8) == []
    assert splits(inputs, costs, gpus=64) == [(engines, 64 - 4 * engines) for engines in (2, 4, 6, 8, 10)]


def test_the_chosen_split_is_the_fastest_by_arithmetic(report: ScalingReport) -> None:
    inputs, costs = report.inputs, report.costs
    for size in report.sizes:
        best = step_s(inputs, costs, size.groups, size.engines, size.trainers)
        for engines, trainers in splits(inputs, costs, gpus=size.gpus):
            assert best <= step_s(inputs, costs, size.groups, engines, trainers)
        # The simulation has random lengths and a gate, which the arithmetic leaves out.
        assert best == pytest.approx(size.step_s, rel=0.2) and best <= size.step_s


def test_a_slice_runs_like_the_whole_cluster() -> None:
    inputs, costs = _costs(*SHORT, "gpus=[36]", "groups_per_gpu=2")
    part = slice_of(inputs, costs, groups=72, engines=24, trainers=12)
    assert part.engines < 24 and part.groups == 3 * part.engines
    whole = replace(
        part, engines=24, groups=72, concurrency=24 * costs.engine.slots,
        trainer_s_per_token=part.trainer_s_per_token * part.groups / 72,
    )  # fmt: skip
    assert simulate(part).step_s == pytest.approx(simulate(whole).step_s, rel=0.03)


def test_the_times_of_publishing_equal_those_by_hand() -> None:
    inputs, costs = _costs()
    found = {name: publication(inputs, costs.model, name, 100) for name in TRANSPORTS}
    whole = costs.model.weight_bytes
    disk, broadcast, delta, lora = (found[name] for name in TRANSPORTS)
    assert disk.trainer_s == pytest.approx(whole / 2e9 + 100 * whole / 40e9 + 100 * 5e-3)
    assert disk.pause_s == pytest.approx(disk.trainer_s - whole / 2e9)
    assert broadcast.trainer_s == broadcast.pause_s == pytest.approx(whole / 40e9 + 100 * (17 + 5) * 1e-3)
    assert (broadcast.sent_bytes, broadcast.received_bytes) == (whole, 100 * whole)
    assert delta.sent_bytes == delta.received_bytes == pytest.approx(100 * 0.03 * whole)
    assert delta.trainer_s == pytest.approx(3 * whole / 40e9 + 100 * 22e-3)
    assert lora.trainer_s == pytest.approx(costs.model.adapter_bytes * (1 / 2e9 + 100 / 40e9) + 0.5)
    assert lora.pause_s == 0
    dense = publication(read_inputs(["density=1"]), costs.model, "delta", 1)
    assert dense.sent_bytes == whole  # a weight whose changes are larger than itself is sent whole


def test_the_rates_follow_from_the_step(report: ScalingReport) -> None:
    for size in report.sizes:
        batch = size.groups * 16
        episodes = batch / size.step_s
        assert size.calls_per_s == pytest.approx(16 * episodes)
        assert size.tokens_per_s == pytest.approx(episodes * report.costs.episode.sampled_tokens, rel=0.02)
        assert size.call_ms == pytest.approx(
            1.35 + 0.029 * report.costs.episode.prompt / 1e3 + 0.948, abs=0.01
        )
        nodes = -(-size.trainers // 8)
        assert size.processes == size.engines + size.proxies + size.rollouts + nodes + 1
        assert size.beats_per_s == size.processes / 2
        assert size.writes_per_s == pytest.approx(episodes * (16 + 3 + 5 / 16) + size.processes / 2)
        assert size.commits_per_s == pytest.approx(episodes * 19 + size.processes / 2)
        assert size.connections == 3 * (size.processes + size.proxies + size.rollouts + 1)
        assert size.reads_per_s == size.proxies * (size.engines + 1)
        assert size.read_rows_per_s == 2 * size.proxies * size.engines
        assert size.dollars_per_day == pytest.approx(size.gpus * 95.76)
        tokens = size.tokens_per_s * 86_400 / 1e6
        assert size.dollars_per_million_tokens == pytest.approx(size.gpus * 95.76 / tokens)


def test_proxies_carry_calls_and_health_checks() -> None:
    _, _, size = _size(*SHORT, "call_ms=300", gpus=8)
    assert size.check_share == pytest.approx(size.engines * (1 + 0.005) / 1000)
    assert size.proxies == int(size.calls_per_s * size.call_ms / 1000 / (0.6 - size.check_share)) + 1
    assert size.proxy_mb == pytest.approx(267 + 0.25 * size.open_episodes / size.proxies)


def test_a_turn_has_as_many_bytes_as_the_store_writes(report: ScalingReport) -> None:
    new, sampled = 500, 500
    turn = Turn(
        id="turn-" + "0" * 24,
        parent="turn-" + "1" * 24,
        new_messages=(Message("user", "q" * 4 * new),),
        new_prompt_ids=np.zeros(new, np.int32),
        completion=Completion(
            np.zeros(sampled, np.int32), np.zeros(sampled, np.float32), np.zeros(sampled, np.int32), "stop"
        ),
        reply=Message("assistant", "a" * 4 * sampled),
        sampling=SamplingParams(max_new_tokens=4096),
    )
    row = encode_turn("episode-" + "0" * 24, turn, 0.0)
    written = sum(len(value) if isinstance(value, str | bytes) else 8 for value in row.values())
    inputs = read_inputs(
        ["turns=1", "tokens={mean: 500}", "first_prompt_tokens=500", "turn_overhead_bytes=0"]
    )
    size = estimate(inputs, costs_of(inputs), gpus=8)
    assert size is not None
    assert 0 < written - size.turn_bytes < report.inputs.turn_overhead_bytes


def test_the_load_of_each_limit_equals_that_by_hand(report: ScalingReport) -> None:
    inputs, costs, size = report.inputs, report.costs, report.sizes[-1]
    loads = {limit.name: limit.load for limit in limits(inputs, costs, size)}
    reads = (size.reads_per_s * 1e-4 + size.read_rows_per_s * 1e-6) / 16
    told_of = size.commits_per_s - size.processes / 2
    expected = {
        "`max_connections` of PostgreSQL": size.connections / 100,
        "`engine.replicas`": size.engines / 256,
        "`cluster.proxies`": size.proxies / 64,
        "`cluster.rollouts`": -(-size.open_episodes // 1000) / 1024,
        "health checks, in each proxy": size.check_share / 0.6,
        "health checks, in the database": reads,
        "notifications of commits": told_of * (size.rollouts + 1) * 11e-6 / 16,
        "heartbeats, in the database": size.processes / 2 * 0.15e-3 / 16,
        "writers of the store, one at a time": size.calls_per_s * 0.21e-3,
        "publishing, `broadcast`": size.publications["broadcast"].trainer_s / (0.1 * size.step_s),
        "contexts read again after a swap": costs.engine.refill_s / (0.1 * size.step_s),
        "staleness: episodes at a time": size.engines * costs.engine.slots / (5 * size.groups * 16),
        "network of the trainer's shards": 8 * costs.model.parameters / 40e9 / costs.trainer.microbatch_s,
    }
    assert loads == pytest.approx(expected)


# -- the inputs ---------------------------------------------------------------------------------------


def test_inputs_from_the_code_equal_the_values_in_the_code() -> None:
    inputs = ScalingInputs()
    assert inputs.beat_s == BEAT_S
    assert inputs.check_s == PoolLimits().probe_every_s
    assert inputs.look_s == LOOK_S

    def most(model: Any, key: str) -> object:
        [bound] = [one.le for one in model.model_fields[key].metadata if isinstance(one, Le)]
        return bound

    assert inputs.most_proxies == most(ClusterConfig, "proxies")
    assert inputs.most_rollouts == most(ClusterConfig, "rollouts")
    assert inputs.most_engines == most(EngineConfig, "replicas")


def test_every_input_names_its_source() -> None:
    for one in listed(ScalingInputs()):
        assert bool(one.source) == (one.kind in ("measured", "published", "code")), one.key
    own = {one.key: one for one in listed(read_inputs(["call_ms=3", "model=Qwen3-32B"]))}
    assert (own["call_ms"].kind, own["call_ms"].source) == ("chosen", "")
    assert own["model.layers"].value == 64


def test_the_command_prints_the_estimate() -> None:
    given = [*SHORT, "groups_per_gpu=2"]
    done = CliRunner().invoke(app, ["simulate", "--scaling", "--gpus", "16", "--json", *given])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.output.splitlines()[-1])
    assert [size["gpus"] for size in figures["sizes"]] == [16]
    assert figures["inputs"]["turns"] == 2 and figures["sizes"][0]["groups"] == 32
    assert "nothing of it was run" in done.output.splitlines()[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["turnz=3"], "turnz"),
        (["model=Qwen9"], "expected one of Qwen3-8B, Qwen3-32B"),
        (["model=Qwen3-32B", "gpus=[8]"], "needs 18 GPUs"),
        (["model={layers: 99, hidden: 9000}"], "the weights leave no room"),
        (["--from", "runs/x"], "leave --from and --plot out"),
    ],
)
def test_what_cannot_be_estimated_is_refused(given: list[str], said: str) -> None:
    refused = CliRunner().invoke(app, ["simulate", "--scaling", *given])
    assert isinstance(refused.exception, ConfigError) and said in str(refused.exception)
