"""Build the starting policy: `PYTHONPATH=examples python examples/conversation/make_model.py`.

A tokenizer is learnt from what the policy reads and writes at the small desk, then a small Qwen3 model is
trained in three stages: imitation of a careful clerk (A), of the same with fresh learning rates (B), and of a
careless one (C). If a bar is not reached after B, an error is raised instead of giving a model that cannot
learn. Sentences are single tokens, so the numbers that have to be copied are few tokens away.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from clerk_examples import DeskTranscriber, batches, conversations, reply_text
from clerks import CAREFUL, CARELESS
from warmup.export import save_model
from warmup.imitation import teacher_forced, train_imitation
from warmup.network import new_network
from warmup.optim import Rates
from warmup.options import option_parser
from warmup.stages import Reporter, require_right, resume_or
from warmup.tokenizer import PHRASES, prefix_text, train_tokenizer, without_markers

REPLIES_BAR = 0.9  # replies, word for word, after B; a conversation has five or six that must all be right


def main() -> None:
    parser = option_parser(__doc__.split("\n")[0], Path(__file__).parent)
    parser.add_argument("--careful-steps", type=int, default=240, help="batches of stage A")
    parser.add_argument("--more-careful-steps", type=int, default=400, help="batches of stage B")
    parser.add_argument("--careless-steps", type=int, default=100, help="batches of stage C")
    options = parser.parse_args()

    report = Reporter()
    tokenizer = train_tokenizer(tokenizer_texts(random.Random(0)), pieces=PHRASES)
    network = new_network(tokenizer.get_vocab_size(), seed=options.seed, threads=options.threads)
    transcriber = DeskTranscriber(tokenizer)
    prefix_length = len(transcriber.prefix)
    unseen = [next(batches(transcriber, CAREFUL, random.Random(n), held_out=True)) for n in range(4)]
    heldout = [example for batch in unseen for example in batch]
    report(f"prefix of {prefix_length} tokens, longest conversation {max(len(e.ids) for e in heldout)}")

    def replies_right() -> float:
        return teacher_forced(network, heldout, prefix_length).calls

    imitate = partial(
        train_imitation,
        network,
        prefix_length=prefix_length,
        report=report,
        report_every=20,
        score=lambda: f"held-out replies {replies_right():.3f}",
    )

    def careful() -> None:
        shown = batches(transcriber, CAREFUL, random.Random(options.seed))
        imitate(shown, stage="A", steps=options.careful_steps, rates=Rates(muon=0.015, adam=2e-3))

    def again() -> None:
        shown = batches(transcriber, CAREFUL, random.Random(f"{options.seed}/B"))
        imitate(shown, stage="B", steps=options.more_careful_steps, rates=Rates(muon=0.015, adam=2e-3))

    resume_or(careful, network, options.stages, "A")
    resume_or(again, network, options.stages, "B")
    require_right(replies_right(), REPLIES_BAR, stage="B", what="replies", advice="--more-careful-steps")
    shown = batches(transcriber, CARELESS, random.Random(f"{options.seed}/C"))
    imitate(shown, stage="C", steps=options.careless_steps, rates=Rates(muon=0.004, adam=1e-3))
    save_model(network, tokenizer, options.out)
    report(f"wrote {options.out}")


def tokenizer_texts(rng: random.Random, *, samples: int = 300) -> Iterator[str]:
    """What the model will read and write, without the markers."""
    prefix = prefix_text(lambda plain: DeskTranscriber(plain).prefix)
    for messages in [*conversations(CAREFUL, rng, samples), *conversations(CARELESS, rng, samples)]:
        texts = [reply_text(message) for message in messages[1:]]
        yield from (prefix, *["assistant\n"] * len(texts), *map(without_markers, texts))


if __name__ == "__main__":
    main()
