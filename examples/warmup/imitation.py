"""Imitation: cross-entropy on the replies of examples whose beginning is the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from warmup.network import Network
from warmup.optim import Optimizers, Rates
from warmup.transcripts import Example


def imitation_loss(network: Network, batch: Sequence[Example], prefix_length: int) -> Tensor:
    """Return the mean cross-entropy over the reply tokens of the batch."""
    logits, targets, _ = _reply_logits(network, batch, prefix_length)
    return F.cross_entropy(logits, targets)


def _reply_logits(
    network: Network, batch: Sequence[Example], prefix_length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [N, vocab] and targets [N] of all reply tokens, and their places in a mask [B, T]."""
    longest = max(len(example.ids) for example in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    trained = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        trained[row, : len(example.ids)] = torch.tensor(example.trained())
    # Hidden state t predicts token t + 1; the shared prefix predicts nothing that is trained.
    suffix, wanted = ids[:, prefix_length:], trained[:, prefix_length + 1 :]
    hidden = network(suffix[:, :-1], prefix=ids[0, :prefix_length])
    return network.logits(hidden[wanted]), suffix[:, 1:][wanted], wanted


@dataclass(frozen=True, slots=True)
class Reading:
    """Share of tool calls and of answers whose every token is the most likely one; NaN: there are none."""

    calls: float
    answers: float


@torch.no_grad()
def teacher_forced(network: Network, batch: Sequence[Example], prefix_length: int) -> Reading:
    """Score `network` on perfect traces, given everything before each reply; the last reply is the answer."""
    logits, targets, wanted = _reply_logits(network, batch, prefix_length)
    right = torch.ones_like(wanted)
    right[wanted] = logits.argmax(-1) == targets
    calls: list[bool] = []
    answers: list[bool] = []
    for row, example in enumerate(batch):
        for number, (start, end) in enumerate(example.replies, start=1):
            exact = bool(right[row, start - prefix_length - 1 : end - prefix_length - 1].all())
            (answers if number == len(example.replies) else calls).append(exact)
    return Reading(_share(calls), _share(answers))


def _share(exact: Sequence[bool]) -> float:
    return sum(exact) / len(exact) if exact else math.nan


def train_imitation(
    network: Network,
    batches: Iterator[list[Example]],
    *,
    prefix_length: int,
    steps: int,
    rates: Rates,
    stage: str,
    report: Callable[[str], None],
    report_every: int,
    score: Callable[[], str] | None = None,
) -> None:
    """Train on `steps` batches; the rates warm up over 30 and fall linearly to zero over the last third.

    The loss and the `score` are reported every `report_every` batches and after the last one.
    """

    def scale(step: int) -> float:
        return min(1.0, (step + 1) / 30) * min(1.0, max(0.02, 3 * (1 - step / steps)))

    optimizers = Optimizers(network, rates, scale=scale)
    for step in range(1, steps + 1):
        loss = imitation_loss(network, next(batches), prefix_length)
        loss.backward()
        optimizers.step()
        if step % report_every == 0 or step == steps:
            scored = f", {score()}" if score else ""
            report(f"{stage}: batch {step}, loss {loss.item():.3f}{scored}")
