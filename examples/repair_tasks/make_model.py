"""Build the starting policy of the example: `PYTHONPATH=examples python examples/repair_tasks/make_model.py`.

As for the search agent, a tokenizer is learnt from what the policy will read and write, then a Qwen3 model of
0.9 million parameters is trained in three stages: copying (A), imitation of a careful repairer (B) and of a
careless one (C). A stage that does not reach its bar raises an error instead of giving a model that cannot
learn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from demonstrator import CAREFUL, CARELESS, OF_ALL_KINDS, Demonstrator, batches, play
from dialogue import SETTINGS, command_text
from repairs import instruction, sample_repair
from warmup.copying import train_copying
from warmup.export import save_model
from warmup.imitation import Reading, teacher_forced, train_imitation
from warmup.network import new_network
from warmup.optim import Rates
from warmup.options import option_parser
from warmup.stages import Reporter, require_right, resume_or
from warmup.tokenizer import MARKERS, TAGS, prefix_text, train_tokenizer, without_markers

VOCAB_SIZE = 640  # the texts have fewer pieces than the 1,024 of the search agent
EDITING_BAR = 0.75  # commands, given everything before, after B; what is misread caps reinforcement learning


def main() -> None:
    parser = option_parser(__doc__.split("\n")[0], Path(__file__).parent)
    parser.add_argument("--careful-steps", type=int, default=250, help="batches of stage B")
    parser.add_argument("--careless-steps", type=int, default=40, help="batches of stage C")
    options = parser.parse_args()

    report = Reporter()
    tokenizer = train_tokenizer(tokenizer_texts(random.Random(0)), vocab_size=VOCAB_SIZE)
    network = new_network(tokenizer.get_vocab_size(), seed=options.seed, threads=options.threads)
    demonstrator = Demonstrator(tokenizer)
    prefix_length = len(demonstrator.prefix)
    unseen = [next(batches(demonstrator, CAREFUL, random.Random(n), held_out=True)) for n in range(8)]
    heldout = [example for batch in unseen for example in batch]
    report(f"prefix of {prefix_length} tokens, longest episode {max(len(e.ids) for e in heldout)}")

    def reading() -> Reading:
        return teacher_forced(network, heldout, prefix_length)

    def score() -> str:
        now = reading()
        return f"held-out commands {now.calls:.3f}, ends {now.answers:.3f}"

    imitate = partial(
        train_imitation,
        network,
        prefix_length=prefix_length,
        report=report,
        report_every=50,
        score=score,
    )

    def copying() -> None:
        train_copying(network, first_token=len(MARKERS + TAGS), seed=options.seed, report=report)

    def careful() -> None:
        shown = batches(demonstrator, CAREFUL, random.Random(options.seed))
        imitate(shown, stage="B", steps=options.careful_steps, rates=Rates(muon=0.015, adam=2e-3))

    resume_or(copying, network, options.stages, "A")
    resume_or(careful, network, options.stages, "B")
    require_right(reading().calls, EDITING_BAR, stage="B", what="commands", advice="--careful-steps")
    shown = batches(demonstrator, CARELESS, random.Random(options.seed))
    imitate(shown, stage="C", steps=options.careless_steps, rates=Rates(muon=0.004, adam=1e-3))
    save_model(network, tokenizer, options.out)
    report(f"wrote {options.out}")


def tokenizer_texts(rng: random.Random, *, samples: int = 6000) -> Iterator[str]:
    """What the model will read and write, without the markers."""
    prefix = prefix_text(lambda plain: Demonstrator(plain).prefix)
    for number in range(samples):
        repair = sample_repair(rng, held_out=False)
        commands, outputs, _ = play(repair, OF_ALL_KINDS, rng)
        yield instruction(repair)
        yield from outputs
        yield from (without_markers(command_text(command)) for command in commands)
        if number % 3 == 0:
            yield prefix
            yield SETTINGS["model"]["format_error_template"]


if __name__ == "__main__":
    main()
