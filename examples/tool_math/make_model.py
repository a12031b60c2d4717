"""Build the starting policy: `PYTHONPATH=examples python examples/tool_math/make_model.py`.

A tokenizer is learnt from what the policy will read and write, then a small Qwen3 model is trained in two
stages: imitation of a careful student, who computes with Python (A), and of a careless one (B). If the first
does not reach its bars, an error is raised instead of giving a model that cannot learn.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from number_problems import draw_problem
from tool_students import CAREFUL, CARELESS, OF_ALL_KINDS, Habits, Student, batches, texts
from warmup.export import save_model
from warmup.imitation import teacher_forced, train_imitation
from warmup.network import Network, Shape
from warmup.stages import Reporter, resume_or
from warmup.tokenizer import MARKERS, TAGS, byte_tokenizer, train_tokenizer

VOCAB_SIZE = 576  # bytes, markers, and the words of the problems and of the tool
# Each digit is a token, because digits are to be copied; a word has the space before it, because none is.
PIECES = r" ?\p{L}+|\p{N}| (?=\p{N})|[^\p{L}\p{N}]+"
CALLING_BAR = 0.9  # calls, token by token, after A; what is copied wrongly caps reinforcement learning
READING_BAR = 0.9  # answers, token by token, after A


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--careful-steps", type=int, default=600, help="batches of stage A")
    parser.add_argument("--careless-steps", type=int, default=50, help="batches of stage B")
    parser.add_argument("--stages", type=Path, help="keep the weights after A here, and go on")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    report = Reporter()
    tokenizer = train_tokenizer(tokenizer_texts(random.Random(0)), vocab_size=VOCAB_SIZE, pieces=PIECES)
    network = Network(Shape(vocab_size=tokenizer.get_vocab_size()))
    student = Student(tokenizer)
    prefix_length = len(student.prefix)
    unseen = [next(batches(student, CAREFUL, random.Random(n), held_out=True)) for n in range(8)]
    heldout = [example for batch in unseen for example in batch]

    def imitate(stage: str, habits: Habits, steps: int, muon_lr: float, adam_lr: float) -> None:
        def report_step(step: int, loss: float) -> None:
            if step % 50 == 0 or step == steps:
                right = teacher_forced(network, heldout, prefix_length)
                report(
                    f"{stage}: batch {step}, loss {loss:.3f}, "
                    f"held-out calls {right.calls:.3f}, answers {right.answers:.3f}"
                )

        train_imitation(
            network,
            # Careless replies are shorter than calls: sorted by length, they would weigh too much.
            batches(student, habits, random.Random(options.seed), by_length=habits == CAREFUL),
            prefix_length=prefix_length,
            steps=steps,
            muon_lr=muon_lr,
            adam_lr=adam_lr,
            report=report_step,
        )

    report(f"prefix of {prefix_length} tokens, longest episode {max(len(e.ids) for e in heldout)}")
    resume_or(lambda: imitate("A", CAREFUL, options.careful_steps, 0.015, 2e-3), network, options.stages, "A")
    right = teacher_forced(network, heldout, prefix_length)
    if right.calls < CALLING_BAR or right.answers < READING_BAR:
        raise RuntimeError(
            f"after stage A {right.calls:.3f} of the calls and {right.answers:.3f} of the answers are right, "
            f"{CALLING_BAR} and {READING_BAR} were required: give it more --careful-steps or another --seed"
        )
    imitate("B", CARELESS, options.careless_steps, 0.002, 1e-3)
    save_model(network, tokenizer, options.out)
    report(f"wrote {options.out}")


def tokenizer_texts(rng: random.Random, *, draws: int = 6000) -> Iterator[str]:
    """What the model will read and write, without the markers."""
    plain = byte_tokenizer()
    prefix = _without_markers(plain.decode(Student(plain).prefix, skip_special_tokens=False))
    for draw in range(draws):
        problem = draw_problem(rng, held_out=False)
        yield from map(_without_markers, texts(problem, OF_ALL_KINDS, rng))
        if draw % 3 == 0:
            yield from (prefix, "assistant\n")


def _without_markers(text: str) -> str:
    for marker in MARKERS + TAGS:
        text = text.replace(marker, "")
    return text


if __name__ == "__main__":
    main()
