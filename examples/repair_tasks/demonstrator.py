"""Demonstrations of repairing, careful or careless, as examples for imitation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import tokenizers
from dialogue import BASH_TOOL, SUBMIT, command_text, fix, look, observation, opening
from repairs import AGGREGATES, CHANGES, NUMBERS, RELATIONS, Function, Repair, instruction, sample_repair
from warmup.batches import endless_batches
from warmup.transcripts import Example, Transcriber, as_messages

from areal_agents.core.messages import Message

MOST_COMMANDS = 6  # as agent.max_turns of config.yaml
POOL, BATCH = 64, 16  # examples that are sorted by length, and of one batch


@dataclass(frozen=True, slots=True)
class Habits:
    """How a demonstrator behaves; the numbers are probabilities."""

    mishap: float = 0.0  # the first edit is a wrong one, which is shown and not imitated
    submit_at_once: float = 0.0
    misread: float = 0.0  # writes the line again as it is, or with another mistake
    copied: float = 0.0  # writes the line again as it is
    no_change: float = 0.0  # forgets that sed prints its result unless it has -i
    broken_call: float = 0.0  # leaves out a brace
    careless: float = 0.0  # submits although the test says "wrong"


CAREFUL = Habits(mishap=0.2)
CARELESS = Habits(submit_at_once=0.2, copied=0.6, no_change=0.2, broken_call=0.05, careless=0.6)
OF_ALL_KINDS = replace(CARELESS, misread=0.6, copied=0.0)  # what the tokenizer is learnt from


class Demonstrator:
    """Repairs files by commands, with the given habits."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._transcriber = Transcriber(tokenizer, [BASH_TOOL])

    @property
    def prefix(self) -> list[int]:
        """The ids that every example starts with: system prompt and tool."""
        return self._transcriber.prefix(as_messages(opening("a")), as_messages(opening("b")))

    def demonstrate(self, repair: Repair, habits: Habits, rng: random.Random) -> Example:
        """One episode."""
        commands, outputs, untrained = play(repair, habits, rng)
        replies = [command_text(command) for command in commands]
        if rng.random() < habits.broken_call:
            cut = rng.randrange(len(replies))
            replies = [*replies[:cut], replies[cut].replace('"}}', '"}')]
        turns = [Message("tool", observation(output)) for output in outputs]
        first = as_messages(opening(instruction(repair)))
        return self._transcriber.transcribe(first, replies, turns, untrained=untrained)


def play(repair: Repair, habits: Habits, rng: random.Random) -> tuple[list[str], list[str], set[int]]:
    """The commands of an episode, the output of each but the last, and the numbers of mishaps."""
    commands: list[str] = []
    outputs: list[str] = []
    untrained: set[int] = set()
    file, current = repair.wanted.file, repair.broken
    if rng.random() < habits.submit_at_once:
        return [SUBMIT], [], set()
    commands.append(look(file))
    outputs.append(current.source(repair.wanted.docstring))
    while len(commands) < MOST_COMMANDS - 1:
        is_mishap = not untrained and rng.random() < habits.mishap
        if is_mishap:
            untrained.add(len(commands))
        if is_mishap or rng.random() < habits.misread:
            written = _misread(repair, rng)
        else:
            copies = habits.copied > 0 and rng.random() < habits.copied
            written = repair.broken if copies else repair.wanted
        in_place = rng.random() >= habits.no_change
        commands.append(fix(file, written.code, in_place=in_place))
        shown = "" if in_place else written.source(repair.wanted.docstring)
        current = written if in_place else current
        passes = repair.passes(current)
        outputs.append(shown + ("ok\n" if passes else "wrong\n"))
        if passes or rng.random() < habits.careless:
            break
    return [*commands, SUBMIT], outputs, untrained


def _misread(repair: Repair, rng: random.Random) -> Function:
    """What a careless reader writes: the code as it is, or with one part as the docstring does not say it."""
    choices = {"aggregate": AGGREGATES, "relation": RELATIONS, "change": CHANGES, "number": NUMBERS}
    part = rng.choice(list(choices))
    wrong = [x for x in choices[part] if x != getattr(repair.wanted, part)]
    return rng.choice([repair.broken, replace(repair.wanted, **{part: rng.choice(wrong)})])


def batches(
    demonstrator: Demonstrator, habits: Habits, rng: random.Random, *, held_out: bool = False
) -> Iterator[list[Example]]:
    """Endless batches of examples of similar length, each of a new task."""

    def sample_pool() -> list[Example]:
        repairs = (sample_repair(rng, held_out=held_out) for _ in range(POOL))
        return [demonstrator.demonstrate(repair, habits, rng) for repair in repairs]

    return endless_batches(sample_pool, rng, size=BATCH)
