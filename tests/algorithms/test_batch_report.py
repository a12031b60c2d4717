"""The statistics of a batch that are reported as metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from algorithms_support import episode, group, turn

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.report import batch_report
from areal_agents.core.messages import Message, ToolCall
from areal_agents.core.rollout import RecordedEpisode


def played(
    id: str, reward: float, *, calls: int, tools_id: str = "digest", names: Sequence[str] = ("search",)
) -> RecordedEpisode:
    """An episode of two turns, of which the first calls each tool `calls` times."""
    called = tuple(ToolCall(f"{id}-{n}-{name}", name, "{}") for n in range(calls) for name in names)
    first = replace(turn(f"{id}-1", tools_id=tools_id), reply=Message("assistant", "", tool_calls=called))
    return episode([first, turn(f"{id}-2", f"{id}-1", tools_id=tools_id)], reward, id=id)


def test_tool_statistics_cover_the_episodes_that_were_offered_tools() -> None:
    episodes = [
        played("a", 1.0, calls=2),
        played("b", 1.0, calls=0),  # succeeds without the tool
        played("c", 0.0, calls=0),
        played("d", 0.5, calls=1),
        played("e", 1.0, calls=0, tools_id=""),  # was offered no tools
    ]
    report = batch_report([group(episodes)], (), AlgorithmConfig())
    assert (report.tool_calls, report.with_tools, report.rewarded_without_tools) == (3, 4, 1 / 3)
    assert report.tool_calls_by_name == {"search": 3 / 4}


def test_tools_beyond_the_most_frequent_ones_are_counted_together() -> None:
    made_up = [f"tool{n}" for n in range(25)]
    episodes = [played("a", 1.0, calls=1, names=made_up), played("b", 0.0, calls=4, names=["search"])]
    report = batch_report([group(episodes)], (), AlgorithmConfig())
    assert report.tool_calls == 29 and len(report.tool_calls_by_name) == 21
    assert (report.tool_calls_by_name["search"], report.tool_calls_by_name["other"]) == (2.0, 3.0)


def test_demonstrations_have_no_share_of_rewarded_episodes_without_tools() -> None:
    groups = [group([played("a", 1.0, calls=0), played("b", 1.0, calls=1)])]
    report = batch_report(groups, (), AlgorithmConfig.model_validate({"preset": "sft"}))
    assert (report.tool_calls, report.rewarded_without_tools) == (1, None)


def test_a_batch_without_tools_has_no_tool_statistics() -> None:
    without = batch_report([group([played("e", 1.0, calls=0, tools_id="")])], (), AlgorithmConfig())
    assert (without.tool_calls, without.rewarded_without_tools) == (None, None)
    assert without.tool_calls_by_name == {}
    unrewarded = batch_report([group([played("c", 0.0, calls=1)])], (), AlgorithmConfig())
    assert (unrewarded.tool_calls, unrewarded.rewarded_without_tools) == (1, None)
