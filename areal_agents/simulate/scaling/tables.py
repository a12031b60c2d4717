"""The tables of the estimate, in Markdown, as docs/scaling.md has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from areal_agents.errors import ConfigError
from areal_agents.simulate.parameters import Distribution
from areal_agents.simulate.scaling.cluster import (
    ClusterEstimate,
    Costs,
    Publication,
    Transport,
    costs_of,
    estimate,
)
from areal_agents.simulate.scaling.inputs import ScalingInputs, listed, read_inputs
from areal_agents.simulate.scaling.limits import first, limits

Row = tuple[str, Callable[[ClusterEstimate], str]]

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class ScalingReport:
    """The inputs, the costs that follow from them, and the estimate of each size that can train the model."""

    inputs: ScalingInputs
    costs: Costs
    sizes: Sequence[ClusterEstimate]
    too_small: Sequence[int]

    def to_dict(self) -> dict[str, Any]:
        """Return the report for `--json`."""
        return {
            "inputs": self.inputs.model_dump(mode="json"),
            "too_small": list(self.too_small),
            "sizes": [
                {
                    **{key: value for key, value in asdict(size).items() if key != "simulated"},
                    "step_s": size.step_s,
                    "staleness_mean": size.simulated.staleness_mean,
                    "limits": {limit.name: limit.load for limit in limits(self.inputs, self.costs, size)},
                }
                for size in self.sizes
            ],
        }

    def tables(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each table, and its text."""
        yield "One engine and one GPU of the trainer", _per_unit(self)
        yield "GPUs and speed", self._by_size(_SPEED)
        yield "Proxies and store", self._by_size(_STORE)
        yield "Weights", self._weights()
        yield "Limits", self._limits()
        yield "Cost", self._by_size(_COST)
        yield "Inputs", _inputs(self.inputs)

    def _header(self) -> list[str]:
        return [f"{size.gpus:,} GPUs" for size in self.sizes]

    def _by_size(self, rows: Sequence[Row]) -> str:
        cells = [[name, *(value(size) for size in self.sizes)] for name, value in rows]
        return _table(["", *self._header()], cells)

    def _weights(self) -> str:
        rows = [
            [said, what, *(value(size.publications[name], size) for size in self.sizes)]
            for name, said in _TRANSPORTS.items()
            for what, value in _WEIGHTS
        ]
        return _table(["", "", *self._header()], rows)

    def _limits(self) -> str:
        found = [limits(self.inputs, self.costs, size) for size in self.sizes]
        rows = [
            [one[0].name, *(f"**{part.load:.0%}**" if part.load >= 1 else f"{part.load:.1%}" for part in one)]
            for one in zip(*found, strict=True)
        ]
        settings = [first(of_size, is_setting=True) for of_size in found]
        capacities = [first(of_size, is_setting=False) for of_size in found]
        sides = [
            "the engines"
            if size.simulated.rollout_idle < size.simulated.trainer_idle
            else "the trainer's GPUs"
            for size in self.sizes
        ]
        rows.append(["**first setting to raise**", *(limit.name if limit else "none" for limit in settings)])
        held_by = [limit.name if limit else side for limit, side in zip(capacities, sides, strict=True)]
        rows.append(["**first bottleneck**", *held_by])
        return _table(["share of the limit", *self._header()], rows)


def scaling_report(inputs: ScalingInputs) -> ScalingReport:
    """Estimate every size. Raises ConfigError if the model fits on none of them."""
    costs = costs_of(inputs)
    found = {gpus: estimate(inputs, costs, gpus=gpus) for gpus in inputs.gpus}
    sizes = [size for size in found.values() if size is not None]
    if not sizes:
        raise ConfigError(
            f"gpus: the trainer of {inputs.model.name} needs {costs.trainer.least_gpus} GPUs, and an engine "
            f"{inputs.model.gpus_per_engine}; got {', '.join(map(str, inputs.gpus))}"
        )
    return ScalingReport(inputs, costs, sizes, [gpus for gpus, size in found.items() if size is None])


def run(overrides: Sequence[str], *, gpus: int | None, json: bool) -> ScalingReport:
    """Print the tables and, with `json`, one JSON object on the last line.

    Raises:
        ConfigError: an input is invalid, or the model does not fit.
    """
    report = scaling_report(read_inputs(overrides, gpus=gpus))
    print(f"# {report.inputs.model.name}: an estimate by arithmetic and simulation; nothing of it was run")
    for gpus_of in report.too_small:
        print(f"\n{gpus_of} GPUs are too few for the trainer's memory.")
    for name, text in report.tables():
        print(f"\n## {name}\n\n{text}")
    if json:
        print(orjson.dumps(report.to_dict()).decode())
    return report


_SPEED: Sequence[Row] = (
    ("engines + GPUs of the trainer", lambda s: f"{s.engines} + {s.trainers}"),
    ("groups in a batch", lambda s: _number(s.groups)),
    ("episodes at a time", lambda s: _number(s.open_episodes)),
    ("seconds of a step", lambda s: _number(s.step_s)),
    ("sampled tokens/s", lambda s: _number(s.tokens_per_s)),
    ("… for each GPU", lambda s: _number(s.tokens_per_s / s.gpus)),
    ("trainer idle", lambda s: f"{s.simulated.trainer_idle:.0%}"),
    ("engines idle, swaps included", lambda s: f"{s.simulated.rollout_idle:.0%}"),
    ("staleness of the trained tokens, mean", lambda s: f"{s.simulated.staleness_mean:.2f}"),
    ("tokens beyond η, masked", lambda s: f"{s.simulated.masked:.1%}"),
)

_STORE: Sequence[Row] = (
    ("calls/s", lambda s: _number(s.calls_per_s)),
    ("processor time of a call in the proxy, ms", lambda s: _number(s.call_ms)),
    ("proxies", lambda s: _number(s.proxies)),
    ("memory of a proxy", lambda s: _bytes(1e6 * s.proxy_mb)),
    ("rollout processes", lambda s: _number(s.rollouts)),
    ("processes with a row in `roles`", lambda s: _number(s.processes)),
    ("rows/s written", lambda s: _number(s.writes_per_s)),
    ("… of these heartbeats", lambda s: _number(s.beats_per_s)),
    ("transactions/s, at most", lambda s: _number(s.commits_per_s)),
    ("bytes of a turn", lambda s: _bytes(s.turn_bytes)),
    ("bytes/s of turns", lambda s: _bytes(s.store_bytes_per_s)),
    ("… in a day", lambda s: _bytes(s.store_bytes_per_s * _DAY_S)),
    ("reads/s for health checks", lambda s: _number(s.reads_per_s)),
    ("rows/s that these read", lambda s: _number(s.read_rows_per_s)),
    ("connections", lambda s: _number(s.connections)),
)

_TRANSPORTS: dict[Transport, str] = {
    "disk": "whole, `disk`",
    "broadcast": "whole, `broadcast`",
    "delta": "changed values, `delta`",
    "lora": "an adapter, `lora`",
}

_WEIGHTS: Sequence[tuple[str, Callable[[Publication, ClusterEstimate], str]]] = (
    ("leaves the trainer in a step", lambda p, s: _bytes(p.sent_bytes)),
    ("arrives at all engines, bytes/s", lambda p, s: _bytes(p.received_bytes / s.step_s)),
    ("seconds", lambda p, s: _number(p.trainer_s)),
    ("of these the engines pause", lambda p, s: _number(p.pause_s)),
)

_COST: Sequence[Row] = (
    ("US dollars in a day", lambda s: _number(s.dollars_per_day)),
    ("… for a million sampled tokens", lambda s: f"{s.dollars_per_million_tokens:.2f}"),
    ("… for a step", lambda s: _number(s.dollars_per_day * s.step_s / _DAY_S)),
    ("steps in a day", lambda s: _number(_DAY_S / s.step_s)),
    ("episodes in a day", lambda s: _number(_DAY_S * s.episodes_per_s)),
)


def _per_unit(report: ScalingReport) -> str:
    costs, inputs = report.costs, report.inputs
    engine, trainer, episode = costs.engine, costs.trainer, costs.episode
    model = costs.model
    rows = [
        ["weights", _bytes(model.weight_bytes)],
        ["keys and values of a token", _bytes(model.cache_bytes)],
        ["episode: tokens", _number(episode.rows)],
        ["… of these sampled", _number(episode.sampled_tokens)],
        ["context of a running call", _number(episode.context)],
        ["engine: episodes whose keys and values fit", _number(engine.slots)],
        ["… sampled tokens/s with these", _number(engine.tokens_per_s(engine.slots, episode))],
        ["… seconds to read all their contexts again", _number(engine.refill_s)],
        ["trainer: sampled tokens/s of a GPU", _number(episode.sampled_tokens / trainer.gpu_s_per_episode)],
        [f"… fewest GPUs of {inputs.gpu_gib:g} GiB", _number(trainer.least_gpus)],
    ]
    return _table([report.inputs.model.name, ""], rows)


def _inputs(inputs: ScalingInputs) -> str:
    rows = []
    for one in listed(inputs):
        said = one.kind if not one.source else f"{one.kind}: {one.source}"
        rows.append([f"`{one.key}`", _value(one.value), one.what, said])
    return _table(["key", "value", "what it is", "where it is from"], rows)


def _value(value: Any) -> str:
    if isinstance(value, Distribution):
        cap = "" if value.cap is None else f", cap: {value.cap:g}"
        return f"{{mean: {value.mean:g}, sigma: {value.sigma:g}{cap}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    """Three significant digits, all of a whole part."""
    if value >= 1000:
        digits = 3 - math.ceil(math.log10(value))
        return f"{round(value, digits):,.0f}"
    if value == int(value):
        return f"{value:.0f}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{_number(value)} {unit}" if unit != "B" else f"{value:.0f} B"
        value /= 1000
    raise AssertionError("a value has a unit")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines)
