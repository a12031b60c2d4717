"""Collects the terms of the loss of each trained token of a rank, for the records of the step.

Terms stay on the device until the batch is trained, so collecting them waits for nothing. They are the
tensors that the loss was computed from: no forward pass is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_agents.algorithms.losses.objective import TokenTerms
from areal_agents.algorithms.samples import TrainingData
from areal_agents.training.records.files import STATES, StepRows
from areal_agents.training.step.plan import PlannedMicroBatch, TrainedTurn
from areal_agents.training.step.proximal_pass import Scores

_VALUES = ("advantages", "proximal", "current", "reference", "ratio", "weight", "loss_weights", "loss")
_COLUMNS = {"advantages": "advantage", "loss_weights": "loss_weight"}  # where the record has another name


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """The tokens of the policy in one micro-batch.

    Attributes:
        turn_ids, positions: [N] int64, the latter in the sequence. trained, kept, rejected: [N] bool.
        clipped: [N] uint8. values: by name [N] float32.
    """

    minibatch: int
    turns: Mapping[int, TrainedTurn]
    turn_ids: Tensor
    positions: Tensor
    trained: Tensor
    kept: Tensor
    rejected: Tensor
    clipped: Tensor
    values: Mapping[str, Tensor]

    def on_host(self) -> _Pass:
        """The same with its tensors in host memory."""
        tensors = {
            name: getattr(self, name).cpu()
            for name in ("turn_ids", "positions", "trained", "kept", "rejected", "clipped")
        }
        values = {name: tensor.float().cpu() for name, tensor in self.values.items()}
        return _Pass(self.minibatch, self.turns, values=values, **tensors)


@dataclass(eq=False)
class TokenRecorder:
    """The terms of the tokens that this rank has trained so far in a batch."""

    _passes: list[_Pass] = field(default_factory=list)

    def add(self, work: PlannedMicroBatch, terms: TokenTerms, scores: Scores, *, minibatch: int) -> None:
        """Add a micro-batch of optimizer step `minibatch`, counted from 0."""
        batch = work.batch
        sampled = None if batch.observed is None else ~batch.observed

        def of_policy(values: Tensor) -> Tensor:
            return values if sampled is None else values[sampled]

        values = {_COLUMNS.get(name, name): getattr(terms, name) for name in _VALUES}
        if scores.values is not None:
            values["value"] = of_policy(scores.values[work.indices])
        self._passes.append(
            _Pass(
                minibatch=minibatch,
                turns=work.turns,
                turn_ids=of_policy(batch.turn_ids),
                positions=of_policy(batch.position_ids[batch.predictor_rows] + 1),
                trained=of_policy(batch.trained),
                kept=terms.kept,
                rejected=terms.rejected,
                clipped=terms.clipped,
                values={name: tensor for name, tensor in values.items() if tensor is not None},
            )
        )

    def tokens(self) -> TrainedTokens:
        """Return what was added, in host memory."""
        return TrainedTokens(tuple(one.on_host() for one in self._passes))


@dataclass(frozen=True, slots=True, eq=False)
class TrainedTokens:
    """The tokens that this rank trained in a batch, in host memory."""

    _passes: tuple[_Pass, ...] = ()

    def rows(self, *, step: int, version: int, data: TrainingData | None) -> StepRows:
        """Return the rows of the step's file.

        Args:
            version: the trainer's version when the batch began.
            data: the batch, on the first rank: the turns that no rank trains become rows too.
        """
        turns: list[dict[str, Any]] = []
        tokens: list[int] = []
        places: list[
            npt.NDArray[np.int64]
        ] = []  # of the trained tokens of each pass, among those of all rows
        stale: list[int] = []
        end = 0
        for one in self._passes:
            starts: dict[int, int] = {}  # by turn id, where position 0 of its sequence would be
            for turn_id, turn in one.turns.items():
                starts[turn_id] = end - turn.start
                stale += [end + place for place in turn.stale]
                turns.append(_row(turn, step=step, version=version, minibatch=one.minibatch))
                tokens.append(turn.tokens)
                end += turn.tokens
            ids, inverse = np.unique(one.turn_ids[one.trained].numpy(), return_inverse=True)
            first = np.array([starts[turn_id] for turn_id in ids.tolist()], np.int64)
            places.append(first[inverse] + one.positions[one.trained].numpy())
        at = np.concatenate([*places, np.empty(0, np.int64)])
        states, clipped = np.full(end, -1, np.int8), np.full(end, -1, np.int8)
        states[stale] = STATES.index("stale")
        states[at] = self._joined([_states(one) for one in self._passes], np.int8)
        clipped[at] = self._joined([one.clipped[one.trained].numpy() for one in self._passes], np.int8)
        names = {name for one in self._passes for name in one.values}
        values = {name: np.full(end, np.nan, np.float32) for name in names}
        for name, array in values.items():
            array[at] = self._joined(
                [one.values[name][one.trained].numpy() for one in self._passes], np.float32
            )
        rest = [] if data is None else untrained_rows(data, step=step, version=version)
        return StepRows(
            [*turns, *rest], np.array([*tokens, *[0] * len(rest)], np.int64), states, clipped, values
        )

    @staticmethod
    def _joined(arrays: list[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
        return np.concatenate([*arrays, np.empty(0, dtype)])


def untrained_rows(data: TrainingData, *, step: int, version: int) -> list[dict[str, Any]]:
    """Return the rows of the turns of a batch that have no trained token.

    A turn that the algorithm trains, but that has no trained token in any sample, exceeds the staleness bound
    or, for DPO, belongs to a pair of which an episode does.
    """
    trained = {
        (sample.episode_id, turn)
        for sample in data.samples
        for turn in np.unique(sample.turn_index[sample.loss_mask]).tolist()
    }
    return [
        {
            "step": step, "version": version, "use": data.uses.get(rewards.group_id, 0), "minibatch": None,
            "group_id": rewards.group_id, "episode_id": episode_id, "turn_id": turn.id,
            "untrained": turn.untrained or "stale", "tokens": turn.tokens,
        }
        for episode_id, rewards in data.rewards.items()
        for place, turn in enumerate(data.turns[episode_id])
        if (episode_id, place) not in trained
    ]  # fmt: skip


def _row(turn: TrainedTurn, *, step: int, version: int, minibatch: int) -> dict[str, Any]:
    return {
        "step": step, "version": version, "use": turn.use, "minibatch": minibatch,
        "group_id": turn.group_id, "episode_id": turn.episode_id, "turn_id": turn.turn_id,
        "untrained": None, "tokens": turn.tokens,
    }  # fmt: skip


def _states(one: _Pass) -> npt.NDArray[np.int8]:
    """The state of each trained token, an index into `STATES`."""
    states = torch.full(one.trained.shape, STATES.index("trained"), dtype=torch.int8)
    states[one.rejected] = STATES.index("rejected")
    states[~one.kept] = STATES.index("dropped")
    return states[one.trained].numpy()
