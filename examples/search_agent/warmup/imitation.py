"""Stages B and C: imitate a perfect searcher until reading works, then a flawed one.

What the flawed one gets wrong (guessing, vague queries, stopping before the second hop, reading the wrong
field) is what reinforcement learning is there to repair.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from questions import QuestionBank, question_bank
from search import SearchIndex, search
from torch import Tensor

from warmup.demonstrations import PERFECT, Demonstrator, Example, Habits, Transcriber, reading_drill
from warmup.fiction import NameMaker, fictional_world
from warmup.network import Network
from warmup.optim import Optimizers

BATCH = 16
WORLD_LIFE = 64  # examples drawn from one fictional world, also the pool that batches are cut from


@dataclass(frozen=True, slots=True)
class Mixture:
    """What the examples of a stage are: fictional episodes, reading drills, the rest real episodes."""

    fictional: float
    drills: float
    habits: Habits


def examples(
    mixture: Mixture,
    transcriber: Transcriber,
    names: NameMaker,
    guesses: Mapping[str, Sequence[str]],
    rng: random.Random,
) -> Iterator[list[Example]]:
    """Endless batches of `BATCH` examples of similar length."""
    demonstrator = Demonstrator(transcriber, mixture.habits, guesses)
    real = question_bank("train")
    while True:
        world = fictional_world(names, rng)
        bank, index = QuestionBank(world), SearchIndex(world)
        pool = []
        for _ in range(WORLD_LIFE):
            kind = rng.random()
            if kind < mixture.drills:
                pool.append(reading_drill(world, transcriber, rng))
            elif kind < mixture.drills + mixture.fictional:
                pool.append(demonstrator.demonstrate(bank.draw(rng), index.search, rng))
            else:
                pool.append(demonstrator.demonstrate(real.draw(rng), search, rng))
        pool.sort(key=lambda example: len(example.ids))
        batches = [pool[start : start + BATCH] for start in range(0, WORLD_LIFE, BATCH)]
        rng.shuffle(batches)
        yield from batches


def imitation_loss(network: Network, batch: Sequence[Example], prefix_length: int) -> Tensor:
    """Mean cross-entropy over the reply tokens of the batch."""
    logits, targets, _ = _reply_logits(network, batch, prefix_length)
    return F.cross_entropy(logits, targets)


def _reply_logits(
    network: Network, batch: Sequence[Example], prefix_length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [N, vocab] and targets [N] of all reply tokens, and their places in a mask [B, T]."""
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
    """Share of tool calls and of final answers whose every token is the most likely one."""

    calls: float
    answers: float


@torch.no_grad()
def teacher_forced(network: Network, batch: Sequence[Example], prefix_length: int) -> Reading:
    """Score `network` on perfect traces, given everything before each reply."""
    logits, targets, wanted = _reply_logits(network, batch, prefix_length)
    right = torch.ones_like(wanted)
    right[wanted] = logits.argmax(-1) == targets
    calls: list[bool] = []
    answers: list[bool] = []
    for row, example in enumerate(batch):
        for number, (start, end) in enumerate(example.replies, start=1):
            exact = bool(right[row, start - prefix_length - 1 : end - prefix_length - 1].all())
            (answers if number == len(example.replies) else calls).append(exact)
    return Reading(sum(calls) / len(calls), sum(answers) / len(answers))


def perfect_examples(
    transcriber: Transcriber, names: NameMaker, rng: random.Random, count: int
) -> tuple[list[Example], list[Example]]:
    """`count` perfect traces about held-out real entities, and as many about new fictional ones."""
    demonstrator = Demonstrator(transcriber, PERFECT, {})
    real = [demonstrator.demonstrate(question_bank("heldout").draw(rng), search, rng) for _ in range(count)]
    fictional = []
    for _ in range(count):
        world = fictional_world(names, rng)
        question = QuestionBank(world).draw(rng)
        fictional.append(demonstrator.demonstrate(question, SearchIndex(world).search, rng))
    return real, fictional


def train_imitation(
    network: Network,
    batches: Iterator[list[Example]],
    *,
    prefix_length: int,
    steps: int,
    muon_lr: float,
    adam_lr: float,
    report: Callable[[int, float], None],
) -> None:
    """`steps` batches; the rates warm up over 30 and fall linearly to zero over the last third."""

    def scale(step: int) -> float:
        return min(1.0, (step + 1) / 30) * min(1.0, max(0.02, 3 * (1 - step / steps)))

    optimizers = Optimizers(network, muon_lr=muon_lr, adam_lr=adam_lr, scale=scale)
    for step in range(1, steps + 1):
        loss = imitation_loss(network, next(batches), prefix_length)
        loss.backward()
        optimizers.step()
        report(step, loss.item())
