"""Build the starting policy: `PYTHONPATH=examples python examples/conversation/make_model.py`.

A tokenizer is learnt from what the policy reads and writes at the small desk, then a small Qwen3 model is
trained in three stages: imitation of a careful clerk (A), of the same with fresh learning rates (B), and of a
careless one (C). If a bar is not reached after B, an error is raised instead of giving a model that cannot
learn. Sentences are single tokens, so the numbers that have to be copied are few tokens away.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from clerk_examples import DeskTranscriber, batches, conversations, reply_text
from clerks import CAREFUL, CARELESS, Habits
from warmup.export import save_model
from warmup.imitation import teacher_forced, train_imitation
from warmup.network import Network, Shape
from warmup.stages import Reporter, resume_or
from warmup.tokenizer import MARKERS, PHRASES, TAGS, byte_tokenizer, train_tokenizer

REPLIES_BAR = 0.9  # replies, word for word, after B; a conversation has five or six that must all be right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--careful-steps", type=int, default=240, help="batches of stage A")
    parser.add_argument("--copying-steps", type=int, default=400, help="batches of stage B")
    parser.add_argument("--careless-steps", type=int, default=100, help="batches of stage C")
    parser.add_argument("--stages", type=Path, help="keep weights after A and B here, and go on from them")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    report = Reporter()
    tokenizer = train_tokenizer(tokenizer_texts(random.Random(0)), pieces=PHRASES)
    network = Network(Shape(vocab_size=tokenizer.get_vocab_size()))
    transcriber = DeskTranscriber(tokenizer)
    prefix_length = len(transcriber.prefix)
    unseen = [next(batches(transcriber, CAREFUL, random.Random(n), held_out=True)) for n in range(4)]
    heldout = [example for batch in unseen for example in batch]

    def imitate(stage: str, habits: Habits, steps: int, rates: tuple[float, float]) -> None:
        rng = random.Random(options.seed if stage == "A" else f"{options.seed}/{stage}")

        def report_step(step: int, loss: float) -> None:
            if step % 20 == 0 or step == steps:
                right = teacher_forced(network, heldout, prefix_length).calls
                report(f"{stage}: batch {step}, loss {loss:.3f}, held-out replies {right:.3f}")

        train_imitation(
            network,
            batches(transcriber, habits, rng),
            prefix_length=prefix_length,
            steps=steps,
            muon_lr=rates[0],
            adam_lr=rates[1],
            report=report_step,
        )

    report(f"prefix of {prefix_length} tokens, longest conversation {max(len(e.ids) for e in heldout)}")
    for stage, steps in (("A", options.careful_steps), ("B", options.copying_steps)):
        resume_or(partial(imitate, stage, CAREFUL, steps, (0.015, 2e-3)), network, options.stages, stage)
    if (right := teacher_forced(network, heldout, prefix_length).calls) < REPLIES_BAR:
        raise RuntimeError(
            f"after stage B {right:.3f} of the replies are right, {REPLIES_BAR} was required: "
            "give it more --copying-steps or another --seed"
        )
    imitate("C", CARELESS, options.careless_steps, (0.004, 1e-3))
    save_model(network, tokenizer, options.out)
    report(f"wrote {options.out}")


def tokenizer_texts(rng: random.Random, *, samples: int = 300) -> Iterator[str]:
    """What the model will read and write, without the markers."""
    prefix = byte_tokenizer().decode(DeskTranscriber(byte_tokenizer()).prefix, skip_special_tokens=False)
    for messages in [*conversations(CAREFUL, rng, samples), *conversations(CARELESS, rng, samples)]:
        texts = [reply_text(message) for message in messages[1:]]
        for text in (prefix, *["assistant\n"] * len(texts), *texts):
            for tag in MARKERS + TAGS:
                text = text.replace(tag, "")
            yield text


if __name__ == "__main__":
    main()
