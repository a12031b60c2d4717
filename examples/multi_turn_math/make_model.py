"""Build the starting policy: `PYTHONPATH=examples python examples/multi_turn_math/make_model.py`.

A tokenizer is learnt from what the policy will read and write, then a small Qwen3 model is trained in two
stages: imitation of a careful student (A) and of a careless one (B). If the first does not reach its bar, an
error is raised instead of giving a model that cannot learn. The numbers of a problem stand in few places, so
copying needs no stage of its own, as it does for the search agent.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from chances import SECOND_CHANCE, SYSTEM_PROMPT
from students import CAREFUL, CARELESS, OF_ALL_KINDS, Student, batches, replies
from warmup.export import save_model
from warmup.imitation import teacher_forced, train_imitation
from warmup.network import new_network
from warmup.optim import Rates
from warmup.options import option_parser
from warmup.stages import Reporter, require_right, resume_or
from warmup.tokenizer import train_tokenizer
from word_problems import sample_problem

VOCAB_SIZE = 384  # bytes, markers, and the words of the problems
WORKING_BAR = 0.75  # replies, word for word, after A; what is worked out wrongly caps reinforcement learning


def main() -> None:
    parser = option_parser(__doc__.split("\n")[0], Path(__file__).parent)
    parser.add_argument("--careful-steps", type=int, default=900, help="batches of stage A")
    parser.add_argument("--careless-steps", type=int, default=80, help="batches of stage B")
    options = parser.parse_args()

    report = Reporter()
    tokenizer = train_tokenizer(tokenizer_texts(random.Random(0)), vocab_size=VOCAB_SIZE)
    network = new_network(tokenizer.get_vocab_size(), seed=options.seed, threads=options.threads)
    student = Student(tokenizer)
    prefix_length = len(student.prefix)
    unseen = [next(batches(student, CAREFUL, random.Random(n), held_out=True)) for n in range(8)]
    heldout = [example for batch in unseen for example in batch]
    report(f"prefix of {prefix_length} tokens, longest episode {max(len(e.ids) for e in heldout)}")

    def worked_out() -> float:
        return teacher_forced(network, heldout, prefix_length).answers

    imitate = partial(
        train_imitation,
        network,
        prefix_length=prefix_length,
        report=report,
        report_every=100,
        score=lambda: f"held-out problems worked out {worked_out():.3f}",
    )

    def careful() -> None:
        shown = batches(student, CAREFUL, random.Random(options.seed))
        imitate(shown, stage="A", steps=options.careful_steps, rates=Rates(muon=0.015, adam=2e-3))

    resume_or(careful, network, options.stages, "A")
    require_right(worked_out(), WORKING_BAR, stage="A", what="last replies", advice="--careful-steps")
    shown = batches(student, CARELESS, random.Random(options.seed))
    imitate(shown, stage="B", steps=options.careless_steps, rates=Rates(muon=0.004, adam=1e-3))
    save_model(network, tokenizer, options.out)
    report(f"wrote {options.out}")


def tokenizer_texts(rng: random.Random, *, samples: int = 6000) -> Iterator[str]:
    """What the model will read and write, without the markers."""
    for number in range(samples):
        problem = sample_problem(rng, held_out=False)
        yield problem.question
        yield from replies(problem, OF_ALL_KINDS, rng)[0]
        if number % 3 == 0:
            yield from ("system\n" + SYSTEM_PROMPT, "user\n" + SECOND_CHANCE, "assistant\n")


if __name__ == "__main__":
    main()
