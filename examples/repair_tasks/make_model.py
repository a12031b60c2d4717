"""Build the starting policy of the example: `PYTHONPATH=examples python examples/repair_tasks/make_model.py`.

As for the search agent, a tokenizer is learnt from what the policy will read and write, then a Qwen3 model of
0.9 million parameters is trained in three stages: copying (A), imitation of a careful repairer (B) and of a
careless one (C). A stage that does not reach its bar raises an error instead of giving a model that cannot
learn.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from demonstrator import CAREFUL, CARELESS, OF_ALL_KINDS, Demonstrator, Habits, batches, play
from dialogue import SETTINGS, call_text
from repairs import draw_repair, instruction
from warmup.copying import train_copying
from warmup.export import save_model
from warmup.imitation import teacher_forced, train_imitation
from warmup.network import Network, Shape
from warmup.stages import Reporter, resume_or
from warmup.tokenizer import MARKERS, TAGS, byte_tokenizer, train_tokenizer

VOCAB_SIZE = 640  # the texts have fewer pieces than the 1,024 of the search agent
EDITING_BAR = 0.75  # commands, given everything before, after B; what is misread caps reinforcement learning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--careful-steps", type=int, default=250, help="batches of stage B")
    parser.add_argument("--careless-steps", type=int, default=40, help="batches of stage C")
    parser.add_argument("--stages", type=Path, help="keep weights after A and B here, and go on")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    report = Reporter()
    tokenizer = train_tokenizer(tokenizer_texts(random.Random(0)), vocab_size=VOCAB_SIZE)
    network = Network(Shape(vocab_size=tokenizer.get_vocab_size()))
    demonstrator = Demonstrator(tokenizer)
    prefix_length = len(demonstrator.prefix)
    unseen = [next(batches(demonstrator, CAREFUL, random.Random(n), held_out=True)) for n in range(8)]
    heldout = [example for batch in unseen for example in batch]

    def imitate(stage: str, habits: Habits, steps: int, rates: tuple[float, float]) -> None:
        def report_step(step: int, loss: float) -> None:
            if step % 50 == 0 or step == steps:
                score = teacher_forced(network, heldout, prefix_length)
                report(
                    f"{stage}: batch {step}, loss {loss:.3f}, held-out commands {score.calls:.3f}, "
                    f"ends {score.answers:.3f}"
                )

        train_imitation(
            network,
            batches(demonstrator, habits, random.Random(options.seed)),
            prefix_length=prefix_length,
            steps=steps,
            muon_lr=rates[0],
            adam_lr=rates[1],
            report=report_step,
        )

    def copying() -> None:
        train_copying(network, first_token=len(MARKERS + TAGS), seed=options.seed, report=report)

    report(f"prefix of {prefix_length} tokens, longest episode {max(len(e.ids) for e in heldout)}")
    resume_or(copying, network, options.stages, "A")
    resume_or(
        lambda: imitate("B", CAREFUL, options.careful_steps, (0.015, 2e-3)), network, options.stages, "B"
    )
    if (editing := teacher_forced(network, heldout, prefix_length).calls) < EDITING_BAR:
        raise RuntimeError(
            f"after stage B {editing:.3f} of the commands are right, {EDITING_BAR} was required: "
            "give it more --careful-steps or another --seed"
        )
    imitate("C", CARELESS, options.careless_steps, (0.004, 1e-3))
    save_model(network, tokenizer, options.out)
    report(f"wrote {options.out}")


def tokenizer_texts(rng: random.Random, *, draws: int = 6000) -> Iterator[str]:
    """What the model will read and write, without the markers."""
    prefix = byte_tokenizer().decode(Demonstrator(byte_tokenizer()).prefix, skip_special_tokens=False)
    for tag in MARKERS + TAGS:
        prefix = prefix.replace(tag, "")
    for draw in range(draws):
        repair = draw_repair(rng, held_out=False)
        commands, outputs, _ = play(repair, OF_ALL_KINDS, rng)
        yield instruction(repair)
        yield from outputs
        yield from (call_text(command).replace(TAGS[0], "").replace(TAGS[1], "") for command in commands)
        if draw % 3 == 0:
            yield prefix
            yield SETTINGS["model"]["format_error_template"]


if __name__ == "__main__":
    main()
