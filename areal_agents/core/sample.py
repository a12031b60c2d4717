"""What the trainer consumes: one sample per trajectory, every array aligned with its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from areal_agents.core.completion import Logprobs, TokenIds, Versions


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """One root-to-leaf path, ready to be packed. All arrays have shape [L].

    Attributes:
        token_ids: prompt and sampled ids.
        loss_mask: True where the token is sampled, trained, and owned by this sample (a token that
            several leaves share is owned by one of them).
        behavior_logprobs: 0 where the token was not sampled.
        versions: policy version per sampled token, -1 elsewhere.
        temperatures: sampling temperature per token, 1 where not sampled.
        advantages: 0 where the mask is False.
        episode_id, group_id: where it comes from, for errors and metrics.
    """

    token_ids: TokenIds
    loss_mask: npt.NDArray[np.bool_]
    behavior_logprobs: Logprobs
    versions: Versions
    temperatures: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    episode_id: str
    group_id: str

    def __post_init__(self) -> None:
        lengths = {
            name: len(getattr(self, name))
            for name in (
                "token_ids",
                "loss_mask",
                "behavior_logprobs",
                "versions",
                "temperatures",
                "advantages",
            )
        }
        if len(set(lengths.values())) != 1 or not lengths["token_ids"]:
            raise ValueError(f"group {self.group_id}, episode {self.episode_id}: misaligned arrays {lengths}")
        if self.loss_mask[0]:
            raise ValueError(f"episode {self.episode_id}: the first token has no prediction to train")
        if not np.isfinite(self.advantages).all() or not np.isfinite(self.behavior_logprobs).all():
            raise ValueError(
                f"group {self.group_id}, episode {self.episode_id}: a non-finite advantage or logprob"
            )

    def __len__(self) -> int:
        return len(self.token_ids)
