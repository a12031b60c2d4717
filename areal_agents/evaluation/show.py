"""Prints the results of an evaluation, a comparison of two, and a rescoring as tables."""

from __future__ import annotations

import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from areal_agents.evaluation.comparison import Comparison
from areal_agents.evaluation.estimators import CONFIDENCE
from areal_agents.evaluation.rescoring import Rescoring
from areal_agents.evaluation.results import COSTS, Estimate, Metrics, Results
from areal_agents.inspection.show import printable

_SHOWN_IDS = 5
_SHOWN_TOOLS = 4
COST_NAMES = {
    "turns": "turns",
    "sampled_tokens": "sampled tokens",
    "prompt_tokens": "prompt tokens",
    "seconds": "seconds",
}


def show_results(results: Results, console: Console) -> None:
    """Print the metrics of an evaluation, and those of each slice."""
    names, found = results.metric_names, results.metrics()
    table = Table("metric", "value", f"{CONFIDENCE:.0%} interval")
    for name in names:
        table.add_row(name, *_cells(found.scores[name]))
    console.print(f"evaluation of {results.model}", soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    costs = ", ".join(f"{found.costs[name]:,.1f} {COST_NAMES[name]}" for name in COSTS)
    console.print(f"{_counts(found)}; mean of an episode: {costs}", soft_wrap=True, highlight=False)
    if found.tool_calls:
        calls = ", ".join(f"{count:,.1f} {name}" for name, count in _shown_tools(found).items())
        more = len(found.tool_calls) - len(_shown_tools(found))
        text = f"tool calls: {calls}" + (f", and {more} more tools" if more else "")
        console.print(printable(text), soft_wrap=True, highlight=False, markup=False)
    if found.tokens_estimated:
        console.print(
            f"the endpoint reported no usage in {found.tokens_estimated} of these episodes: their tokens are "
            "estimates, counted with the tokenizer of the configuration's model",
            soft_wrap=True,
            highlight=False,
        )
    failures = [attempt for task in results.tasks for attempt in task.attempts if attempt.status == "failed"]
    if failures:
        text = f"the last failure: {failures[-1].episode}: {failures[-1].error or 'no reason is known'}"
        console.print(printable(text), soft_wrap=True, highlight=False, markup=False)
    shown = [name for name in names if not name.startswith("pass") or name[5:] == str(results.attempts)]
    for field, slices in results.slices().items():
        tools = _shown_tools(found)
        names_of_tools = [escape(printable(tool)) for tool in tools]
        table = Table(field, "tasks", *shown, "failed", *COST_NAMES.values(), *names_of_tools)
        for value, metrics in slices.items():
            cells = [_short(metrics.scores[name]) for name in shown]
            of_costs = [f"{metrics.costs[name]:,.1f}" for name in COSTS]
            of_tools = [f"{metrics.tool_calls.get(name, 0.0):,.1f}" for name in tools]
            table.add_row(Text(value), str(metrics.tasks), *cells, str(metrics.failed), *of_costs, *of_tools)
        console.print(table)


def _shown_tools(metrics: Metrics) -> dict[str, float]:
    """Return the tools that are called most, with their calls in an episode."""
    return dict([*metrics.tool_calls.items()][:_SHOWN_TOOLS])


def show_comparison(first: Results, second: Results, found: Comparison, console: Console) -> None:
    """Print two evaluations side by side, with the differences and their tests."""
    console.print(f"A: {first.model}\nB: {second.model}", soft_wrap=True, highlight=False, markup=False)
    for name, (of_first, of_second) in found.settings.items():
        kind, _, part = name.partition("sources: ")
        if part and not kind:  # its values are digests
            text = f"the {part} differs in its files or packages"
        else:
            text = f"{name} differs: {_setting(of_first)} in A, {_setting(of_second)} in B"
        console.print(printable(text), style="bold", soft_wrap=True, markup=False, highlight=False)
    console.print(f"{found.common} tasks are in both", highlight=False)
    for name, ids in (("A", found.only_first), ("B", found.only_second)):
        if ids:
            more = f" and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else ""
            text = f"only in {name}, and not compared: {', '.join(ids[:_SHOWN_IDS])}{more}"
            console.print(text, soft_wrap=True, markup=False, highlight=False)
    table = Table("metric", "A", "B", "B - A", f"{CONFIDENCE:.0%} interval", "p", "B better, worse", "test")
    for d in found.differences:
        bounds = "–" if d.low is None or d.high is None else f"{d.low:+.3f} to {d.high:+.3f}"
        table.add_row(
            d.metric, f"{d.first:.3f}", f"{d.second:.3f}", f"{d.second - d.first:+.3f}", bounds, _p(d.p),
            f"{d.better}, {d.worse}", d.test,
        )  # fmt: skip
    for name in COSTS:
        before, after = found.costs[name]
        table.add_row(
            COST_NAMES[name], f"{before:,.1f}", f"{after:,.1f}", f"{after - before:+,.1f}", "", "", "", ""
        )
    console.print(table)


def show_rescoring(found: Rescoring, console: Console) -> None:
    """Print how the scores of a rescoring differ from the stored ones, and why the function failed."""
    table = Table("episodes", "old mean", "new mean", f"new - old, {CONFIDENCE:.0%} interval", "p", "changed")
    if found.mean_old is None or found.mean_new is None:
        console.print("no episode has both an old and a new score")
    else:
        bounds = (
            "" if found.low is None or found.high is None else f" ({found.low:+.3f} to {found.high:+.3f})"
        )
        table.add_row(
            str(len(found.episodes)), f"{found.mean_old:.3f}", f"{found.mean_new:.3f}",
            f"{found.mean_new - found.mean_old:+.3f}{bounds}", _p(found.p), str(found.changed),
        )  # fmt: skip
        console.print(table)
        console.print("each task weighs the same in the means", highlight=False)
    failures = [row for row in found.episodes if row.error is not None]
    if failures:
        console.print(f"the function failed on {len(failures)} episodes:", highlight=False)
        for row in failures[:_SHOWN_IDS]:
            text = f"  {row.episode} (task {row.task}): {row.error}"
            console.print(printable(text), soft_wrap=True, markup=False, highlight=False)


def _setting(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cells(estimate: Estimate) -> tuple[str, str]:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}", "–"
    return f"{estimate.value:.3f}", f"{estimate.low:.3f} to {estimate.high:.3f}"


def _short(estimate: Estimate) -> str:
    value, bounds = _cells(estimate)
    return value if bounds == "–" else f"{value} ({bounds})"


def _counts(metrics: Metrics) -> str:
    failed = f", of which {metrics.failed} failed and count as 0" if metrics.failed else ""
    return f"{metrics.tasks} tasks, {metrics.episodes} episodes{failed}"


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"
