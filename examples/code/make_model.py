"""Build the starting policy: `PYTHONPATH=examples python examples/code/make_model.py`.

A tokenizer is learnt from what the policy will read and write, then a small Qwen3 model is trained in three
stages: copying (A), imitation of a careful programmer (B) and of a careless one (C). A stage that does not
reach its bar raises an error instead of giving a model that cannot learn.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import tokenizers
import torch
from coder import opening
from programmers import CAREFUL, CARELESS, OF_ALL_KINDS, Habits, Programmer, batches, draw_task, play
from warmup.copying import train_copying
from warmup.export import save_model
from warmup.imitation import teacher_forced, train_imitation
from warmup.network import Network, Shape
from warmup.stages import Reporter, resume_or
from warmup.tokenizer import MARKERS, TAGS, WHOLE_NUMBERS, train_tokenizer

VOCAB_SIZE = 480  # bytes, markers, the words of the problems and of the programs, and numbers
WORKING_BAR = 0.9  # last programs, word for word, after B; what is misread caps reinforcement learning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--careful-steps", type=int, default=250, help="batches of stage B")
    parser.add_argument("--careless-steps", type=int, default=60, help="batches of stage C")
    parser.add_argument("--stages", type=Path, help="keep weights after A and B here, and go on")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    report = Reporter()
    tokenizer = make_tokenizer()
    network = Network(Shape(vocab_size=tokenizer.get_vocab_size()))
    programmer = Programmer(tokenizer)
    prefix_length = len(programmer.prefix)
    unseen = [next(batches(programmer, CAREFUL, random.Random(n), held_out=True)) for n in range(8)]
    heldout = [example for batch in unseen for example in batch]

    def imitate(stage: str, habits: Habits, steps: int, rates: tuple[float, float]) -> None:
        def report_step(step: int, loss: float) -> None:
            if step % 50 == 0 or step == steps:
                right = teacher_forced(network, heldout, prefix_length).answers
                report(f"{stage}: batch {step}, loss {loss:.3f}, held-out problems solved {right:.3f}")

        train_imitation(
            network,
            batches(programmer, habits, random.Random(options.seed)),
            prefix_length=prefix_length,
            steps=steps,
            muon_lr=rates[0],
            adam_lr=rates[1],
            report=report_step,
        )

    report(f"prefix of {prefix_length} tokens, longest episode {max(len(e.ids) for e in heldout)}")

    def copying() -> None:
        train_copying(network, first_token=len(MARKERS + TAGS), seed=options.seed, report=report)

    resume_or(copying, network, options.stages, "A")
    resume_or(
        lambda: imitate("B", CAREFUL, options.careful_steps, (0.015, 2e-3)), network, options.stages, "B"
    )
    if (right := teacher_forced(network, heldout, prefix_length).answers) < WORKING_BAR:
        raise RuntimeError(
            f"after stage B {right:.3f} of the problems are solved, {WORKING_BAR} was required: "
            "give it more --careful-steps or another --seed"
        )
    imitate("C", CARELESS, options.careless_steps, (0.004, 1e-3))
    save_model(network, tokenizer, options.out)
    report(f"wrote {options.out}")


def make_tokenizer() -> tokenizers.Tokenizer:
    """The tokenizer, which is always the same."""
    return train_tokenizer(tokenizer_texts(random.Random(0)), vocab_size=VOCAB_SIZE, pieces=WHOLE_NUMBERS)


def tokenizer_texts(rng: random.Random, *, samples: int = 3000) -> Iterator[str]:
    """What the model will read and write, without the markers."""
    for sample in range(samples):
        problem, task = draw_task(rng, held_out=False)
        system, question = opening(task)
        played = play(problem, task, OF_ALL_KINDS, rng)
        yield question["content"]
        yield from (*played.replies, *played.reports)
        if sample % 3 == 0:
            yield from ("system\n" + system["content"], "user\n", "assistant\n")


if __name__ == "__main__":
    main()
