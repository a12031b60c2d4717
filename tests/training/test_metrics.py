"""metrics.jsonl has one whole line per step, even after a resume, with the names that docs/metrics.md has."""

from __future__ import annotations

import json
import math
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_support import record_groups

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.objective import LossStatistics
from areal_agents.algorithms.losses.statistics import MAXIMA, SUMS
from areal_agents.algorithms.samples import BatchReport
from areal_agents.algorithms.staleness import StalenessReport
from areal_agents.errors import TrainingError
from areal_agents.inference import SGLangEngine
from areal_agents.store import Store
from areal_agents.training.config import TrainerConfig
from areal_agents.training.metrics.mfu import mfu, peak_flops, peak_of
from areal_agents.training.metrics.step_metrics import (
    SECTIONS,
    MetricsWriter,
    data_metrics,
    policy_metrics,
    system_metrics,
)
from areal_agents.training.publish.publisher import Published
from areal_agents.training.run import run
from areal_agents.training.step.results import CriticResult, DpoResult, ObservationResult, StepResult

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
REPORT = BatchReport(
    rewards=(1.0, 0.0, 1.0, 1.0), solved_all=0, solved_some=2, solved_none=0, dropped_groups=0,
    sampled_tokens=40, untrained_tokens=4, routed_tokens=6, turns=10, branches=5, truncated=1,
    forks={"edited": 2}, versions_per_rollout=1.5, rewards_by_name={"correct": 0.75},
    rewards_by_source={"math": 0.75},
    episode_tokens=(7, 9, 4, 20), overlong=1, equal_groups=(),
)  # fmt: skip


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def line(step: int, *, loss: float = 1.0, busy: float | None = None) -> dict:
    return {"step": step, "loss": loss, "pause_s": 0.25, "engine_busy_s": busy, "time": 100.0 + 10 * step}


def test_a_resume_drops_the_lines_it_will_write_again(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, after_step=0)
    for step in (1, 2, 3):
        writer.write({**line(step, busy=20.0 + 4 * step), "grad_norm": math.nan})
    written = lines(tmp_path)  # flushed while open
    assert written[2]["grad_norm"] is None and [row["loss"] for row in written] == [1.0, 1.0, 1.0]
    assert [row["pause_total_s"] for row in written] == [0.25, 0.5, 0.75]
    assert [row["rollout_idle"] for row in written] == [None, pytest.approx(0.6), pytest.approx(0.6)]
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # cut short by a crash
    resumed = MetricsWriter(tmp_path, after_step=2)
    resumed.write(line(3, loss=30.0, busy=99.0))  # the engine may have been restarted
    resumed.write(line(4))
    resumed.close()
    after = lines(tmp_path)
    assert [(row["step"], row["loss"]) for row in after] == [(1, 1.0), (2, 1.0), (3, 30.0), (4, 1.0)]
    assert [row["pause_total_s"] for row in after] == [0.25, 0.5, 0.75, 1.0]
    assert [row["rollout_idle"] for row in after[2:]] == [None, None]


def test_idleness_is_unknown_where_a_counter_or_the_clock_did_not_advance(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, after_step=0)
    writer.write(line(1, busy=50.0))
    writer.write(line(2, busy=3.0))  # the engine was started again
    writer.write({**line(3, busy=4.0), "time": 120.0})  # the clock has not advanced
    writer.write(line(4, busy=8.0))
    writer.close()
    assert [row["rollout_idle"] for row in lines(tmp_path)] == [None, None, None, pytest.approx(0.8)]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    writer = MetricsWriter(tmp_path, after_step=0)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(TrainingError, match=r"cannot write .*metrics.jsonl: .*No space left"):
        writer.write(line(1))
    writer.close()  # nothing is left that could fail again


def test_trackers_get_every_number_under_its_section(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, after_step=0, trackers=["tensorboard"])
    writer.write({**line(1), "grad_norm": math.nan, "forks": {"edited": 2}})
    writer.close()
    board = EventAccumulator(str(tmp_path / "tb"))
    board.Reload()
    names = {"policy/loss", "system/pause_s", "system/pause_total_s", "data/forks/edited"}
    assert set(board.Tags()["scalars"]) == names


def test_data_metrics_by_hand() -> None:
    staleness = StalenessReport(np.array([0, 0, 0, 1, 1, 3], np.int32), masked_tokens=7, dropped_samples=1)
    values = data_metrics(REPORT, staleness)
    assert values["reward_mean"] == 0.75 and values["turns_mean"] == 2.5 and values["branches_mean"] == 1.25
    assert (values["staleness_p50"], values["staleness_p90"], values["staleness_max"]) == (0.5, 2.0, 3)
    assert values["staleness_histogram"] == {"0": 3, "1": 2, "3": 1}
    assert values["staleness_mean"] == 5 / 6 and values["stale_tokens_masked"] == 7
    assert (values["tokens_per_episode"], values["tokens_per_episode_max"]) == (10.0, 20)
    assert values["truncated_share"] == 0.25 and values["rewards_by_name"] == {"correct": 0.75}


def statistics(**given: float) -> LossStatistics:
    values = {**dict.fromkeys((*SUMS, *MAXIMA), 0.0), **given}
    assert set(values) == {*SUMS, *MAXIMA}
    return LossStatistics(*(torch.tensor([values[n] for n in names]).double() for names in (SUMS, MAXIMA)))


def test_policy_metrics_by_hand() -> None:
    measured = statistics(
        tokens=4, sequences=2, dropped_tokens=3, loss=-2.0, clipped_low=1, clipped_high=2, dual_clipped=1,
        ratio=4.4, kl_k1=0.5, kl_k3=0.25, kl_reference=2.0, weight=6.0, weight_squared=12.0, weight_raw=8.0,
        weight_capped=1, rejected_tokens=1, rejected_sequences=1, vetoed_sequences=1, abs_diff=2.0,
        on_policy_tokens=2, on_policy_abs_diff=0.5, entropy=8.0, abs_diff_max=0.75,
        on_policy_abs_diff_max=0.25, abs_log_ratio_max=0.5, weight_raw_max=3.0,
        replayed_tokens=1, replayed_abs_diff=0.125, rerouted_tokens=1, rerouted_layers=0.25,
        **{"tokens_at_0-255": 1, "abs_diff_at_0-255": 0.125},
        **{"tokens_at_16384+": 1, "abs_diff_at_16384+": 0.375},
    )  # fmt: skip
    critic = CriticResult(loss=0.5, clipped=0.1, explained_variance=math.nan, grad_norm=2.0, skipped_steps=1)
    result = StepResult(
        measured,
        0.5,
        1,
        3,
        100,
        160,
        critic=critic,
        dpo=DpoResult(0.625, 0.75, 0.5),
        observation=ObservationResult(2.25, 7),
    )
    assert policy_metrics(result) == {
        "tokens": 4, "sequences": 2, "dropped_tokens": 3, "loss": -0.5, "grad_norm": 0.5, "skipped_steps": 1,
        "clip_fraction": 0.75, "clip_fraction_low": 0.25, "clip_fraction_high": 0.5,
        "dual_clip_fraction": 0.25, "ratio_mean": pytest.approx(1.1), "log_ratio_max": 0.5,
        "kl_behavior_k1": 0.125, "kl_behavior_k3": 0.0625, "kl_reference": 0.5,
        "logprob_diff_mean": 0.5, "logprob_diff_max": 0.75, "on_policy_tokens": 2,
        "logprob_diff_on_policy_mean": 0.25, "logprob_diff_on_policy_max": 0.25,
        "logprob_diff_on_policy_by_position": {"0-255": 0.125, "16384+": 0.375},
        "logprob_diff_on_policy_by_routing": {"replayed": 0.125, "routed": 0.375},
        "routing_diff_on_policy": {"tokens": 1.0, "layers": 0.25},
        "weight_mean": 1.5, "weight_raw_mean": 2.0, "weight_raw_max": 3.0, "weight_capped": 0.25,
        "ess": 36 / 12 / 4, "rejected_tokens": 0.25, "rejected_sequences": 0.5, "vetoed_sequences": 0.5,
        "entropy": 2.0, "value_loss": 0.5, "value_clipped": 0.1,
        "explained_variance": pytest.approx(math.nan, nan_ok=True), "critic_grad_norm": 2.0,
        "critic_skipped_steps": 1, "dpo_loss": 0.625, "dpo_accuracy": 0.75, "dpo_margin": 0.5,
        "observation_loss": 2.25, "observation_tokens": 7,
    }  # fmt: skip


def test_a_batch_without_tokens_has_the_same_names() -> None:
    nothing = policy_metrics(StepResult.nothing())
    assert list(nothing) == list(policy_metrics(StepResult(statistics(tokens=1), 0.5, 0, 1, 1, 1)))
    assert nothing["tokens"] == nothing["clip_fraction"] == 0 and nothing["explained_variance"] is None
    assert nothing["ess"] is nothing["ratio_mean"] is nothing["logprob_diff_on_policy_mean"] is None


def test_system_metrics_by_hand() -> None:
    result = StepResult(
        statistics(), 0.5, 0, 3, 100, 160, packing_fill=0.9, rank_imbalance=0.02, flops=6e12,
        device_memory_peak=2**30, seconds={"pack": 0.5, "gradient": 1.5},
    )  # fmt: skip
    values = system_metrics(
        result, sampled_tokens=40, step_s=8.0, wait_s=2.0, train_s=4.0, train_cpu_s=3.5,
        published=Published(
            1, Path("v1"), publish_s=1.0, assemble_s=0.5, pause_s=0.25, nbytes=8, sent_bytes=6, density=0.5,
            agreement=1.0, left_out=1, repaired=0, busy_s=None,
        ),
        devices=2, peak=1e12,
    )  # fmt: skip
    assert (values["publish_s"], values["assemble_s"], values["pause_s"]) == (1.0, 0.5, 0.25)
    assert (values["publish_bytes"], values["density"], values["checksum_agreement"]) == (8, 0.5, 1.0)
    assert values["publish_sent_bytes"] == 6
    assert (values["engines_left_out"], values["engines_repaired"]) == (1, 0)
    assert values["engine_busy_s"] is None
    assert values["trainer_idle"] == 0.25 and values["mfu"] == 6 / 8
    assert (values["tokens_per_s"], values["sampled_tokens_per_s"]) == (40.0, 5.0)
    assert (values["model_tokens"], values["shared_tokens"]) == (100, 60)
    assert values["train_parts_s"] == {"pack": 0.5, "gradient": 1.5}
    assert values["device_memory_peak"] == 2**30


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_peak_is_found_by_the_name_of_the_gpu(name: str, teraflops: float | None) -> None:
    assert peak_of(name) == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_there_is_no_mfu_on_a_cpu() -> None:
    assert peak_flops(torch.device("cpu")) is None
    assert mfu(1e9, seconds=1.0, devices=1, peak=None) is None


def defined_names() -> dict[str, list[str]]:
    """The names in the tables of docs/metrics.md, by section."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]
    return {part.split("\n")[0].lower(): re.findall(r"^\| `(\w+)` \|", part, flags=re.M) for part in sections}


def test_the_page_defines_each_name_once_and_in_order() -> None:
    assert defined_names() == {section: list(names) for section, names in SECTIONS.items()}
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| `")]
    columns = {len(re.split(r"(?<!\\)\|", row)) for row in rows if row.count("|") > 4}
    assert columns == {6}  # name, meaning, unit, healthy


def test_a_real_step_writes_exactly_the_names_that_are_defined(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    record_groups(store, engine_url, ["a", "b", "c", "d"])
    run(
        TrainerConfig(steps=2, lr=1e-2, batch_timeout_s=5, trackers=("tensorboard",)),
        AlgorithmConfig(drop_equal_groups=False),
        store=store, engines=[SGLangEngine(engine_url)], model_path=model_folder, run_dir=run_dir,
        groups=2, max_staleness=8, stop=threading.Event(),
    )  # fmt: skip
    first, second = lines(run_dir)
    everywhere = {"step", "version", "time"}
    assert first.keys() == {*everywhere, *(name for names in SECTIONS.values() for name in names)}
    assert first["rollout_idle"] is None and 0.5 < second["rollout_idle"] <= 1  # nothing was sampled
    assert first["explained_variance"] is None and first["mfu"] is None
    assert second["pause_total_s"] == pytest.approx(first["pause_s"] + second["pause_s"])
    for name in (
        "grad_norm",
        "entropy",
        "weight_mean",
        "ess",
        "tokens_per_s",
        "flops",
        "packing_fill",
        "train_s",
    ):
        assert first[name] > 0, name
    parts = first["train_parts_s"]
    assert {"pack", "gradient", "optimizer"} <= parts.keys() and min(parts.values()) >= 0
    assert 0 < sum(parts.values()) <= first["train_s"] + 1e-6
    board = EventAccumulator(str(run_dir / "tb"))
    board.Reload()
    assert {"policy/ess", "data/reward_mean", "system/pause_total_s"} <= set(board.Tags()["scalars"])
    assert all("/" in name for name in board.Tags()["scalars"] if name != "version")
