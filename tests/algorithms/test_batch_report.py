"""The statistics of a batch that its metrics show."""

from __future__ import annotations

from dataclasses import replace

from algorithms_support import episode, group, turn

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.report import batch_report
from areal_agents.core.messages import Message, ToolCall
from areal_agents.core.rollout import RecordedEpisode


def played(id: str, reward: float, *, calls: int, tools_id: str = "digest") -> RecordedEpisode:
    """An episode of two turns, the first of which calls the tool so many times."""
    called = tuple(ToolCall(f"{id}-{n}", "search", "{}") for n in range(calls))
    first = replace(turn(f"{id}-1", tools_id=tools_id), reply=Message("assistant", "", tool_calls=called))
    return episode([first, turn(f"{id}-2", f"{id}-1", tools_id=tools_id)], reward, id=id)


def test_the_use_of_tools_is_that_of_the_episodes_that_were_offered_some() -> None:
    episodes = [
        played("a", 1.0, calls=2),
        played("b", 1.0, calls=0),  # succeeds without the tool
        played("c", 0.0, calls=0),
        played("d", 0.5, calls=1),
        played("e", 1.0, calls=0, tools_id=""),  # was offered none
    ]
    report = batch_report([group(episodes)], (), AlgorithmConfig())
    assert (report.tool_calls, report.with_tools, report.rewarded_without_tools) == (3, 4, 1 / 3)


def test_a_batch_without_tools_says_nothing_about_them() -> None:
    without = batch_report([group([played("e", 1.0, calls=0, tools_id="")])], (), AlgorithmConfig())
    assert (without.tool_calls, without.rewarded_without_tools) == (None, None)
    unrewarded = batch_report([group([played("c", 0.0, calls=1)])], (), AlgorithmConfig())
    assert (unrewarded.tool_calls, unrewarded.rewarded_without_tools) == (1, None)
