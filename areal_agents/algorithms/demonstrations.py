"""Self-distillation: the demonstration that the teacher, which is the policy itself, reads before an episode.

The recorded tokens of the demonstration precede those of the episode, so no template is involved: the teacher
reads the better episode and then the other one as one context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from areal_agents.algorithms.credit.advantages import all_equal
from areal_agents.algorithms.credit.rewards import Floats
from areal_agents.algorithms.ordering import trajectories
from areal_agents.core.completion import TokenIds
from areal_agents.core.rollout import RolloutGroup
from areal_agents.core.sample import TrainingSample


def best_of_each_group(
    groups: Sequence[RolloutGroup], group_scores: Mapping[str, Floats]
) -> dict[str, TokenIds]:
    """The tokens of the best episode of its group, by episode id, for each episode with a lower score.

    The tokens are those of the last root-to-leaf path of the best episode; the first of several equally good
    episodes is used.
    """
    found: dict[str, TokenIds] = {}
    for group in groups:
        scores = group_scores[group.id]
        best = int(np.argmax(scores))
        paths = trajectories(group.rollouts[best].episode)
        if not paths:
            continue
        last = {turn.id: place for place, turn in enumerate(group.rollouts[best].episode.turns)}
        tokens = max(paths, key=lambda path: last[path.turns[-1].id]).token_ids
        for rollout, score in zip(group.rollouts, scores, strict=True):
            if not all_equal([score, scores[best]]):
                found[rollout.episode.id] = tokens
    return found


def with_demonstrations(
    samples: Sequence[TrainingSample], demonstrations: Mapping[str, TokenIds]
) -> list[TrainingSample]:
    """The samples as the teacher of self-distillation reads them: each after its demonstration.

    The scored tokens are the same, in the same order; the demonstration's tokens are context only.
    """
    prefixed = []
    for sample in samples:
        before = demonstrations[sample.episode_id]

        def prefixed_with(array: np.ndarray, value: float, count: int = len(before)) -> np.ndarray:
            return np.concatenate([np.full(count, value, array.dtype), array])

        prefixed.append(
            replace(
                sample,
                token_ids=np.concatenate([before, sample.token_ids]),
                loss_mask=prefixed_with(sample.loss_mask, False),
                behavior_logprobs=prefixed_with(sample.behavior_logprobs, 0),
                versions=prefixed_with(sample.versions, -1),
                temperatures=prefixed_with(sample.temperatures, 1),
                advantages=prefixed_with(sample.advantages, 0),
                turn_index=prefixed_with(sample.turn_index, -1),
                images=tuple(replace(image, start=image.start + len(before)) for image in sample.images),
                prefix_mask=None if sample.prefix_mask is None else prefixed_with(sample.prefix_mask, False),
                observation_mask=None
                if sample.observation_mask is None
                else prefixed_with(sample.observed, False),
                routed_experts=None,
            )
        )
    return prefixed
