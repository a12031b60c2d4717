"""Build the starting policy: `PYTHONPATH=examples python examples/tool_math/make_model.py`.

A tokenizer is learnt from what the policy will read and write, then a small Qwen3 model is trained in two
stages: imitation of a careful student, who computes with Python (A), and of a careless one (B). If the first
does not reach its bars, an error is raised instead of giving a model that cannot learn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from number_problems import sample_problem
from tool_students import CAREFUL, CARELESS, OF_ALL_KINDS, Student, batches, texts
from warmup.export import save_model
from warmup.imitation import Reading, teacher_forced, train_imitation
from warmup.network import new_network
from warmup.optim import Rates
from warmup.options import option_parser
from warmup.stages import Reporter, require_right, resume_or
from warmup.tokenizer import prefix_text, train_tokenizer, without_markers

VOCAB_SIZE = 576  # bytes, markers, and the words of the problems and of the tool
# Each digit is a token, because digits are to be copied; a word has the space before it, because none is.
PIECES = r" ?\p{L}+|\p{N}| (?=\p{N})|[^\p{L}\p{N}]+"
CALLING_BAR = 0.9  # calls, token by token, after A; what is copied wrongly caps reinforcement learning
READING_BAR = 0.9  # answers, token by token, after A


def main() -> None:
    parser = option_parser(__doc__.split("\n")[0], Path(__file__).parent)
    parser.add_argument("--careful-steps", type=int, default=600, help="batches of stage A")
    parser.add_argument("--careless-steps", type=int, default=50, help="batches of stage B")
    options = parser.parse_args()

    report = Reporter()
    tokenizer = train_tokenizer(tokenizer_texts(random.Random(0)), vocab_size=VOCAB_SIZE, pieces=PIECES)
    network = new_network(tokenizer.get_vocab_size(), seed=options.seed, threads=options.threads)
    student = Student(tokenizer)
    prefix_length = len(student.prefix)
    unseen = [next(batches(student, CAREFUL, random.Random(n), held_out=True)) for n in range(8)]
    heldout = [example for batch in unseen for example in batch]
    report(f"prefix of {prefix_length} tokens, longest episode {max(len(e.ids) for e in heldout)}")

    def reading() -> Reading:
        return teacher_forced(network, heldout, prefix_length)

    def score() -> str:
        now = reading()
        return f"held-out calls {now.calls:.3f}, answers {now.answers:.3f}"

    imitate = partial(
        train_imitation,
        network,
        prefix_length=prefix_length,
        report=report,
        report_every=50,
        score=score,
    )

    def careful() -> None:
        shown = batches(student, CAREFUL, random.Random(options.seed))
        imitate(shown, stage="A", steps=options.careful_steps, rates=Rates(muon=0.015, adam=2e-3))

    resume_or(careful, network, options.stages, "A")
    right = reading()
    require_right(right.calls, CALLING_BAR, stage="A", what="calls", advice="--careful-steps")
    require_right(right.answers, READING_BAR, stage="A", what="answers", advice="--careful-steps")
    # Careless replies are shorter than calls: sorted by length, they would weigh too much.
    shown = batches(student, CARELESS, random.Random(options.seed), by_length=False)
    imitate(shown, stage="B", steps=options.careless_steps, rates=Rates(muon=0.002, adam=1e-3))
    save_model(network, tokenizer, options.out)
    report(f"wrote {options.out}")


def tokenizer_texts(rng: random.Random, *, samples: int = 6000) -> Iterator[str]:
    """What the model will read and write, without the markers."""
    prefix = prefix_text(lambda plain: Student(plain).prefix)
    for number in range(samples):
        problem = sample_problem(rng, held_out=False)
        yield from map(without_markers, texts(problem, OF_ALL_KINDS, rng))
        if number % 3 == 0:
            yield from (prefix, "assistant\n")


if __name__ == "__main__":
    main()
