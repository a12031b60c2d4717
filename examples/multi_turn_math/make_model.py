"""Build the starting policy: `PYTHONPATH=examples python examples/multi_turn_math/make_model.py`.

A tokenizer is learnt from what the policy will read and write, then a small Qwen3 model is trained in two
stages: imitation of a careful student (A) and of a careless one (B). If the first does not reach its bar, an
error is raised instead of giving a model that cannot learn. The numbers of a problem stand in few places, so
copying needs no stage of its own, as it does for the search agent.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from chances import SECOND_CHANCE, SYSTEM_PROMPT
from students import CAREFUL, CARELESS, OF_ALL_KINDS, Habits, Student, batches, replies
from warmup.export import save_model
from warmup.imitation import teacher_forced, train_imitation
from warmup.network import Network, Shape
from warmup.stages import Reporter, resume_or
from warmup.tokenizer import train_tokenizer
from word_problems import draw_problem

VOCAB_SIZE = 384  # bytes, markers, and the words of the problems
WORKING_BAR = 0.75  # replies, word for word, after A; what is worked out wrongly caps reinforcement learning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--careful-steps", type=int, default=900, help="batches of stage A")
    parser.add_argument("--careless-steps", type=int, default=80, help="batches of stage B")
    parser.add_argument("--stages", type=Path, help="keep the weights after A here, and go on")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    report = Reporter()
    tokenizer = train_tokenizer(tokenizer_texts(random.Random(0)), vocab_size=VOCAB_SIZE)
    network = Network(Shape(vocab_size=tokenizer.get_vocab_size()))
    student = Student(tokenizer)
    prefix_length = len(student.prefix)
    unseen = [next(batches(student, CAREFUL, random.Random(n), held_out=True)) for n in range(8)]
    heldout = [example for batch in unseen for example in batch]

    def imitate(stage: str, habits: Habits, steps: int, rates: tuple[float, float]) -> None:
        def report_step(step: int, loss: float) -> None:
            if step % 100 == 0 or step == steps:
                right = teacher_forced(network, heldout, prefix_length).answers
                report(f"{stage}: batch {step}, loss {loss:.3f}, held-out problems worked out {right:.3f}")

        train_imitation(
            network,
            batches(student, habits, random.Random(options.seed)),
            prefix_length=prefix_length,
            steps=steps,
            muon_lr=rates[0],
            adam_lr=rates[1],
            report=report_step,
        )

    report(f"prefix of {prefix_length} tokens, longest episode {max(len(e.ids) for e in heldout)}")
    resume_or(
        lambda: imitate("A", CAREFUL, options.careful_steps, (0.015, 2e-3)), network, options.stages, "A"
    )
    if (right := teacher_forced(network, heldout, prefix_length).answers) < WORKING_BAR:
        raise RuntimeError(
            f"after stage A {right:.3f} of the problems are worked out, {WORKING_BAR} was required: "
            "give it more --careful-steps or another --seed"
        )
    imitate("B", CARELESS, options.careless_steps, (0.004, 1e-3))
    save_model(network, tokenizer, options.out)
    report(f"wrote {options.out}")


def tokenizer_texts(rng: random.Random, *, draws: int = 6000) -> Iterator[str]:
    """What the model will read and write, without the markers."""
    for draw in range(draws):
        problem = draw_problem(rng, held_out=False)
        yield problem.question
        yield from replies(problem, OF_ALL_KINDS, rng)[0]
        if draw % 3 == 0:
            yield from ("system\n" + SYSTEM_PROMPT, "user\n" + SECOND_CHANCE, "assistant\n")


if __name__ == "__main__":
    main()
