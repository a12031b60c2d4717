"""The samples that the trainer consumes: one per trajectory, with every array aligned with its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from areal_agents.core.completion import Logprobs, TokenIds, Versions


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """One image as a vision model takes it.

    Attributes:
        pixel_values: [P, D] float32, one row per patch.
        grid_thw: patches in time, height and width; their product is P.
        start, length: its tokens in the sample are `token_ids[start : start + length]`.
    """

    pixel_values: npt.NDArray[np.float32]
    grid_thw: tuple[int, int, int]
    start: int
    length: int

    def __post_init__(self) -> None:
        time, height, width = self.grid_thw
        if self.pixel_values.ndim != 2 or len(self.pixel_values) != time * height * width:
            raise ValueError(
                f"an image of {time} x {height} x {width} patches cannot have pixel values of shape "
                f"{self.pixel_values.shape}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """One root-to-leaf path, ready to be packed. All arrays have shape [L].

    Attributes:
        token_ids: prompt and sampled ids.
        loss_mask: True where the token is sampled, trained, and owned by this sample (a token that
            several leaves share is owned by one of them).
        behavior_logprobs: 0 where the token was not sampled, NaN where it was imported.
        versions: policy version per sampled token, -1 elsewhere.
        temperatures: sampling temperature per token, 1 where not sampled.
        advantages: 0 where the mask is False.
        turn_index: the token's turn as an index into `Episode.turns`, -1 where not sampled.
        episode_id, group_id: the origin of the sample, for errors and metrics.
        prefix_mask: True where the token is trained, by another sample that shares this prefix; set only
            where a loss or a correction looks at whole paths, else None.
        observation_mask: True where the environment wrote the token and its cross entropy is trained here;
            None if there is none.
        images: in the order of the image tokens.
        routed_experts: [L, layers, k] the experts that the engine chose; None if it did not report them.
    """

    token_ids: TokenIds
    loss_mask: npt.NDArray[np.bool_]
    behavior_logprobs: Logprobs
    versions: Versions
    temperatures: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    turn_index: npt.NDArray[np.int32]
    episode_id: str
    group_id: str
    prefix_mask: npt.NDArray[np.bool_] | None = None
    observation_mask: npt.NDArray[np.bool_] | None = None
    images: tuple[ImageInput, ...] = ()
    routed_experts: npt.NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        where = f"group {self.group_id}, episode {self.episode_id}"
        names = [
            "token_ids",
            "loss_mask",
            "behavior_logprobs",
            "versions",
            "temperatures",
            "advantages",
            "turn_index",
        ]
        if self.prefix_mask is not None:
            names.append("prefix_mask")
        if self.observation_mask is not None:
            names.append("observation_mask")
        if self.routed_experts is not None:
            names.append("routed_experts")
            if self.routed_experts.ndim != 3:
                raise ValueError(
                    f"{where}: routed experts must have the shape [L, layers, k], got "
                    f"{self.routed_experts.shape}"
                )
        lengths = {name: len(getattr(self, name)) for name in names}
        if len(set(lengths.values())) != 1 or not lengths["token_ids"]:
            raise ValueError(f"{where}: all arrays must have one length of at least 1, got {lengths}")
        if self.prefix_mask is not None and (self.prefix_mask & self.loss_mask).any():
            raise ValueError(f"{where}: a token is trained both here and by another sample")
        if (self.observed & self.policy_mask).any():
            raise ValueError(f"{where}: a token is both an observation and sampled by the policy")
        if self.observed.any() and not self.loss_mask[np.flatnonzero(self.observed)[-1] :].any():
            raise ValueError(f"{where}: an observation is not followed by a trained token")
        for image in self.images:
            if self.observed[image.start : image.start + image.length].any():
                raise ValueError(f"{where}: a token of an image cannot be predicted as an observation")
        if self.scored_mask[0]:
            raise ValueError(f"{where}: the first token cannot be trained, because nothing predicts it")
        if not np.isfinite(self.advantages).all() or np.isinf(self.behavior_logprobs).any():
            raise ValueError(f"{where}: every advantage and behavior logprob must be finite")
        if (self.turn_index[self.loss_mask] < 0).any():
            raise ValueError(f"{where}: a trained token belongs to no turn")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def policy_mask(self) -> npt.NDArray[np.bool_]:
        """[L] True at the sampled tokens whose logprob is computed: trained ones, and `prefix_mask`."""
        return self.loss_mask if self.prefix_mask is None else self.loss_mask | self.prefix_mask

    @property
    def observed(self) -> npt.NDArray[np.bool_]:
        """[L] `observation_mask`, False everywhere without one."""
        return np.zeros_like(self.loss_mask) if self.observation_mask is None else self.observation_mask

    @property
    def scored_mask(self) -> npt.NDArray[np.bool_]:
        """[L] True where the token's logprob is computed: `policy_mask`, and `observation_mask`."""
        return self.policy_mask if self.observation_mask is None else self.policy_mask | self.observation_mask
