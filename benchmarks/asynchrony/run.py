"""`python -m benchmarks async`: the speedup of asynchrony over a synchronous run that is tuned as well.

The synchronous run is the same program with η = 0. Both modes run on the same cores and may divide them
freely between the threads of engine and trainer: each mode is tried with several layouts and measured with
its fastest; for asynchronous runs, that is the layout with the fewest concurrent episodes among those that
are about as fast. T_sync / max(R, U) is the largest possible speedup: R is the time per batch when agents,
proxy and engine run alone (swaps included), U when the trainer runs alone, each with the threads, the gate
and the concurrency of the asynchronous run.
"""

from __future__ import annotations

import json as jsonlib
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.asynchrony.loop import AGENT, LONG_AGENT, Measured, measure_loop, measure_rollout, run_config
from benchmarks.asynchrony.model import endless_model, other_weights, random_model
from benchmarks.asynchrony.pause import measure_pause
from benchmarks.store import TURNS, measure_store

STALENESS = 4
INTERRUPTIONS = ("retract", "in_place", "drain")  # how a swap treats running requests
SYNC_WARM_UP = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """CPU threads of the engine and of the trainer, and the number of concurrent episodes."""

    engine: int
    trainer: int
    concurrency: int

    def changes(self) -> dict[str, Any]:
        """The changes to the configuration of a run."""
        return {
            "engine.threads": self.engine,
            "trainer.threads": self.trainer,
            "rollout.concurrency": self.concurrency,
        }

    def __str__(self) -> str:
        return f"threads {self.engine} + {self.trainer}, concurrency {self.concurrency}"


SYNC_LAYOUTS = (Layout(1, 1, 32), Layout(2, 1, 32), Layout(2, 2, 32))  # a batch is 32 episodes
ASYNC_LAYOUTS = (Layout(1, 1, 32), Layout(1, 1, 64), Layout(2, 1, 64))
# relative to the fastest time: of the layouts within it, the first is chosen, which is the least off-policy
AS_FAST = 1.05


@dataclass(frozen=True, slots=True)
class Counts:
    """How much each measurement runs.

    Attributes:
        tried: counted steps of a run that tries a layout, synchronous and asynchronous.
        sync, asynchronous: counted steps of the measured runs. batches: counted batches of the rollout side
            alone.
        filling: steps before the queue of an asynchronous run is full, at least two rounds of the gate.
        long_answers: counted batches of each pause mode, in each of two rounds.
        sync_layouts, async_layouts: layouts to try, the asynchronous ones by increasing concurrency. For
            every asynchronous layout there is a synchronous one with the same number of trainer threads.
        megabytes, swaps: size of the model whose engine is paused, and number of swaps.
        turns: number of turns committed to the store.
        changes: changes to the configuration of every run.
        agent, long_agent: the agents that play the workloads.
    """

    tried: tuple[int, int] = (4, 8)
    sync: int = 8
    asynchronous: int = 30
    batches: int = 20
    filling: int = 10
    long_answers: int = 20
    sync_layouts: tuple[Layout, ...] = SYNC_LAYOUTS
    async_layouts: tuple[Layout, ...] = ASYNC_LAYOUTS
    megabytes: int = 512
    swaps: int = 8
    turns: int = TURNS
    changes: Mapping[str, Any] = field(default_factory=dict)
    agent: str = AGENT
    long_agent: str = LONG_AGENT


FULL = Counts()
QUICK = Counts(
    tried=(2, 4), sync=3, asynchronous=10, batches=6, long_answers=5, swaps=3, turns=1024,
    sync_layouts=SYNC_LAYOUTS[:1], async_layouts=ASYNC_LAYOUTS[:1],
)  # fmt: skip


def run(*, json: bool, quick: bool = False, counts: Counts | None = None) -> dict[str, Any]:
    """Measure, print, and return the figures; with `json` the last line printed is one JSON object.

    Args:
        quick: whether to run less of everything, for a quick estimate; the figures of docs/benchmarks.md are
            from a full run.
        counts: how much to run; overrides `quick`.

    Raises:
        ConfigError: there is no quick-start model in the working directory.
        ChildDied: a process of a run ended unexpectedly.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="areal-agents-bench-") as scratch:
        figures = Bench(Path(scratch), counts or (QUICK if quick else FULL)).measure()
    figures["seconds"] = round(time.monotonic() - started, 1)
    if json:
        print(jsonlib.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:24} {value}")
    return figures


class Bench:
    """The measurements, one method each."""

    def __init__(self, scratch: Path, counts: Counts) -> None:
        self._scratch, self._counts = scratch, counts
        self._console = Console(stderr=True, soft_wrap=True, highlight=False)
        self._model = endless_model(scratch / "model")
        self._runs = 0
        self._lost = 0

    def measure(self) -> dict[str, Any]:
        """Run all measurements."""
        figures, layout = self._speed()
        figures |= self._interruption(figures["rollout_alone_s"], layout)
        figures |= self._pause()
        store = measure_store(turns=self._counts.turns)
        figures |= {"store_turns_per_s": store.turns_per_s, "store_commit_p50_ms": store.commit_p50_ms}
        figures |= {"store_commit_p99_ms": store.commit_p99_ms, "lost": self._lost}
        return figures

    def _speed(self) -> tuple[dict[str, Any], Layout]:
        """Compare asynchronous with synchronous runs and with the largest possible speedup; return the layout
        of the fastest asynchronous run."""
        counts = self._counts
        tried = {layout: self._loop(0, layout, counts.tried[0]) for layout in counts.sync_layouts}
        sync_layout = min(tried, key=lambda layout: tried[layout].step_s)
        sync = self._loop(0, sync_layout, counts.sync)
        found = {layout: self._loop(STALENESS, layout, counts.tried[1]) for layout in counts.async_layouts}
        fastest = min(run.step_s for run in found.values())
        layout = next(layout for layout, run in found.items() if run.step_s <= AS_FAST * fastest)
        quickest = self._loop(STALENESS, layout, counts.asynchronous)
        rollout_s = self._rollout_s("retract", layout, counts.batches)
        # The counted batches differ in size, so times are scaled to the tokens of an asynchronous batch.
        sync_s = sync.step_s * quickest.tokens / sync.tokens
        # In a synchronous run the engine is idle while the trainer works.
        alone = next(run for like, run in tried.items() if like.trainer == layout.trainer)
        trainer_s = alone.work_s * quickest.tokens / alone.tokens
        bound = sync_s / max(rollout_s, trainer_s)
        speedup = sync_s / quickest.step_s
        self._say(
            f"T_sync {sync_s:.2f} s, R {rollout_s:.2f} s, U {trainer_s:.2f} s, T_async "
            f"{quickest.step_s:.2f} s a step: {speedup:.2f}×, T_sync / max(R, U) = {bound:.2f}, of which "
            f"{speedup / bound:.0%} is reached"
        )
        figures = {
            "speedup_over_sync": round(speedup, 3),
            "bound": round(bound, 3),
            "bound_reached": round(speedup / bound, 3),
            "sync_step_s": round(sync_s, 3),
            "async_step_s": round(quickest.step_s, 3),
            "rollout_alone_s": round(rollout_s, 3),
            "trainer_alone_s": round(trainer_s, 3),
            "sync_layout": str(sync_layout),
            "async_layout": str(layout),
            "trainer_idle": round(quickest.trainer_idle, 3),
            "rollout_idle": round(quickest.rollout_idle, 3),
            "staleness_mean": round(quickest.staleness, 2),
            "staleness_max": quickest.staleness_max,
        }
        return figures, layout

    def _interruption(self, rollout_s: float, layout: Layout) -> dict[str, Any]:
        """Seconds per batch of the rollout side alone, with a swap after each batch, by pause mode.

        Measured with long answers, as the mean of two runs per mode, and with the main workload, with one run
        per mode; there `rollout_s` is the time of retract in `layout`.
        """
        long = dict.fromkeys(INTERRUPTIONS, 0.0)
        for mode in (*INTERRUPTIONS, *reversed(INTERRUPTIONS)):
            long[mode] += self._rollout_s(mode, None, self._counts.long_answers) / 2
        main = {"retract": rollout_s}
        for mode in INTERRUPTIONS[1:]:
            main[mode] = self._rollout_s(mode, layout, self._counts.batches)
        for name, spent in (("long answers", long), ("the workload", main)):
            gain = {mode: spent["drain"] / spent[mode] for mode in INTERRUPTIONS}
            self._say(
                f"{name}: {spent['drain']:.3f} s per batch if a swap waits for running requests; interrupted "
                f"{spent['retract']:.3f} s ({gain['retract']:.2f}×) with keys and values recomputed, "
                f"{spent['in_place']:.3f} s ({gain['in_place']:.2f}×) with them kept"
            )
        return {
            "interrupt_gain": round(long["drain"] / long["retract"], 3),
            "interrupt_gain_in_place": round(long["drain"] / long["in_place"], 3),
            "interrupt_gain_workload": round(main["drain"] / main["retract"], 3),
            "interrupt_gain_workload_in_place": round(main["drain"] / main["in_place"], 3),
        } | {f"long_{mode}_batch_s": round(seconds, 3) for mode, seconds in long.items()}

    def _pause(self) -> dict[str, Any]:
        large = random_model(self._scratch / "large", megabytes=self._counts.megabytes)
        other = other_weights(large, self._scratch / "other")
        found = measure_pause((large, other), swaps=self._counts.swaps)
        self._lost += found.lost
        self._say(
            f"{found.megabytes:.0f} MB of weights, {found.bandwidth_gb_s:.1f} GB/s: a floor of "
            f"{1000 * found.floor_s:.0f} ms; paused for {1000 * found.pause_s:.0f} ms (at most "
            f"{1000 * found.pause_max_s:.0f}), then {found.recomputed_tokens:.0f} tokens recomputed in "
            f"{found.recompute_s:.2f} s; {found.lost} of {found.requests} requests lost"
        )
        return {
            "pause_over_floor": round(found.over_floor, 3),
            "pause_ms": round(1000 * found.pause_s, 1),
            "pause_max_ms": round(1000 * found.pause_max_s, 1),
            "floor_ms": round(1000 * found.floor_s, 1),
            "weights_mb": round(found.megabytes, 1),
            "recomputed_tokens": round(found.recomputed_tokens),
            "recompute_s": round(found.recompute_s, 3),
        }

    def _loop(self, staleness: int, layout: Layout, steps: int) -> Measured:
        """Make a run with `steps` counted steps."""
        warm_up = self._counts.filling if staleness else SYNC_WARM_UP
        config = run_config(
            self._model, self._folder(), {
                "rollout.max_staleness": staleness, "trainer.steps": warm_up + steps,
                **layout.changes(), **self._counts.changes,
            }, agent=self._counts.agent,
        )  # fmt: skip
        found = measure_loop(config, warm_up=warm_up)
        self._lost += found.failed
        self._say(
            f"η = {staleness}, {layout}: {found.step_s:.2f} s a step, trainer idle {found.trainer_idle:.0%}, "
            f"rollout idle {found.rollout_idle:.0%}, staleness {found.staleness:.2f} (max "
            f"{found.staleness_max}), failed {found.failed}"
        )
        return found

    def _rollout_s(self, mode: str, layout: Layout | None, batches: int) -> float:
        """Seconds per batch of the rollout side alone, with pause mode `mode`; without a layout, with long
        answers."""
        changes = {
            "rollout.max_staleness": STALENESS,
            "trainer.publish.pause": mode,
            **(layout.changes() if layout else {}),
            **self._counts.changes,
        }
        agent, section = (self._counts.agent, "") if layout else (self._counts.long_agent, "long_run")
        config = run_config(self._model, self._folder(), changes, agent=agent, section=section)
        batch_s, failed = measure_rollout(config, batches=batches, warm_up=self._counts.filling)
        self._lost += failed
        return batch_s

    def _folder(self) -> Path:
        self._runs += 1
        return self._scratch / f"run-{self._runs}"

    def _say(self, text: str) -> None:
        self._console.print(text)
