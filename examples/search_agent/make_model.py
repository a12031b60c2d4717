"""Build the starting policy of the example from nothing.

`PYTHONPATH=examples python examples/search_agent/make_model.py` writes it to the folder `model`.

A tokenizer is learnt from the encyclopedia, then a 0.92M-parameter Qwen3 model is trained in three stages:
copying (A), imitation of a perfect searcher on mostly fictional facts (B), imitation of a flawed one (C).
A stage that does not reach its bar raises an error instead of giving a model that cannot learn.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from conversation import call_text
from corpus import encyclopedia
from demonstrations import FLAWED, PERFECT, Habits, SearchTranscriber
from fiction import NameMaker
from mixture import Mixture, examples, perfect_examples
from questions import is_held_out, question_bank
from search import search
from warmup.copying import train_copying
from warmup.export import save_model
from warmup.imitation import teacher_forced, train_imitation
from warmup.network import Network, Shape
from warmup.stages import Reporter, resume_or
from warmup.tokenizer import MARKERS, TAGS, byte_tokenizer, train_tokenizer

READING_BAR = 0.95  # teacher-forced answers after B; what is misread here caps reinforcement learning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--imitation-steps", type=int, default=1500, help="batches of stage B")
    parser.add_argument("--flawed-steps", type=int, default=50, help="batches of stage C")
    parser.add_argument(
        "--stages", type=Path, help="keep the weights after A and B here, and go on from them"
    )
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    report = Reporter()
    tokenizer = train_tokenizer(tokenizer_texts(random.Random(0)))
    network = Network(Shape(vocab_size=tokenizer.get_vocab_size()))
    imitation = Imitation(network, SearchTranscriber(tokenizer), options.seed, report)

    def copying() -> None:
        train_copying(network, first_token=len(MARKERS + TAGS), seed=options.seed, report=report)

    def perfect() -> None:
        imitation.train(
            "B", PERFECT, options.imitation_steps, fictional=0.4, drills=0.35, rates=(0.015, 2e-3)
        )

    resume_or(copying, network, options.stages, "A")
    resume_or(perfect, network, options.stages, "B")
    imitation.require_reading(READING_BAR)
    imitation.train("C", FLAWED, options.flawed_steps, fictional=0.0, drills=0.0, rates=(0.004, 1e-3))
    save_model(network, tokenizer, options.out)
    report(f"wrote {options.out}")


class Imitation:
    """Stages B and C on one network, scored on questions that neither trains on."""

    def __init__(
        self, network: Network, transcriber: SearchTranscriber, seed: int, report: Callable[[str], None]
    ) -> None:
        self._network = network
        self._transcriber = transcriber
        self._seed = seed
        self._report = report
        self._names = NameMaker(entity.name for entity in encyclopedia() if not is_held_out(entity))
        self._prefix_length = len(transcriber.prefix)
        self._heldout, self._fictional = perfect_examples(transcriber, self._names, random.Random(9), 128)

    def train(
        self,
        stage: str,
        habits: Habits,
        steps: int,
        *,
        fictional: float,
        drills: float,
        rates: tuple[float, float],
    ) -> None:
        """Train one stage with (Muon, AdamW) `rates`, reporting every 100 batches and at the end."""

        def report(step: int, loss: float) -> None:
            if step % 100 == 0 or step == steps:
                self._report(f"{stage}: batch {step}, loss {loss:.3f}, {self._scores()}")

        rng = random.Random(self._seed)
        mixture = Mixture(fictional=fictional, drills=drills, habits=habits)
        batches = examples(mixture, self._transcriber, self._names, guessable_answers(rng), rng)
        train_imitation(
            self._network,
            batches,
            prefix_length=self._prefix_length,
            steps=steps,
            muon_lr=rates[0],
            adam_lr=rates[1],
            report=report,
        )

    def require_reading(self, bar: float) -> None:
        """RuntimeError if too few answers to new fictional questions are read correctly."""
        reading = teacher_forced(self._network, self._fictional, self._prefix_length)
        if reading.answers < bar:
            raise RuntimeError(
                f"stage B reads {reading.answers:.3f} of the answers, {bar} was required: "
                "give it more --imitation-steps or another --seed"
            )

    def _scores(self) -> str:
        fictional = teacher_forced(self._network, self._fictional, self._prefix_length)
        heldout = teacher_forced(self._network, self._heldout, self._prefix_length)
        return (
            f"teacher-forced calls/answers {fictional.calls:.3f}/{fictional.answers:.3f} fictional, "
            f"{heldout.calls:.3f}/{heldout.answers:.3f} held out"
        )


def tokenizer_texts(rng: random.Random, *, draws: int = 6000) -> Iterator[str]:
    """What the model will read and write: passages, questions, calls, answers and the system prompt."""
    system_prompt = byte_tokenizer().decode(
        SearchTranscriber(byte_tokenizer()).prefix, skip_special_tokens=False
    )
    for tag in MARKERS + TAGS:
        system_prompt = system_prompt.replace(tag, "")
    yield from (entity.passage for entity in encyclopedia())
    bank = question_bank("train")
    for draw in range(draws):
        question = bank.draw(rng)
        yield from (question.text, question.answer)
        for entity in question.path:
            yield from (call_text(entity.name).replace(TAGS[0], "").replace(TAGS[1], ""), search(entity.name))
        if draw % 3 == 0:
            yield system_prompt


def guessable_answers(rng: random.Random, *, draws: int = 4000) -> dict[str, list[str]]:
    """For each field the answers of training questions, as often as they occur."""
    guesses: dict[str, list[str]] = {}
    for _ in range(draws):
        question = question_bank("train").draw(rng)
        guesses.setdefault(question.field, []).append(question.answer)
    return guesses


if __name__ == "__main__":
    main()
