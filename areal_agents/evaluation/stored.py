"""Reads the episodes of an evaluation, and what functions are given of any episode, from a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from areal_agents.core.conversations import completions, conversations
from areal_agents.core.rollout import RecordedEpisode, Split
from areal_agents.core.trajectory import Turn
from areal_agents.evaluation.results import AttemptResult
from areal_agents.rewards import FinishedEpisode
from areal_agents.store import EpisodeSummary, Store

ENDED = ("finished", "truncated", "failed")
SCORED = ("finished", "truncated")


def attempts_of(store: Store, label: str, split: Split = "eval") -> dict[tuple[str, int], EpisodeSummary]:
    """Return the ended episodes of an evaluation by (task id, attempt); of repetitions the last one."""
    found = store.episodes(split=split, metadata={"source": "rollout", "eval": label})
    return {(e.task_id, e.metadata.get("attempt", 0)): e for e in found if e.status in ENDED}


def results_in(store: Store, label: str, split: Split = "eval") -> dict[tuple[str, int], AttemptResult]:
    """Return the ended attempts of an evaluation by (task id, attempt)."""
    return {
        key: _attempt(store, summary, key[1]) for key, summary in attempts_of(store, label, split).items()
    }


def _attempt(store: Store, summary: EpisodeSummary, index: int) -> AttemptResult:
    episode = store.load_episode(summary.id)
    failed = summary.status == "failed"
    versions = summary.version_min, summary.version_max
    return AttemptResult(
        episode=summary.id,
        index=index,
        status=summary.status,
        score=0.0 if failed else summary.score or 0.0,
        rewards={r.name: r.value for r in episode.rewards if r.scope == "episode"},
        turns=summary.turns,
        sampled_tokens=summary.sampled_tokens,
        prompt_tokens=sum(prompt_lengths(episode.turns)),
        seconds=round((summary.ended_at or summary.created_at) - summary.created_at, 3),
        error=summary.error,
        tool_calls=dict(episode.tool_calls),
        versions=None if versions[0] is None or versions[1] is None else (versions[0], versions[1]),
    )


def prompt_lengths(turns: Sequence[Turn]) -> Iterator[int]:
    """Yield the number of prompt tokens of each turn, those of the turns that it continues among them."""
    ends: dict[str, int] = {}
    for turn in turns:
        prompt = (ends[turn.parent] if turn.parent is not None else 0) + len(turn.new_prompt_ids)
        ends[turn.id] = prompt + len(turn.completion)
        yield prompt


def finished_episodes(store: Store, ids: Sequence[str]) -> Iterator[FinishedEpisode]:
    """Yield what a function of finished episodes is given, one episode in memory at a time."""
    for episode_id in ids:
        yield stored_episode(store.load_episode(episode_id))


def stored_episode(episode: RecordedEpisode, without: Sequence[str] = ()) -> FinishedEpisode:
    """Return what a function is given of a stored episode that has ended.

    Args:
        without: names of rewards that the function is not told.
    """
    turns = [
        {
            "id": turn.id,
            "parent": turn.parent,
            "new_messages": [message.to_chat() for message in turn.new_messages],
            "reply": turn.reply.to_chat(),
        }
        for turn in episode.turns
    ]
    return FinishedEpisode(
        id=episode.id,
        task=episode.task.input,
        branches=tuple(conversations(turns)),
        status=episode.status,
        rewards={
            reward.name: reward.value
            for reward in episode.rewards
            if reward.scope == "episode" and reward.name not in without
        },
        completions=tuple(completions(turns)),
    )
