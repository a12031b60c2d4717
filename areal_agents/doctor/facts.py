"""Computes the facts of the report from what was observed."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from areal_agents.core.rollout import RecordedEpisode
from areal_agents.core.trajectory import Turn
from areal_agents.doctor.changing_text import changing_texts
from areal_agents.doctor.forks import explanation_of
from areal_agents.doctor.observed import MODEL_ENDPOINTS, Observed
from areal_agents.doctor.report import Branch, Facts, Refusal

_LONGEST_MESSAGE = 400


def facts_of(seen: Observed) -> Facts:
    """Return the facts of an examined episode."""
    turns, records = seen.turns, seen.records
    episodes = (seen.given, *seen.implicit)
    return Facts(
        endpoints=dict(Counter(record.endpoint for record in records)),
        dialects=sorted({record.dialect for record in records}),
        clients=sorted({request.client for request in seen.requests if request.client}),
        calls=len(records),
        streamed=sum(record.streamed for record in records),
        turns=len(turns),
        roots=sum(turn.parent is None for turn in turns),
        branches=sum(len(episode.forest.leaves()) for episode in episodes),
        forks=_forks(turns),
        changing_texts=changing_texts(seen),
        volatile_as_first_seen=sum(turn.volatile_as_first_seen for turn in turns),
        prompt_tokens=sum(_prompt_length(episode, turn) for episode in episodes for turn in episode.turns),
        reused_share=_reused_share(episodes),
        exact_share=_exact_share(episodes),
        sampled_tokens=sum(len(turn.completion) for turn in turns),
        trained_share=_trained_share(seen),
        retries=sum(record.retry_count > 0 for record in records),
        repeated=sum(record.repeated for record in records),
        ignored_fields=dict(
            Counter(name for record in records if not record.code for name in record.ignored)
        ),
        overridden=dict(Counter(name for turn in turns for name in turn.overrides)),
        labels=dict(Counter(turn.label for turn in turns if turn.label)),
        refused=_refused(seen),
        hosts=[*seen.source_hosts, *seen.environment_hosts],
        telemetry=list(seen.telemetry),
        episode=_whose(seen),
        rewarded=bool(seen.given.rewards),
    )


def is_trained(turn: Turn) -> bool:
    """Whether training would use a turn under the default configuration."""
    return not turn.constrained and not turn.discarded


def _forks(turns: tuple[Turn, ...]) -> list[Branch]:
    found = []
    for number, turn in enumerate(turns, 1):
        if (fork := turn.forked_from) is not None:
            why = explanation_of(fork)
            found.append(
                Branch(
                    number, fork.reason, why.sentence, why.fix, why.is_normal, fork.diverged_at, turn.label
                )
            )
    return found


def _prompt_length(episode: RecordedEpisode, turn: Turn) -> int:
    return len(episode.forest.prompt_ids(turn.id))


def _reused_share(episodes: tuple[RecordedEpisode, ...]) -> float | None:
    later = [(episode, turn) for episode in episodes for turn in episode.turns[1:]]
    total = sum(_prompt_length(episode, turn) for episode, turn in later)
    added = sum(len(turn.new_prompt_ids) for _, turn in later)
    return (total - added) / total if total else None


def _exact_share(episodes: tuple[RecordedEpisode, ...]) -> float | None:
    """Return the share of the repeated tokens that are recorded ids.

    A turn with a parent repeats the tokens of its parent. A turn that forked from another one, for a reason
    that could be avoided, repeats at most the tokens of that one, as a rendering of their messages.
    """
    recorded = rendered = 0
    for episode in episodes:
        for turn in episode.turns:
            length, fork = _prompt_length(episode, turn), turn.forked_from
            if turn.parent is not None:
                recorded += length - len(turn.new_prompt_ids)
            elif fork is not None and fork.turn is not None and not explanation_of(fork).is_normal:
                rendered += min(length, len(episode.forest.context(fork.turn)))
    total = recorded + rendered
    return recorded / total if total else None


def _trained_share(seen: Observed) -> float | None:
    sampled = sum(len(turn.completion) for turn in seen.turns)
    trained = sum(len(turn.completion) for turn in seen.given.turns if is_trained(turn))
    return trained / sampled if sampled else None


def _refused(seen: Observed) -> list[Refusal]:
    """Return the refused calls, and then the requests to endpoints that do not exist."""
    counts: Counter[tuple[str, int, str, str]] = Counter()
    for record in seen.records:
        if record.code:
            message = record.message[:_LONGEST_MESSAGE]
            counts[(record.endpoint, record.status, record.code, message)] += 1
    for request in seen.requests:
        if request.status >= 400 and request.path not in MODEL_ENDPOINTS:
            what = f"{request.method} {request.path}"
            counts[(request.path, request.status, "no_such_endpoint", what)] += 1
    return [Refusal(*key, count) for key, count in counts.items()]


def _whose(seen: Observed) -> Literal["given", "implicit", "both", "none"]:
    ids = {record.episode_id for record in seen.records if record.episode_id}
    given = seen.given.id in ids
    if len(ids) > given:
        return "both" if given else "implicit"
    return "given" if given else "none"
