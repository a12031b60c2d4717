"""What a user reads of an evaluation whose episodes failed."""

from __future__ import annotations

import io

from rich.console import Console

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
