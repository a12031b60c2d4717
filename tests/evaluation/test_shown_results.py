"""What is shown of the results of an evaluation: the last failure, and the calls of tools."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from areal_agents.evaluation.endpoint.relay import RelayedEpisode
from areal_agents.evaluation.results import AttemptResult, Results, TaskResult
from areal_agents.evaluation.show import show_results


def attempt(episode: str, status: str, error: str | None) -> AttemptResult:
    return AttemptResult(episode, 0, status, 0.0, {}, 1, 2, 3, 0.5, error=error)


def test_the_last_failure_is_shown_with_its_reason() -> None:
    tasks = (
        TaskResult("a", (attempt("e1", "failed", "502: the server answered with HTML"),)),
        TaskResult("b", (attempt("e2", "finished", None),)),
    )
    out = io.StringIO()
    show_results(Results("n", "m", 1, 0.0, 1.0, False, tasks), Console(file=out, width=200))
    assert "the last failure: e1: 502: the server answered with HTML" in out.getvalue()
    out = io.StringIO()
    show_results(Results("n", "m", 1, 0.0, 1.0, False, tasks[1:]), Console(file=out, width=200))
    assert "failure" not in out.getvalue()


def test_the_calls_of_each_tool_are_shown_for_all_tasks_and_for_each_slice(tmp_path: Path) -> None:
    def task(name: str, hops: str, **calls: int) -> TaskResult:
        return TaskResult(name, (replace(attempt(name, "finished", None), tool_calls=calls),), {"hops": hops})

    failed = TaskResult("d", (replace(attempt("d", "failed", "x"), tool_calls={"search": 9}),), {"hops": "2"})
    tasks = (task("a", "1", search=1), task("b", "2", search=2, access=1), task("c", "2"), failed)
    Results("n", "m", 1, 0.0, 1.0, False, tasks).write(tmp_path / "results.json")
    results = Results.read(tmp_path)
    assert results.metrics().tool_calls == {"search": 1.0, "access": pytest.approx(1 / 3)}
    assert results.slices()["hops"]["2"].tool_calls == {"search": 1.0, "access": 0.5}
    out = io.StringIO()
    show_results(results, Console(file=out, width=200))
    assert "tool calls: 1.0 search, 0.3 access" in out.getvalue()
    [row] = [line for line in out.getvalue().splitlines() if line.startswith("│ 2 ")]
    assert [cell.strip() for cell in row.split("│")[-3:-1]] == ["1.0", "0.5"]


@pytest.mark.parametrize(
    ("called", "counted"),
    [
        ([{"function": {"name": "search", "arguments": "{}"}}] * 2, {"search": 2}),
        ([{"custom": {"name": "x"}}, {"function": None}, "no", {"function": {"name": 7}}], {}),
        (None, {}),
    ],
)
def test_the_tool_calls_that_an_endpoint_returned_are_counted(
    called: object, counted: Mapping[str, int]
) -> None:
    episode = RelayedEpisode("e", "key", {"id": "t", "input": {}}, 0, {}, None)
    reply = {"role": "assistant", "content": None, "tool_calls": called}
    episode.record({"messages": [{"role": "user", "content": "?"}]}, reply, {})
    assert episode.entry(None).result.tool_calls == counted
