"""Samples tokens: one uniform number per token, by inversion of the (truncated) distribution.

The number is a hash of (the request's seed, the token's position), so that a seeded request samples the same
tokens whatever else is in its batch, before and after a pause, and also if it is continued by another request
whose prompt ends with the tokens sampled so far. Logprobs are those of the distribution after
temperature and before top-k, top-p and min-p, as SGLang reports them; greedy rows use temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Float32 = npt.NDArray[np.float32]
_SCORED_ROWS = 64  # rows whose whole distributions are in memory at once while given tokens are scored
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """The sampling parameters of M rows; temperature 0 is greedy, top_k 0 is off.

    `seeds` [M] uint64 and `positions` [M] (how many tokens precede, with the prompt's) determine the sample.
    """

    temperature: Float32  # [M]
    top_p: Float32  # [M]
    min_p: Float32  # [M]
    top_k: npt.NDArray[np.int32]  # [M]
    seeds: npt.NDArray[np.uint64]  # [M]
    positions: npt.NDArray[np.int32]  # [M]

    @property
    def limited(self) -> npt.NDArray[np.bool_]:
        """[M] rows that top-k, top-p or min-p truncates."""
        return (self.top_p < 1.0) | (self.top_k > 0) | (self.min_p > 0.0)

    def select(self, rows: npt.NDArray[np.intp]) -> SamplingBatch:
        """Return the parameters of `rows` only."""
        return SamplingBatch(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def uniform(self) -> npt.NDArray[np.float64]:
        """[M] numbers in [0, 1) from (seed, position): two rounds of the splitmix64 finaliser."""
        mixed = _mix(self.seeds + _GOLDEN)
        mixed = _mix(mixed ^ ((self.positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN))
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


@torch.inference_mode()
def sample(logits: Tensor, batch: SamplingBatch) -> tuple[npt.NDArray[np.int32], Float32]:
    """Sample a token from each row of logits [M, V]; return tokens [M] and their logprobs [M].

    A row whose logits are not finite gets a logprob that is not finite; the caller ends that request.
    """
    device = logits.device
    greedy = batch.temperature == 0.0
    if (batch.temperature != 1.0).any():
        scale = torch.from_numpy(np.where(greedy, np.float32(1.0), batch.temperature)).to(device)
        logits = logits / scale[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    if greedy.all():
        tokens = logits.argmax(dim=-1)
    else:
        tokens = _invert(_truncate(logprobs, batch), batch.uniform())
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(device), logits.argmax(dim=-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return tokens.to("cpu", torch.int32).numpy(), chosen.cpu().numpy()


@torch.inference_mode()
def best_tokens(logits: Tensor, temperature: float, count: int) -> list[tuple[float, int]]:
    """The `count` most likely tokens of a row of logits [V] with their logprobs, as `sample` takes them."""
    logprobs = torch.log_softmax(logits / temperature if temperature else logits, dim=-1)
    best = logprobs.topk(min(count, len(logprobs)))
    return list(zip(best.values.tolist(), best.indices.tolist(), strict=True))


@torch.inference_mode()
def score_tokens(
    logits: Tensor, tokens: npt.NDArray[np.int32], top: int
) -> tuple[Float32, npt.NDArray[np.int32], Float32]:
    """Logprobs of given tokens under rows of logits, at temperature 1.

    Args:
        logits: [N, V], float32.
        tokens: [N] one per row.
        top: how many of the most likely tokens to return for each row, at most V.

    Returns:
        logprobs [N] of `tokens`, and the ids and logprobs [N, top] of the most likely tokens, best first.
    """
    logprobs = np.empty(len(tokens), np.float32)
    top_ids = np.empty((len(tokens), top), np.int32)
    top_logprobs = np.empty((len(tokens), top), np.float32)
    for first in range(0, len(tokens), _SCORED_ROWS):
        part = slice(first, first + _SCORED_ROWS)
        table = torch.log_softmax(logits[part], dim=-1)
        given = torch.from_numpy(tokens[part].astype(np.int64)).to(table.device)
        logprobs[part] = table.gather(1, given[:, None])[:, 0].cpu().numpy()
        if top:
            best = table.topk(top)
            top_ids[part] = best.indices.cpu().numpy()
            top_logprobs[part] = best.values.cpu().numpy()
    return logprobs, top_ids, top_logprobs


def _truncate(logprobs: Tensor, batch: SamplingBatch) -> Tensor:
    """Probabilities [M, V] in which the tokens that top-k, top-p and min-p exclude are zero.

    Each limit is taken on the full distribution. top-p keeps the most likely tokens until their mass reaches
    it, and always the first.
    """
    probs = logprobs.exp()
    limited = batch.limited
    if not limited.any():
        return probs
    rows = torch.from_numpy(np.flatnonzero(limited)).to(probs.device)
    chosen = limited.nonzero()[0]
    ranked, order = probs[rows].sort(dim=-1, descending=True, stable=True)
    vocab = ranked.shape[1]
    top_k = np.where(batch.top_k[chosen] > 0, batch.top_k[chosen], vocab)
    top_p, min_p, rank_limit = (
        torch.from_numpy(a).to(probs.device)[:, None]
        for a in (batch.top_p[chosen], batch.min_p[chosen], top_k)
    )
    mass_before = ranked.cumsum(dim=-1) - ranked
    outside = (mass_before > top_p) | (ranked < ranked[:, :1] * min_p)
    outside |= torch.arange(vocab, device=probs.device) >= rank_limit
    kept = torch.zeros_like(ranked).scatter_(1, order, ranked.masked_fill(outside, 0.0))
    return probs.index_copy(0, rows, kept)


def _invert(probs: Tensor, uniform: npt.NDArray[np.float64]) -> Tensor:
    """The token at which each row's cumulative mass [M, V] passes uniform [M] of its total."""
    mass = probs.cumsum(dim=-1, dtype=torch.float64)
    goal = torch.from_numpy(uniform).to(probs.device)[:, None] * mass[:, -1:]
    return torch.searchsorted(mass, goal, right=True)[:, 0].clamp_(max=probs.shape[1] - 1)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
