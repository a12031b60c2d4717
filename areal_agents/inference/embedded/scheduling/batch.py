"""The sampling state of all slots as arrays, so that a step takes only a few array operations."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from areal_agents.inference.embedded.scheduling.request import Request
from areal_agents.inference.embedded.scheduling.sampling import SamplingBatch
from areal_agents.inference.embedded.scheduling.slots import SlotTable

NO_TOKEN = -1


class SlotSampling:
    """Sampling parameters, stop ids, limits and logprobs per slot; rows are valid while the slot is busy.

    `limit` [S] is the length (prompt and output) at which a request ends; `logprobs` [S, T] are indexed by
    output position.
    """

    def __init__(self, slots: int, max_context: int, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self.logprobs = np.zeros((slots, max_context), np.float32)
        self.prompt_length = np.zeros(slots, np.int32)
        self.limit = np.zeros(slots, np.int32)
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._stop_ids = np.full((slots, max(1, len(eos_ids))), NO_TOKEN, np.int32)
        self._temperature = np.ones(slots, np.float32)
        self._top_p = np.ones(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self._top_k = np.zeros(slots, np.int32)
        self._seeds = np.zeros(slots, np.uint64)
        self._frequency = np.zeros(slots, np.float32)
        self._presence = np.zeros(slots, np.float32)

    def assign(self, slot: int, request: Request) -> None:
        """Load the parameters of `request` and its logprobs so far."""
        params = request.sampling
        self.prompt_length[slot] = len(request.prompt)
        self.limit[slot] = len(request.prompt) + params.max_new_tokens
        self.logprobs[slot, : len(request.output_logprobs)] = request.output_logprobs
        self._temperature[slot] = params.temperature
        self._top_p[slot], self._min_p[slot], self._top_k[slot] = params.top_p, params.min_p, params.top_k
        self._seeds[slot] = np.uint64(request.seed)
        self._frequency[slot], self._presence[slot] = params.frequency_penalty, params.presence_penalty
        stop_ids = () if params.ignore_eos else tuple({*self._eos_ids, *params.stop_token_ids})
        if len(stop_ids) > self._stop_ids.shape[1]:
            wider = np.full((len(self.limit), len(stop_ids)), NO_TOKEN, np.int32)
            wider[:, : self._stop_ids.shape[1]] = self._stop_ids
            self._stop_ids = wider
        self._stop_ids[slot] = NO_TOKEN
        self._stop_ids[slot, : len(stop_ids)] = stop_ids

    def batch(self, slots: np.ndarray, lengths: np.ndarray) -> SamplingBatch:
        """Return the parameters of `slots` [M] whose sequences have `lengths` [M] tokens."""
        return SamplingBatch(
            temperature=self._temperature[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            top_k=self._top_k[slots],
            seeds=self._seeds[slots],
            positions=lengths,
        )

    def stops(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return [M] whether each token ends its request."""
        return (self._stop_ids[slots] == tokens[:, None]).any(axis=1)

    def penalised(self, slots: np.ndarray, logits: Tensor, table: SlotTable) -> Tensor:
        """Return logits [M, V] minus frequency · count + presence · (count > 0), counted over each output."""
        rows = np.flatnonzero((self._frequency[slots] != 0.0) | (self._presence[slots] != 0.0))
        if not len(rows):
            return logits
        logits = logits.clone()
        for row in rows.tolist():
            slot = int(slots[row])
            output = table.tokens[slot, self.prompt_length[slot] : table.length[slot]]
            count = np.bincount(output, minlength=self._vocab_size).astype(np.float32)
            penalty = self._frequency[slot] * count + self._presence[slot] * (count > 0)
            logits[row] -= torch.from_numpy(penalty.astype(np.float32)).to(logits.device)
        return logits
