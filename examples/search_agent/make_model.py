"""Build the starting policy of the example from nothing.

`PYTHONPATH=examples python examples/search_agent/make_model.py` writes it to the folder `model`.

A tokenizer is learnt from the encyclopedia, then a 0.92M-parameter Qwen3 model is trained in three stages:
copying (A), imitation of a perfect searcher on mostly fictional facts (B), imitation of a flawed one (C).
A stage that does not reach its bar raises an error instead of giving a model that cannot learn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from corpus import encyclopedia
from demonstrations import FLAWED, PERFECT, SearchTranscriber, search_call
from fiction import NameMaker
from mixture import Mixture, examples, perfect_examples
from questions import is_held_out, question_bank
from search import search
from warmup.copying import train_copying
from warmup.export import save_model
from warmup.imitation import Reading, teacher_forced, train_imitation
from warmup.network import Network, new_network
from warmup.optim import Rates
from warmup.options import option_parser
from warmup.stages import Reporter, require_right, resume_or
from warmup.tokenizer import MARKERS, TAGS, prefix_text, train_tokenizer, without_markers

READING_BAR = 0.95  # teacher-forced answers after B; what is misread here caps reinforcement learning


def main() -> None:
    parser = option_parser(__doc__.split("\n")[0], Path(__file__).parent)
    parser.add_argument("--imitation-steps", type=int, default=1500, help="batches of stage B")
    parser.add_argument("--flawed-steps", type=int, default=50, help="batches of stage C")
    options = parser.parse_args()

    report = Reporter()
    tokenizer = train_tokenizer(tokenizer_texts(random.Random(0)))
    network = new_network(tokenizer.get_vocab_size(), seed=options.seed, threads=options.threads)
    imitation = Imitation(network, SearchTranscriber(tokenizer), options.seed, report)

    def copying() -> None:
        train_copying(network, first_token=len(MARKERS + TAGS), seed=options.seed, report=report)

    def perfect() -> None:
        mixture = Mixture(fictional=0.4, drills=0.35, habits=PERFECT)
        imitation.train("B", mixture, options.imitation_steps, Rates(muon=0.015, adam=2e-3))

    resume_or(copying, network, options.stages, "A")
    resume_or(perfect, network, options.stages, "B")
    require_right(
        imitation.reading().answers, READING_BAR, stage="B", what="answers", advice="--imitation-steps"
    )
    flawed = Mixture(fictional=0.0, drills=0.0, habits=FLAWED)
    imitation.train("C", flawed, options.flawed_steps, Rates(muon=0.004, adam=1e-3))
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

    def train(self, stage: str, mixture: Mixture, steps: int, rates: Rates) -> None:
        """Train one stage."""
        rng = random.Random(self._seed)
        train_imitation(
            self._network,
            examples(mixture, self._transcriber, self._names, guessable_answers(rng), rng),
            prefix_length=self._prefix_length,
            steps=steps,
            rates=rates,
            stage=stage,
            report=self._report,
            report_every=100,
            score=self._scores,
        )

    def reading(self) -> Reading:
        """How well calls and answers to new fictional questions are read."""
        return teacher_forced(self._network, self._fictional, self._prefix_length)

    def _scores(self) -> str:
        fictional = self.reading()
        heldout = teacher_forced(self._network, self._heldout, self._prefix_length)
        return (
            f"teacher-forced calls/answers {fictional.calls:.3f}/{fictional.answers:.3f} fictional, "
            f"{heldout.calls:.3f}/{heldout.answers:.3f} held out"
        )


def tokenizer_texts(rng: random.Random, *, samples: int = 6000) -> Iterator[str]:
    """What the model will read and write: passages, questions, calls, answers and the system prompt."""
    system_prompt = prefix_text(lambda plain: SearchTranscriber(plain).prefix)
    yield from (entity.passage for entity in encyclopedia())
    bank = question_bank("train")
    for number in range(samples):
        question = bank.sample(rng)
        yield from (question.text, question.answer)
        for entity in question.path:
            yield from (without_markers(search_call(entity.name)), search(entity.name))
        if number % 3 == 0:
            yield system_prompt


def guessable_answers(rng: random.Random, *, samples: int = 4000) -> dict[str, list[str]]:
    """For each field the answers of training questions, as often as they occur."""
    guesses: dict[str, list[str]] = {}
    for _ in range(samples):
        question = question_bank("train").sample(rng)
        guesses.setdefault(question.field, []).append(question.answer)
    return guesses


if __name__ == "__main__":
    main()
