"""`python -m benchmarks simulator`: compares the simulator's predictions with runs on this machine.

The workload of `python -m benchmarks async` is trained at several η in one layout. The simulator is given the
trace of one of these runs and predicts the speed of each run; the compared value is the speed relative to η =
0.
"""

from __future__ import annotations

import gzip
import json as jsonlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_agents.simulate import EmpiricalWork, simulate
from areal_agents.simulate.parameters import read_parameters
from areal_agents.simulate.trace import read_trace
from areal_agents.simulate.work import EpisodePlan
from benchmarks.asynchrony.loop import measure_loop, run_config
from benchmarks.asynchrony.model import endless_model
from benchmarks.asynchrony.run import Layout

BOUNDS = (0, 1, 2, 4)
TRACED = 4  # the η of the run whose trace the simulator is given
LAYOUT = Layout(engine=1, trainer=1, concurrency=32)
COUNTED = {0: 8, 1: 16, 2: 16, 4: 24}  # steps by η; a synchronous step takes three times as long
FILLING = 3  # rounds of the gate that are not counted, plus one step
_DIGITS = 4  # decimal places of a saved time in seconds


@dataclass(frozen=True, slots=True)
class Comparison:
    """Measured runs of one workload, and the trace from which they are predicted.

    Attributes:
        measured: sampled tokens per second of the run at each η, including 0.
        parameters: parameters of the traced run, by their names in `Parameters`. work: its episodes.
    """

    measured: Mapping[int, float]
    parameters: Mapping[str, Any]
    work: EmpiricalWork

    def simulated(self, bound: int) -> float:
        """Predicted sampled tokens per second at η = `bound`, from the trace only."""
        chosen = read_parameters([f"max_staleness={bound}"], self.parameters)
        return simulate(chosen.scenario(self.work)).tokens_per_s

    def shape(self, bound: int) -> float:
        """The simulated speed relative to η = 0, divided by the measured one; 1 is exact."""
        return (self.simulated(bound) / self.simulated(0)) / (self.measured[bound] / self.measured[0])

    def save(self, path: Path) -> None:
        """Write the comparison as gzipped JSON, for `read_comparison`."""
        plans = [[plan.tokens, [round(s, _DIGITS) for s in plan.between]] for plan in self.work.plans]
        content = {"measured": self.measured, "parameters": self.parameters, "plans": plans}
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(gzip.compress(jsonlib.dumps(content).encode(), mtime=0))
        temporary.replace(path)


def read_comparison(path: Path) -> Comparison:
    """Read a file that `Comparison.save` wrote."""
    content = jsonlib.loads(gzip.decompress(path.read_bytes()))
    plans = [EpisodePlan(tuple(tokens), tuple(between)) for tokens, between in content["plans"]]
    measured = {int(bound): speed for bound, speed in content["measured"].items()}
    return Comparison(measured, content["parameters"], EmpiricalWork(plans))


def run(*, json: bool, save: Path | None) -> Comparison:
    """Measure, simulate, and print; with `json` the last line printed is one JSON object.

    Args:
        save: a file in which to save the measurements and the trace.

    Raises:
        ConfigError: there is no quick-start model in the working directory.
        ChildDied: a process of a run ended unexpectedly.
    """
    with tempfile.TemporaryDirectory(prefix="areal-agents-bench-") as scratch:
        found = measure(Path(scratch))
    if save is not None:
        found.save(save)
    _show(found)
    if json:
        figures = {
            str(bound): {
                "measured_tokens_per_s": round(speed, 1),
                "simulated_tokens_per_s": round(found.simulated(bound), 1),
                "shape": round(found.shape(bound), 3),
            }
            for bound, speed in found.measured.items()
        }
        print(jsonlib.dumps({"by_max_staleness": figures}))
    return found


def measure(scratch: Path, *, counted: Mapping[int, int] = COUNTED, **changes: Any) -> Comparison:
    """Train the workload at each η of `counted`, for that many counted steps; `changes` apply to every
    run."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    model = endless_model(scratch / "model")
    measured = {}
    for bound, steps in counted.items():
        warm_up = 1 + FILLING * bound
        config = run_config(
            model, scratch / f"eta-{bound}", {
                "rollout.max_staleness": bound, "trainer.steps": warm_up + steps,
                **LAYOUT.changes(), **changes,
            },
        )  # fmt: skip
        one = measure_loop(config, warm_up=warm_up)
        measured[bound] = one.tokens / one.step_s
        console.print(f"η = {bound}: {one.step_s:.2f} s a step, {measured[bound]:,.0f} tokens/s")
    trace = read_trace(scratch / f"eta-{TRACED}")
    return Comparison(measured, dict(trace.parameters), trace.work)


def _show(found: Comparison) -> None:
    table = Table("η", "measured, tokens/s", "simulated", "shape, simulated over measured")
    for bound, speed in found.measured.items():
        table.add_row(
            str(bound), f"{speed:,.0f}", f"{found.simulated(bound):,.0f}", f"{found.shape(bound):.2f}"
        )
    Console(highlight=False).print(table)
