"""Speed and memory of the trainer, compared with a padded Hugging Face loop and TRL's GRPO step in the same
run.

All implementations train the same random model of a realistic shape on the same samples and are timed in
turns; the best time of each counts. Tokens are those of the samples, without padding and with a shared prefix
counted every time.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json as jsonlib
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_agents.algorithms.packing.balance import imbalance
from areal_agents.algorithms.packing.flops import ModelShape
from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.algorithms.samples import TrainingData
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError
from areal_agents.training.distributed import Ranks, ranks
from benchmarks.gpu.scale import FULL as FULL_ON_GPU
from benchmarks.gpu.training import measured_step
from benchmarks.trainer.data import Recorder, save_model, training_data
from benchmarks.trainer.memory import peak_bytes
from benchmarks.trainer.peers import Ours, PaddedLoop, Setting, Side, Trl

RANKS = (1, 2, 4, 8)
SMALL = ModelShape(
    layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32, intermediate=768, vocab=8192
)  # the model of the throughput scenario on a CPU
LARGE_VOCABULARY = ModelShape(
    layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=384, vocab=151_936
)
QWEN3_0_6B = ModelShape(
    layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151_936
)


@dataclass(frozen=True, slots=True)
class Counts:
    """How much each measurement runs.

    Attributes:
        packed_groups: number of groups of 8 samples that are packed but not trained on.
        groups: number of groups of 8 samples. median: median of their log-normal lengths. longest: longest
            sample in tokens.
        prefix_groups: number of groups in each prefix-sharing scenario. prompt: number of tokens of their
            prompts, four times that of the answers.
        memory_tokens: number of tokens in the memory scenario.
        rounds: number of timed steps of every implementation.
    """

    packed_groups: int
    groups: int
    median: int
    longest: int
    prefix_groups: int
    prompt: int
    memory_tokens: int
    rounds: int


FULL = Counts(
    packed_groups=512, groups=8, median=96, longest=768, prefix_groups=4, prompt=512,
    memory_tokens=4096, rounds=3,
)  # fmt: skip
ON_GPU = Counts(
    packed_groups=512, groups=16, median=256, longest=2048, prefix_groups=8, prompt=1024,
    memory_tokens=4096, rounds=5,
)  # fmt: skip
QUICK = Counts(
    packed_groups=64, groups=4, median=48, longest=384, prefix_groups=1, prompt=256,
    memory_tokens=1024, rounds=1,
)  # fmt: skip


def run(*, json: bool, quick: bool = False, threads: int = 0, counts: Counts | None = None) -> dict[str, Any]:
    """Measure, print, and return the figures; with `json` the last line printed is one JSON object.

    Args:
        quick: whether to run less of everything, for a quick estimate; the figures of docs/benchmarks.md are
            from a full run.
        threads: CPU threads of every implementation; 0 uses all cores.
        counts: how much to run; overrides `quick`.

    Raises:
        TrainingError: this trainer and the padded loop do not compute the same gradient.
    """
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads or cores)
    with tempfile.TemporaryDirectory(prefix="areal-agents-bench-") as scratch, ranks() as joined:
        full = ON_GPU if joined.device.type == "cuda" else FULL
        figures = Bench(Path(scratch), joined, counts or (QUICK if quick else full)).measure()
    figures |= {
        "cores": cores,
        "threads": threads or cores,
        "versions": _versions(("torch", "transformers", "trl")),
    }
    if json:
        print(jsonlib.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:28} {value}")
    return figures


class Bench:
    """The scenarios, one method each."""

    def __init__(self, scratch: Path, joined: Ranks, counts: Counts) -> None:
        on_gpu = joined.device.type == "cuda"
        self._scratch, self._counts, self._ranks = scratch, counts, joined
        self._shape = QWEN3_0_6B if on_gpu else SMALL
        self._setting = Setting(
            folder=save_model(scratch / "model", self._shape),
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            microbatch_tokens=32_768 if on_gpu else 4096,
            ranks=joined,
        )

    def measure(self) -> dict[str, Any]:
        """Measure every figure, by name. The figures of each scenario are printed to standard error as soon
        as it ends."""
        figures: dict[str, Any] = {"mfu": None}
        scenarios = [self._memory, self._packing, self._prefixes, self._against_peers]
        if self._ranks.device.type == "cuda":
            scenarios.append(self._large_model)
        for scenario in scenarios:
            found = scenario()
            print(f"so far: {found}", file=sys.stderr, flush=True)
            figures |= found
        return figures

    def _large_model(self) -> dict[str, Any]:
        """Speed of a step of 1.7B parameters in bfloat16; `python -m benchmarks gpu` measures more of it."""
        folder = save_model(self._scratch / "1.7b", FULL_ON_GPU.shape, bfloat16=True)
        side = Ours(Setting(folder, torch.bfloat16, FULL_ON_GPU.tokens, self._ranks), share_prefixes=False)
        found = measured_step(side, FULL_ON_GPU, self._ranks)
        return {
            "mfu": found["mfu"],
            "tokens_per_s_1_7b": found["tokens_per_s"],
            "peak_gib_1_7b": found["peak_gib"],
        }

    def _memory(self) -> dict[str, Any]:
        """Peak memory of a step with a large vocabulary, with chunked and with whole logits."""
        folder = save_model(self._scratch / "large-vocabulary", LARGE_VOCABULARY)
        peak = partial(peak_bytes, folder, tokens=self._counts.memory_tokens, device=self._ranks.device.type)
        chunked, whole = peak(way="chunked"), peak(way="whole")
        return {
            "logprob_peak_ratio": round(chunked / whole, 3),
            "peak_mb_chunked": round(chunked / 1e6),
            "peak_mb_whole": round(whole / 1e6),
        }

    def _packing(self) -> dict[str, Any]:
        """Fill and imbalance for log-normal lengths, the worst over several numbers of ranks."""
        budget = 16_384
        recorder = Recorder(self._shape.vocab, seed=0)
        groups = [
            recorder.answers(g, prompt=128, lengths=recorder.log_normal(8, median=512, longest=8064))
            for g in range(self._counts.packed_groups)
        ]
        samples = training_data(groups).samples
        fills, imbalances = [], []
        started = time.perf_counter()
        for count in RANKS:
            batches = pack(samples, token_budget=budget, ranks=count, share_prefixes=False, shape=self._shape)
            used = [len(batch.input_ids) for batch in batches if batch.scored_tokens]
            fills.append(sum(used) / len(used) / budget)
            costs = [batch.forward_flops(self._shape) for batch in batches]
            imbalances.append(imbalance([sum(costs[rank::count]) for rank in range(count)]))
        return {
            "packing_fill": round(min(fills), 4),
            "rank_imbalance": round(max(imbalances), 4),
            "packing_s": round((time.perf_counter() - started) / len(RANKS), 2),
        }

    def _prefixes(self) -> dict[str, Any]:
        """Speedup of shared prefixes over flat samples, as a share of the speedup that the token counts
        allow."""
        counts, recorder = self._counts, Recorder(self._shape.vocab, seed=1)
        groups = [
            recorder.answers(g, prompt=counts.prompt, lengths=[counts.prompt // 4] * 8)
            for g in range(counts.prefix_groups)
        ]
        episodes = [
            recorder.branching(
                g, episodes=2, turns=20, system=counts.prompt // 2, added=counts.prompt // 16,
                sampled=counts.prompt // 8,
            )
            for g in range(counts.prefix_groups)
        ]  # fmt: skip
        figures: dict[str, Any] = {}
        shares = []
        sides: list[Side] = [Ours(self._setting, share_prefixes=False), Ours(self._setting)]
        for name, scenario in (("groups", groups), ("episodes", episodes)):
            data = training_data(scenario)
            flat, shared = self._best_seconds(sides, data)
            bound = sum(len(sample) for sample in data.samples) / merged_tokens(data.samples)
            shares.append(flat / shared / bound)
            figures |= {
                f"prefix_speed_up_{name}": round(flat / shared, 2),
                f"prefix_bound_{name}": round(bound, 2),
            }
        return {"prefix_share_of_bound": round(min(shares), 3)} | figures

    def _against_peers(self) -> dict[str, Any]:
        """Tokens per second on log-normal lengths, with all implementations in turns."""
        counts, recorder = self._counts, Recorder(self._shape.vocab, seed=2)
        prompt = counts.median // 4
        lengths = recorder.log_normal(8 * counts.groups, median=counts.median, longest=counts.longest)
        answers = np.maximum(lengths - prompt, 2).reshape(-1, 8)
        data = training_data(
            [recorder.answers(g, prompt=prompt, lengths=row) for g, row in enumerate(answers)]
        )
        self._check_same_gradient(data)
        sides: list[Side] = [Ours(self._setting), PaddedLoop(self._setting)]
        if importlib.util.find_spec("trl") is not None:
            sides.append(Trl(self._setting, self._scratch / "trl"))
        else:
            print(
                "vs_trl is left out: trl is not installed; pip install 'areal-agents[bench]'", file=sys.stderr
            )
        seconds = self._best_seconds(sides, data)
        tokens = sum(len(sample) for sample in data.samples)
        return {
            "vs_padded": round(seconds[1] / seconds[0], 2),
            "vs_trl": round(seconds[2] / seconds[0], 2) if len(sides) == 3 else None,
            "tokens_per_s": round(tokens / seconds[0]),
            "tokens_per_s_padded": round(tokens / seconds[1]),
            "tokens_per_s_trl": round(tokens / seconds[2]) if len(sides) == 3 else None,
        }

    def _check_same_gradient(self, data: TrainingData) -> None:
        ours, padded = Ours(self._setting).step(data).grad_norm, PaddedLoop(self._setting)
        padded.step(data)
        if not np.isclose(
            ours, padded.grad_norm, rtol=1e-3 if self._setting.dtype == torch.float32 else 0.05
        ):
            raise TrainingError(
                f"the gradient's norm is {ours} here and {padded.grad_norm} in the padded loop; "
                "speeds of different computations cannot be compared"
            )

    def _best_seconds(self, sides: Sequence[Side], data: TrainingData) -> list[float]:
        """The best time of a step of each implementation, after one uncounted step."""
        best = [float("inf")] * len(sides)
        for turn in range(self._counts.rounds + 1):
            for place, side in enumerate(sides):
                started = time.perf_counter()
                side.step(data)
                if self._ranks.device.type == "cuda":
                    torch.cuda.synchronize()
                if turn:
                    best[place] = min(best[place], time.perf_counter() - started)
        return best


def merged_tokens(samples: Sequence[TrainingSample]) -> int:
    """Number of tokens of the samples with every common prefix counted once."""
    ordered = sorted(sample.token_ids.astype(">u4").tobytes() for sample in samples)
    total = len(ordered[0]) // 4
    for before, after in zip(ordered, ordered[1:], strict=False):
        total += len(after) // 4 - _common(before, after)
    return total


def _common(left: bytes, right: bytes) -> int:
    length = min(len(left), len(right))
    a, b = (np.frombuffer(data[:length], ">u4") for data in (left, right))
    differs = np.flatnonzero(a != b)
    return int(differs[0]) if differs.size else len(a)


def _versions(packages: Sequence[str]) -> Mapping[str, str | None]:
    return {
        name: importlib.metadata.version(name) if importlib.util.find_spec(name) else None
        for name in packages
    }
