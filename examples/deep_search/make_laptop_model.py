"""Builds the laptop's starting policy: the quick start's model, after a few demonstrations of a third search.

    PYTHONPATH=examples:examples/search_agent python examples/deep_search/make_laptop_model.py

The demonstrations are flawed: they stop before the last hop, answer with another field, or guess. So the
model knows that there is a third search and does it badly, which reinforcement learning repairs. A model that
never makes it would never be rewarded for it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import laptop
import torch
from corpus import Entity, encyclopedia
from demonstrations import SearchTranscriber, search_call
from multihop import Questions, ask
from retrieval import Index
from safetensors.torch import load_file
from tokenizers import Tokenizer
from warmup.batches import endless_batches
from warmup.export import save_model
from warmup.imitation import train_imitation
from warmup.network import Network, Shape, load_hf_state
from warmup.optim import Rates
from warmup.stages import Reporter
from warmup.transcripts import Example

START = Path(__file__).parents[1] / "search_agent" / "model"
BATCH = 16
POOL = 8 * BATCH  # examples that batches of similar length are cut from
HOPS = {1: 0.1, 2: 0.3, 3: 0.6}  # the share of the demonstrations
STOPS_EARLY, WRONG_FIELD, GUESSES = 0.2, 0.2, 0.05


class Demonstrator:
    """Demonstrates questions with one to three hops, with the flaws of this module."""

    def __init__(self, transcriber: SearchTranscriber, index: Index, rng: random.Random) -> None:
        questions = Questions(encyclopedia(), held_out=False)
        self._paths = {hops: questions.paths(hops) for hops in HOPS}
        self._transcriber = transcriber
        self._index = index
        self._rng = rng

    def batches(self) -> Iterator[list[Example]]:
        """Return endless batches of examples of similar length."""
        return endless_batches(lambda: [self.example() for _ in range(POOL)], self._rng, size=BATCH)

    def example(self) -> Example:
        """Return one episode: the searches, what they find, and an answer."""
        rng = self._rng
        hops = rng.choices(list(HOPS), list(HOPS.values()))[0]
        path, field = rng.choice(self._paths[hops])
        question = ask(path, field, rng.randrange(2))["question"]
        if rng.random() < GUESSES:
            other, guessed = rng.choice(self._paths[hops])
            return self._transcriber.trace(question, [other[-1].facts[guessed]], [])
        made = 1
        while made < hops and rng.random() >= STOPS_EARLY:
            made += 1
        replies = [search_call(entity.name) for entity in path[:made]]
        results = [self._found(entity.name) for entity in path[:made]]
        return self._transcriber.trace(question, [*replies, self._answer(path[made - 1], field)], results)

    def _answer(self, seen: Entity, field: str) -> str:
        told = [name for name, value in seen.facts.items() if value in seen.passage]
        right = field in told and self._rng.random() >= WRONG_FIELD
        return seen.facts[field if right else self._rng.choice(told)]

    def _found(self, query: str) -> str:
        [hits] = self._index.search([query], k=laptop.LIMITS.results)
        return shown([hit.passage.text for hit in hits])


def shown(texts: Sequence[str]) -> str:
    """Return results as the agent shows them to the laptop's model."""
    return "\n".join(f"[{rank}] {text}" for rank, text in enumerate(texts, start=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=85, help="batches of demonstrations")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Reporter()
    tokenizer = Tokenizer.from_file(str(START / "tokenizer.json"))
    network = Network(Shape(vocab_size=tokenizer.get_vocab_size()))
    load_hf_state(network, load_file(START / "model.safetensors"))
    transcriber = SearchTranscriber(tokenizer)
    index = laptop.encyclopedia().index
    demonstrator = Demonstrator(transcriber, index, random.Random(options.seed))
    train_imitation(
        network,
        demonstrator.batches(),
        prefix_length=len(transcriber.prefix),
        steps=options.steps,
        rates=Rates(muon=0.008, adam=1.5e-3),
        stage="imitation",
        report=report,
        report_every=20,
    )
    save_model(network, tokenizer, options.out)
    report(f"wrote {options.out}")


if __name__ == "__main__":
    main()
