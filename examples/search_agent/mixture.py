"""What stages B and C imitate: a perfect searcher until reading works, then a flawed one.

What the flawed one gets wrong (guessing, vague queries, stopping before the second hop, reading the wrong
field) is what reinforcement learning is there to repair.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from demonstrations import PERFECT, Demonstrator, Habits, SearchTranscriber, reading_drill
from fiction import NameMaker, fictional_world
from questions import QuestionBank, question_bank
from search import SearchIndex, search
from warmup.batches import endless_batches
from warmup.transcripts import Example

BATCH = 16
EXAMPLES_PER_WORLD = 64  # examples from one fictional world, also the pool that batches are cut from


@dataclass(frozen=True, slots=True)
class Mixture:
    """What the examples of a stage are: fictional episodes, reading drills, the rest real episodes."""

    fictional: float
    drills: float
    habits: Habits


def examples(
    mixture: Mixture,
    transcriber: SearchTranscriber,
    names: NameMaker,
    guesses: Mapping[str, Sequence[str]],
    rng: random.Random,
) -> Iterator[list[Example]]:
    """Endless batches of `BATCH` examples of similar length."""
    demonstrator = Demonstrator(transcriber, mixture.habits, guesses)
    real = question_bank("train")

    def sample_pool() -> list[Example]:
        world = fictional_world(names, rng)
        bank, index = QuestionBank(world), SearchIndex(world)
        pool = []
        for _ in range(EXAMPLES_PER_WORLD):
            kind = rng.random()
            if kind < mixture.drills:
                pool.append(reading_drill(world, transcriber, rng))
            elif kind < mixture.drills + mixture.fictional:
                pool.append(demonstrator.demonstrate(bank.sample(rng), index.search, rng))
            else:
                pool.append(demonstrator.demonstrate(real.sample(rng), search, rng))
        return pool

    return endless_batches(sample_pool, rng, size=BATCH)


def perfect_examples(
    transcriber: SearchTranscriber, names: NameMaker, rng: random.Random, count: int
) -> tuple[list[Example], list[Example]]:
    """`count` perfect traces about held-out real entities, and as many about new fictional ones."""
    demonstrator = Demonstrator(transcriber, PERFECT, {})
    real = [demonstrator.demonstrate(question_bank("heldout").sample(rng), search, rng) for _ in range(count)]
    fictional = []
    for _ in range(count):
        world = fictional_world(names, rng)
        question = QuestionBank(world).sample(rng)
        fictional.append(demonstrator.demonstrate(question, SearchIndex(world).search, rng))
    return real, fictional
