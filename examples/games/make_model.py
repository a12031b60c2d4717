"""Build the starting policy of the games: `PYTHONPATH=examples python examples/games/make_model.py`.

It needs reasoning-gym and textarena, whose tasks it plays. A tokenizer is learnt in which every number to 99
is one token, then a Qwen3 model of 0.9 million parameters is trained in four stages: copying (A), equations
(B), imitation of a careful player of all games (C) and of a careless one (D). A stage that does not reach its
bar raises an error instead of giving a model that cannot learn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
from game_players import (
    CAREFUL,
    CARELESS,
    MIXED,
    Block,
    Habits,
    countdown_reply,
    determined_in,
    guessing_game,
    random_block,
    sum_reply,
)
from game_tasks import Countdown, Guessing, Sum, countdown_tasks, sums, system_message
from torch import Tensor
from warmup.batches import endless_batches
from warmup.copying import train_copying
from warmup.export import save_model
from warmup.imitation import train_imitation
from warmup.network import Network, new_network
from warmup.optim import Optimizers, Rates
from warmup.options import option_parser
from warmup.stages import Reporter, require_right, resume_or
from warmup.tokenizer import MARKERS, TAGS, WHOLE_NUMBERS, marker_id, train_tokenizer
from warmup.transcripts import Example, Transcriber, as_messages

from areal_agents.core.messages import Message

VOCAB_SIZE = 672
NUMBERS_BAR = 0.95  # numbers that follow from what is before them and are right, after B and after C
DRILL_ROWS, DRILL_TOKENS = 24, 128
POOL, BATCH = 96, 24  # examples that are sorted by length, and of one batch


def main() -> None:
    parser = option_parser(__doc__.split("\n")[0], Path(__file__).parent)
    parser.add_argument("--equation-steps", type=int, default=420, help="batches of stage B")
    parser.add_argument("--careful-steps", type=int, default=400, help="batches of stage C")
    parser.add_argument("--careless-steps", type=int, default=60, help="batches of stage D")
    options = parser.parse_args()

    report = Reporter()
    table = Table()
    tokenizer = train_tokenizer(
        tokenizer_texts(table, random.Random(0)), vocab_size=VOCAB_SIZE, pieces=WHOLE_NUMBERS
    )
    network = new_network(tokenizer.get_vocab_size(), seed=options.seed, threads=options.threads)
    players = Players(table, Transcriber(tokenizer, [], keeps_history=True))
    numbers = Numbers(tokenizer)
    unseen = numbers.of_replies(players.countdowns(32, random.Random(-1)))

    def copying() -> None:
        train_copying(network, first_token=len(MARKERS + TAGS), seed=options.seed, report=report)

    def equations() -> None:
        train_equations(network, numbers, steps=options.equation_steps, seed=options.seed, report=report)

    imitate = partial(
        train_imitation,
        network,
        prefix_length=players.prefix_length,
        report=report,
        report_every=25,
        score=lambda: f"numbers {unseen.right(network):.3f}",
    )

    def careful() -> None:
        shown = players.batches(CAREFUL, random.Random(options.seed))
        imitate(shown, stage="C", steps=options.careful_steps, rates=Rates(muon=0.015, adam=2e-3))

    report(f"{len(table.countdown)} tasks of countdown, {len(table.sums)} sums")
    resume_or(copying, network, options.stages, "A")
    resume_or(equations, network, options.stages, "B")
    solved = equation_rows(numbers, random.Random(-2)).right(network)
    require_right(solved, NUMBERS_BAR, stage="B", what="numbers", advice="--equation-steps")
    resume_or(careful, network, options.stages, "C")
    played = unseen.right(network)
    require_right(
        played, NUMBERS_BAR, stage="C", what="numbers", advice="--equation-steps, more --careful-steps"
    )
    shown = players.batches(CARELESS, random.Random(options.seed))
    imitate(shown, stage="D", steps=options.careless_steps, rates=Rates(muon=0.004, adam=1e-3))
    save_model(network, tokenizer, options.out)
    report(f"wrote {options.out}")


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

        def sample_pool() -> list[Example]:
            return [kinds[number % len(kinds)](habits, rng) for number in range(POOL)]

        return endless_batches(sample_pool, rng, size=BATCH)

    def countdowns(self, count: int, rng: random.Random) -> list[Example]:
        """Games of countdown of a careful player."""
        return [self._countdown(CAREFUL, rng) for _ in range(count)]

    def _countdown(self, habits: Habits, rng: random.Random) -> Example:
        task = rng.choice(self._table.countdown)
        opening = self._opening(self._table.system["countdown"], task.question)
        return self._transcriber.transcribe(opening, [countdown_reply(task, habits, rng)], [])

    def _sum(self, habits: Habits, rng: random.Random) -> Example:
        task = rng.choice(self._table.sums)
        opening = self._opening(self._table.system["chain_sum"], task.question)
        return self._transcriber.transcribe(opening, [sum_reply(task, habits, rng)], [])

    def _guessing(self, habits: Habits, rng: random.Random) -> Example:
        # Training has smaller seeds, and held-out games have larger ones.
        game = Guessing(rng.randrange(1 << 29, 1 << 30))
        opening = self._opening("", game.news or "")
        replies, read = guessing_game(game, habits, rng)
        turns = as_messages([{"role": "user", "content": text} for text in read])
        return self._transcriber.transcribe(opening, replies, turns)

    def _opening(self, system: str, user: str) -> list[Message]:
        messages = [{"role": "system", "content": system}] if system else []
        return as_messages([*messages, {"role": "user", "content": user}])

    def _questions(self, rng: random.Random) -> list[tuple[str, str]]:
        return [
            (self._table.system["countdown"], rng.choice(self._table.countdown).question),
            (self._table.system["chain_sum"], rng.choice(self._table.sums).question),
            ("", Guessing(rng.randrange(1 << 29)).news or ""),
        ]


@dataclass(frozen=True, slots=True)
class Rows:
    """Token ids [B, T], which of them follow from what is before them, and which a player writes."""

    ids: Tensor
    wanted: Tensor
    trained: Tensor

    def loss(self, network: Network) -> Tensor:
        """Mean cross-entropy of the tokens that a player writes."""
        logits, targets = self._predicted(network, self.trained)
        return F.cross_entropy(logits, targets)

    @torch.no_grad()
    def right(self, network: Network) -> float:
        """The share of the wanted tokens that are the most likely ones."""
        logits, targets = self._predicted(network, self.wanted)
        return (logits.argmax(-1) == targets).float().mean().item()

    def _predicted(self, network: Network, mask: Tensor) -> tuple[Tensor, Tensor]:
        chosen = mask[:, 1:].bool()
        return network.logits(network(self.ids[:, :-1])[chosen]), self.ids[:, 1:][chosen]


class Numbers:
    """Finds the tokens of numbers that follow from what is before them."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._equals, self._minus = (marker_id(tokenizer, sign) for sign in "=-")
        self._is_number = [
            tokenizer.decode([token]).strip().isdigit() for token in range(tokenizer.get_vocab_size())
        ]

    def of_blocks(self, blocks: Iterable[Sequence[Block]]) -> Rows:
        """A row of lines of arithmetic for each sequence of blocks."""
        rows = []
        for row in blocks:
            ids: list[int] = []
            wanted: list[bool] = []
            trained: list[bool] = []
            for block in row:
                encoded = self._tokenizer.encode(block.text)
                follows = self._marks(encoded.ids, block.determined)
                ids += encoded.ids
                wanted += follows
                trained += [
                    mark or start >= block.given
                    for mark, (start, _) in zip(follows, encoded.offsets, strict=True)
                ]
            rows.append((ids[:DRILL_TOKENS], wanted[:DRILL_TOKENS], trained[:DRILL_TOKENS]))
        return Rows(*(padded([row[part] for row in rows]) for part in range(3)))

    def of_replies(self, examples: Sequence[Example]) -> Rows:
        """The games of countdown, of each of which the lines of the reply count."""
        wanted = []
        for example in examples:
            [(start, end)] = example.replies
            text = self._tokenizer.decode(example.ids[start:end])
            determined = frozenset(determined_in(text.partition("<answer>")[0].count("\n")))
            marks = self._marks(example.ids[start:end], determined)
            wanted.append([False] * start + marks)
        ids = [example.ids[: len(row)] for example, row in zip(examples, wanted, strict=True)]
        return Rows(padded(ids), padded(wanted), padded(wanted))

    def _marks(self, ids: Sequence[int], determined: frozenset[int]) -> list[bool]:
        marks, number = [], 0
        for place, token in enumerate(ids):
            if self._is_number[token]:
                marks.append(number in determined)
                number += 1
            else:
                marks.append(token == self._minus and place > 0 and ids[place - 1] == self._equals)
        return marks


def train_equations(
    network: Network, numbers: Numbers, *, steps: int, seed: int, report: Callable[[str], None]
) -> None:
    """Stage B: lines of arithmetic, of which what a player writes is trained, so copying is kept as well."""
    rng = random.Random(seed)

    def scale(step: int) -> float:
        return min(1.0, (step + 1) / 20) * min(1.0, max(0.02, 2 * (1 - step / steps)))

    unseen = equation_rows(numbers, random.Random(-1))
    optimizers = Optimizers(network, Rates(muon=0.02, adam=3e-3), scale=scale)
    for step in range(1, steps + 1):
        equation_rows(numbers, rng).loss(network).backward()
        optimizers.step()
        if step % 25 == 0 or step == steps:
            report(f"equations: step {step}, numbers {unseen.right(network):.3f}")


def equation_rows(numbers: Numbers, rng: random.Random) -> Rows:
    """Rows of lines of arithmetic."""
    return numbers.of_blocks([[random_block(rng) for _ in range(8)] for _ in range(DRILL_ROWS)])


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """A tensor [B, T] of rows of different lengths, such as token ids or marks; zeros fill them up."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
    return ids


def tokenizer_texts(table: Table, rng: random.Random, *, samples: int = 600) -> Iterator[str]:
    """What the model will read and write, without the markers, and every number to 99."""
    for _ in range(samples):
        yield " ".join(map(str, range(100)))
        task, one_sum = rng.choice(table.countdown), rng.choice(table.sums)
        yield from table.system.values()
        yield from _played_alone(task, one_sum, rng)
        game = Guessing(rng.randrange(1 << 29, 1 << 30))
        yield game.news or ""
        replies, read = guessing_game(game, MIXED, rng)
        yield from (*replies, *read)


def _played_alone(task: Countdown, one_sum: Sum, rng: random.Random) -> Iterator[str]:
    yield task.question
    yield countdown_reply(task, MIXED, rng)
    yield one_sum.question
    yield sum_reply(one_sum, MIXED, rng)


if __name__ == "__main__":
    main()
