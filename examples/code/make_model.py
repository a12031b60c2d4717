"""Build the starting policy: `PYTHONPATH=examples python examples/code/make_model.py`.

A tokenizer is learnt from what the policy will read and write, then a small Qwen3 model is trained in three
stages: copying (A), imitation of a careful programmer (B) and of a careless one (C). A stage that does not
reach its bar raises an error instead of giving a model that cannot learn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import tokenizers
from coder import opening
from programmers import CAREFUL, CARELESS, OF_ALL_KINDS, Programmer, batches, play, sample_task
from warmup.copying import train_copying
from warmup.export import save_model
from warmup.imitation import teacher_forced, train_imitation
from warmup.network import new_network
from warmup.optim import Rates
from warmup.options import option_parser
from warmup.stages import Reporter, require_right, resume_or
from warmup.tokenizer import MARKERS, TAGS, WHOLE_NUMBERS, train_tokenizer

VOCAB_SIZE = 480  # bytes, markers, the words of the problems and of the programs, and numbers
WORKING_BAR = 0.9  # last programs, word for word, after B; what is misread caps reinforcement learning


def main() -> None:
    parser = option_parser(__doc__.split("\n")[0], Path(__file__).parent)
    parser.add_argument("--careful-steps", type=int, default=250, help="batches of stage B")
    parser.add_argument("--careless-steps", type=int, default=60, help="batches of stage C")
    options = parser.parse_args()

    report = Reporter()
    tokenizer = make_tokenizer()
    network = new_network(tokenizer.get_vocab_size(), seed=options.seed, threads=options.threads)
    programmer = Programmer(tokenizer)
    prefix_length = len(programmer.prefix)
    unseen = [next(batches(programmer, CAREFUL, random.Random(n), held_out=True)) for n in range(8)]
    heldout = [example for batch in unseen for example in batch]
    report(f"prefix of {prefix_length} tokens, longest episode {max(len(e.ids) for e in heldout)}")

    def solved() -> float:
        return teacher_forced(network, heldout, prefix_length).answers

    imitate = partial(
        train_imitation,
        network,
        prefix_length=prefix_length,
        report=report,
        report_every=50,
        score=lambda: f"held-out last programs right {solved():.3f}",
    )

    def copying() -> None:
        train_copying(network, first_token=len(MARKERS + TAGS), seed=options.seed, report=report)

    def careful() -> None:
        shown = batches(programmer, CAREFUL, random.Random(options.seed))
        imitate(shown, stage="B", steps=options.careful_steps, rates=Rates(muon=0.015, adam=2e-3))

    resume_or(copying, network, options.stages, "A")
    resume_or(careful, network, options.stages, "B")
    require_right(solved(), WORKING_BAR, stage="B", what="last programs", advice="--careful-steps")
    shown = batches(programmer, CARELESS, random.Random(options.seed))
    imitate(shown, stage="C", steps=options.careless_steps, rates=Rates(muon=0.004, adam=1e-3))
    save_model(network, tokenizer, options.out)
    report(f"wrote {options.out}")


def make_tokenizer() -> tokenizers.Tokenizer:
    """The tokenizer, which is always the same."""
    return train_tokenizer(tokenizer_texts(random.Random(0)), vocab_size=VOCAB_SIZE, pieces=WHOLE_NUMBERS)


def tokenizer_texts(rng: random.Random, *, samples: int = 3000) -> Iterator[str]:
    """What the model will read and write, without the markers."""
    for sample in range(samples):
        problem, task = sample_task(rng, held_out=False)
        system, question = opening(task)
        played = play(problem, task, OF_ALL_KINDS, rng)
        yield question["content"]
        yield from (*played.replies, *played.reports)
        if sample % 3 == 0:
            yield from ("system\n" + system["content"], "user\n", "assistant\n")


if __name__ == "__main__":
    main()
