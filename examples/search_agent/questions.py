"""Questions about the encyclopedia, one- and two-hop, with a clean held-out split.

A fifth of the entities is held out, with every question about them. A training question names no held-out
entity and needs none on the way to its answer: questions about a training city that lead through a
held-out country belong to neither split.
"""

from __future__ import annotations

import itertools
import random
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from corpus import Entity, encyclopedia

Split = Literal["train", "heldout"]

# Two wordings of each question. No continents and no yes/no questions: a guess would often be right, and
# reinforcement learning would settle on guessing instead of searching.
WORDINGS: Mapping[str, tuple[str, str]] = {
    "capital": ("What is the capital of {}?", "Name the capital of {}."),
    "currency": ("What is the currency of {}?", "Which currency is used in {}?"),
    "internet domain": ("What is the internet domain of {}?", "Which internet domain belongs to {}?"),
    "calling code": ("What is the calling code of {}?", "Which calling code reaches {}?"),
    "country": ("In which country is {}?", "Which country is {} in?"),
    "time zone": ("What is the time zone of {}?", "Which time zone is used in {}?"),
    "symbol": ("What is the symbol of {}?", "Which symbol stands for {}?"),
    "atomic number": ("What is the atomic number of {}?", "Which atomic number has {}?"),
    "atomic weight": ("What is the atomic weight of {}?", "How heavy is an atom of {}?"),
    "discovery": ("When was {} discovered?", "Since when is {} known?"),
}
FIELDS: Mapping[str, tuple[str, ...]] = {
    "country": ("capital", "currency", "internet domain", "calling code"),
    "city": ("country", "time zone"),
    "element": ("symbol", "atomic number", "atomic weight", "discovery"),
}
# (kind of the subject, hops) and its share of the questions.
MIXTURE = {("city", 2): 0.50, ("country", 1): 0.20, ("city", 1): 0.15, ("element", 1): 0.15}


@dataclass(frozen=True, slots=True)
class Question:
    """A question about `path[0]`; with two hops, `path[1]` is the country to look up next.

    The answer is the `field` of the last entity on the path.
    """

    path: tuple[Entity, ...]
    field: str
    text: str

    @property
    def answer(self) -> str:
        return self.path[-1].facts[self.field]

    @property
    def id(self) -> str:
        """Such as "currency-of-the-country-of-lyon"; the wording does not count."""
        subject = "the country of " * (len(self.path) - 1) + self.path[0].name
        return re.sub(r"[^a-z0-9]+", "-", f"{self.field} of {subject}".lower())


def ask(path: tuple[Entity, ...], field: str, wording: int) -> Question:
    """The question for `field` at the end of `path`, in the first or second wording."""
    subject = path[0].name if len(path) == 1 else f"the country where {path[0].name} is"
    return Question(path, field, WORDINGS[field][wording].format(subject))


def is_held_out(entity: Entity) -> bool:
    """A fixed fifth of the entities of each kind, chosen by a checksum of the name."""
    return zlib.crc32(entity.name.encode()) % 5 == 0


class QuestionBank:
    """The questions that some entities allow, of one split or of both, sampled so that no answer is common.

    Subjects are balanced by field and, for cities, by country: sampled uniformly over cities, a guesser would
    know India and China.
    """

    def __init__(self, entities: Sequence[Entity], split: Split | None = None) -> None:
        self._countries = {entity.name: entity for entity in entities if entity.kind == "country"}
        self._subjects: dict[str, dict[str, list[Entity]]] = {kind: {} for kind in FIELDS}
        for entity in entities:
            if split is None or self._split_of(entity) == split:
                group = entity.facts["country"] if entity.kind == "city" else entity.name
                self._subjects[entity.kind].setdefault(group, []).append(entity)

    def _split_of(self, subject: Entity) -> Split | None:
        if is_held_out(subject):
            return "heldout"
        if subject.kind == "city" and is_held_out(self._countries[subject.facts["country"]]):
            return None
        return "train"

    def sample(self, rng: random.Random) -> Question:
        """One question, its kind in `MIXTURE`'s shares."""
        kind, hops = rng.choices(list(MIXTURE), list(MIXTURE.values()))[0]
        groups = self._subjects[kind]
        subject = rng.choice(groups[rng.choice(list(groups))])
        path = self._path(subject, hops)
        return ask(path, rng.choice(FIELDS[path[-1].kind]), rng.randrange(2))

    def all_questions(self) -> Iterator[Question]:
        """Every question of the bank once, in its first wording."""
        for kind, hops in MIXTURE:
            for subject in itertools.chain.from_iterable(self._subjects[kind].values()):
                path = self._path(subject, hops)
                for field in FIELDS[path[-1].kind]:
                    yield ask(path, field, 0)

    def _path(self, subject: Entity, hops: int) -> tuple[Entity, ...]:
        return (subject,) if hops == 1 else (subject, self._countries[subject.facts["country"]])


@cache
def question_bank(split: Split) -> QuestionBank:
    """The questions of one split of the encyclopedia."""
    return QuestionBank(encyclopedia(), split)


def train_tasks(seed: int = 0, count: int = 1024) -> list[dict[str, str]]:
    """`count` different training questions as tasks {"id", "question", "answer"}."""
    return _tasks("train", seed, count)


def heldout_tasks(seed: int = 0, count: int = 256) -> list[dict[str, str]]:
    """`count` different held-out questions as tasks {"id", "question", "answer"}."""
    return _tasks("heldout", seed, count)


def _tasks(split: Split, seed: int, count: int) -> list[dict[str, str]]:
    bank = question_bank(split)
    rng = random.Random(f"{split}-{seed}")
    chosen: dict[str, Question] = {}
    for _ in range(20 * count):
        if len(chosen) == count:
            break
        question = bank.sample(rng)
        chosen.setdefault(question.id, question)
    else:
        raise ValueError(f"the {split} split has too few questions for {count} tasks")
    return [{"id": q.id, "question": q.text, "answer": q.answer} for q in chosen.values()]
