"""Build the starting policy of the games: `PYTHONPATH=examples python examples/games/make_model.py`.

It needs reasoning-gym and textarena, whose tasks it plays. A tokenizer is learnt in which every number to 99
is one token, then a Qwen3 model of 0.9 million parameters is trained in four stages: copying (A), equations
(B), imitation of a careful player of all games (C) and of a careless one (D). A stage that does not reach its
bar raises an error instead of giving a model that cannot learn.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
from game_players import (
    CAREFUL,
    CARELESS,
    Habits,
    countdown_reply,
    guessing_game,
    random_equations,
    sum_reply,
)
from game_tasks import Countdown, Guessing, Sum, countdown_tasks, sums, system_message
from torch import Tensor
from warmup.copying import train_copying
from warmup.export import save_model
from warmup.imitation import train_imitation
from warmup.network import Network, Shape
from warmup.optim import Optimizers
from warmup.stages import Reporter, resume_or
from warmup.tokenizer import MARKERS, TAGS, WHOLE_NUMBERS, marker_id, train_tokenizer
from warmup.transcripts import Example, Transcriber, as_messages

VOCAB_SIZE = 672
RESULTS_BAR = 0.95  # results of equations that are right, given everything before, after B and after C
DRILL_ROWS, DRILL_TOKENS = 24, 128
POOL, BATCH = 96, 24  # examples that are sorted by length, and of one batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--equation-steps", type=int, default=400, help="batches of stage B")
    parser.add_argument("--careful-steps", type=int, default=220, help="batches of stage C")
    parser.add_argument("--careless-steps", type=int, default=50, help="batches of stage D")
    parser.add_argument("--stages", type=Path, help="keep weights after A, B and C here, and go on from them")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    report = Reporter()
    table = Table()
    tokenizer = train_tokenizer(
        tokenizer_texts(table, random.Random(0)), vocab_size=VOCAB_SIZE, pieces=WHOLE_NUMBERS
    )
    network = Network(Shape(vocab_size=tokenizer.get_vocab_size()))
    players = Players(table, Transcriber(tokenizer, [], keeps_history=True))
    results = Results(tokenizer)
    unseen = list(next(players.batches(CAREFUL, random.Random(-1))))
    unseen_ids, unseen_replies = (
        padded([one.ids for one in unseen]),
        padded([one.trained() for one in unseen]),
    )

    def copying() -> None:
        train_copying(network, first_token=len(MARKERS + TAGS), seed=options.seed, report=report)

    def equations() -> None:
        train_equations(network, results, steps=options.equation_steps, seed=options.seed, report=report)

    def imitate(stage: str, habits: Habits, steps: int, rates: tuple[float, float]) -> None:
        def report_step(step: int, loss: float) -> None:
            if step % 25 == 0 or step == steps:
                right = results.right(network, unseen_ids, unseen_replies)
                report(f"{stage}: batch {step}, loss {loss:.3f}, results {right:.3f}")

        train_imitation(
            network,
            players.batches(habits, random.Random(options.seed)),
            prefix_length=players.prefix_length,
            steps=steps,
            muon_lr=rates[0],
            adam_lr=rates[1],
            report=report_step,
        )

    report(f"{len(table.countdown)} tasks of countdown, {len(table.sums)} sums")
    resume_or(copying, network, options.stages, "A")
    resume_or(equations, network, options.stages, "B")
    require("B", results.right(network, equation_rows(results, random.Random(-2))))
    resume_or(
        lambda: imitate("C", CAREFUL, options.careful_steps, (0.015, 2e-3)), network, options.stages, "C"
    )
    require("C", results.right(network, unseen_ids, unseen_replies))
    imitate("D", CARELESS, options.careless_steps, (0.004, 1e-3))
    save_model(network, tokenizer, options.out)
    report(f"wrote {options.out}")


def require(stage: str, right: float) -> None:
    """RuntimeError if too few results of equations are right, which caps reinforcement learning."""
    if right < RESULTS_BAR:
        raise RuntimeError(
            f"after stage {stage} {right:.3f} of the results are right, {RESULTS_BAR} was required: give it "
            "more --equation-steps, more --careful-steps or another --seed"
        )


class Table:
    """The tasks that the warm-up plays, none of which is held out, and the system messages."""

    def __init__(self) -> None:
        self.countdown = countdown_tasks(6000)
        self.sums = sums(6000)
        self.system = {"countdown": system_message("countdown"), "chain_sum": system_message("chain_sum")}


class Players:
    """Plays tasks of the table, as examples for imitation."""

    def __init__(self, table: Table, transcriber: Transcriber) -> None:
        self._table = table
        self._transcriber = transcriber
        rng = random.Random(0)
        openings = [self._opening(*one) for one in (*self._questions(rng), *self._questions(rng))]
        self.prefix_length = len(transcriber.prefix(*openings))

    def batches(self, habits: Habits, rng: random.Random) -> Iterator[list[Example]]:
        """Endless batches of examples of similar length: half of countdown, a quarter each of the others."""
        kinds = (self._countdown, self._countdown, self._guessing, self._sum)
        while True:
            pool = [kinds[number % len(kinds)](habits, rng) for number in range(POOL)]
            pool.sort(key=lambda example: len(example.ids))
            cut = [pool[start : start + BATCH] for start in range(0, POOL, BATCH)]
            rng.shuffle(cut)
            yield from cut

    def _countdown(self, habits: Habits, rng: random.Random) -> Example:
        task = rng.choice(self._table.countdown)
        opening = self._opening(self._table.system["countdown"], task.question)
        return self._transcriber.transcribe(opening, [countdown_reply(task, habits, rng)], [])

    def _sum(self, habits: Habits, rng: random.Random) -> Example:
        task = rng.choice(self._table.sums)
        opening = self._opening(self._table.system["chain_sum"], task.question)
        return self._transcriber.transcribe(opening, [sum_reply(task, habits, rng)], [])

    def _guessing(self, habits: Habits, rng: random.Random) -> Example:
        game = Guessing(
            rng.randrange(1 << 29, 1 << 30)
        )  # training has smaller seeds, held-out games larger ones
        opening = self._opening("", game.news or "")
        replies, read = guessing_game(game, habits, rng)
        turns = as_messages([{"role": "user", "content": text} for text in read])
        return self._transcriber.transcribe(opening, replies, turns)

    def _opening(self, system: str, user: str) -> list:
        messages = [{"role": "system", "content": system}] if system else []
        return as_messages([*messages, {"role": "user", "content": user}])

    def _questions(self, rng: random.Random) -> list[tuple[str, str]]:
        return [
            (self._table.system["countdown"], rng.choice(self._table.countdown).question),
            (self._table.system["chain_sum"], rng.choice(self._table.sums).question),
            ("", Guessing(rng.randrange(1 << 29)).news or ""),
        ]


class Results:
    """Which tokens of a text are results of equations: what follows an equals sign."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._equals, self._minus = (marker_id(tokenizer, sign) for sign in "=-")

    def of(self, ids: Tensor) -> Tensor:
        """A mask [B, T] of the tokens that are results, with their signs."""
        follows = torch.zeros_like(ids, dtype=torch.bool)
        follows[:, 1:] = ids[:, :-1] == self._equals
        magnitudes = torch.zeros_like(follows)
        magnitudes[:, 1:] = (follows & (ids == self._minus))[:, :-1]
        return follows | magnitudes

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        return self._tokenizer.encode(text).ids

    @torch.no_grad()
    def right(self, network: Network, ids: Tensor, written: Tensor | None = None) -> float:
        """The share of results in ids [B, T] that are the most likely token.

        Args:
            written: [B, T] 1 for the tokens of replies, if only their results count: the text of a task may
                have an equals sign that nothing computed follows.
        """
        wanted = self.of(ids)[:, 1:]
        if written is not None:
            wanted &= written[:, 1:].bool()
        logits = network.logits(network(ids[:, :-1])[wanted])
        return (logits.argmax(-1) == ids[:, 1:][wanted]).float().mean().item()


def train_equations(
    network: Network, results: Results, *, steps: int, seed: int, report: Callable[[str], None]
) -> None:
    """Stage B: lines of arithmetic, of which only the results are trained."""
    rng = random.Random(seed)

    def scale(step: int) -> float:
        return min(1.0, (step + 1) / 20) * min(1.0, max(0.02, 2 * (1 - step / steps)))

    unseen = equation_rows(results, random.Random(-1))
    optimizers = Optimizers(network, muon_lr=0.02, adam_lr=3e-3, scale=scale)
    for step in range(1, steps + 1):
        ids = equation_rows(results, rng)
        wanted = results.of(ids)[:, 1:]
        logits = network.logits(network(ids[:, :-1])[wanted])
        F.cross_entropy(logits, ids[:, 1:][wanted]).backward()
        optimizers.step()
        if step % 25 == 0 or step == steps:
            right = results.right(network, unseen)
            report(f"equations: step {step}, results {right:.3f}")


def equation_rows(results: Results, rng: random.Random) -> Tensor:
    """Token ids [B, T] of lines of arithmetic."""
    return padded([results.encode(random_equations(rng, 16))[:DRILL_TOKENS] for _ in range(DRILL_ROWS)])


def padded(rows: list) -> Tensor:
    """Token ids [B, T] of rows of different lengths; zeros fill them up."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
    return ids


def tokenizer_texts(table: Table, rng: random.Random, *, draws: int = 600) -> Iterator[str]:
    """What the model will read and write, without the markers, and every number to 99."""
    for _ in range(draws):
        yield " ".join(map(str, range(100)))
        task, one_sum = rng.choice(table.countdown), rng.choice(table.sums)
        yield from table.system.values()
        yield from _played_alone(task, one_sum, rng)
        game = Guessing(rng.randrange(1 << 29, 1 << 30))
        yield game.news or ""
        replies, read = guessing_game(game, CARELESS, rng)
        yield from (*replies, *read)


def _played_alone(task: Countdown, one_sum: Sum, rng: random.Random) -> Iterator[str]:
    yield task.question
    yield countdown_reply(task, CARELESS, rng)
    yield one_sum.question
    yield sum_reply(one_sum, CARELESS, rng)


if __name__ == "__main__":
    main()
