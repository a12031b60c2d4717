"""Makes `data/`: an encyclopedia as a corpus of pages, and questions about it with one, two and three hops.

    PYTHONPATH=examples/search_agent python examples/deep_search/multihop.py

The facts, the wordings and the split are those of the quick start; the third hop, from a country to its
capital and what the capital's page says, is new. The same packages and seed always give the same files.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from corpus import Entity, encyclopedia
from questions import FIELDS, WORDINGS, is_held_out

from areal_agents.whole_files import write_whole

DATA = Path(__file__).parent / "data"
TRAIN, HELD_OUT = 1536, 384
SITE = "https://encyclopedia.example"
CAPITAL_FIELDS = ("population", "time zone")
_POPULATION = ("What is the population of {}?", "How many people live in {}?")
_SUBJECTS = {"city": "the country where {} is", "country": "the capital of {}"}  # what each hop leads to


class Questions:
    """The questions that the encyclopedia allows in one split.

    A training question needs no held-out entity on its way; a held-out one is about a held-out entity.
    """

    def __init__(self, entities: Sequence[Entity], *, held_out: bool) -> None:
        self._countries = {entity.name: entity for entity in entities if entity.kind == "country"}
        self._cities = {entity.name: entity for entity in entities if entity.kind == "city"}
        self._entities = entities
        self._held_out = held_out

    def paths(self, hops: int) -> list[tuple[tuple[Entity, ...], str]]:
        """Return (path, field) of every question with so many hops; the answer is the last one's field."""
        found = []
        for subject in self._entities:
            path = self._path(subject, hops)
            if path is None or not self._belongs(path):
                continue
            fields = FIELDS[path[-1].kind] if hops == 1 or path[-1].kind != "city" else CAPITAL_FIELDS
            found += [(path, field) for field in fields if not self._is_told_before(path, field)]
        return found

    def sample(self, rng: random.Random, count: int) -> list[dict[str, Any]]:
        """Return different tasks, about a third of each number of hops, in random order.

        They are balanced by the country that they lead to: otherwise a guesser would know the large ones.
        """
        tasks: dict[str, dict[str, Any]] = {}
        for hops in (1, 2, 3):
            by_end: dict[str, list[tuple[tuple[Entity, ...], str]]] = {}
            for path, field in self.paths(hops):
                end = path[-1].facts.get("country", path[-1].name)
                by_end.setdefault(end, []).append((path, field))
            wanted = len(tasks) + (count - len(tasks)) // (4 - hops)
            ends = list(by_end)
            while len(tasks) < wanted:
                path, field = rng.choice(by_end[rng.choice(ends)])
                task = ask(path, field, rng.randrange(2))
                tasks.setdefault(task["id"], task)
        shuffled = list(tasks.values())
        rng.shuffle(shuffled)
        return shuffled

    def _path(self, subject: Entity, hops: int) -> tuple[Entity, ...] | None:
        """Return what is looked up, in order; None if a hop leads nowhere."""
        path = (subject,)
        while len(path) < hops:
            here = path[-1]
            if here.kind == "element":
                return None
            is_city = here.kind == "city"
            onward = self._countries.get(here.facts["country"]) if is_city else self._capital(here)
            if onward is None or onward in path:
                return None
            path = (*path, onward)
        return path

    def _capital(self, country: Entity) -> Entity | None:
        city = self._cities.get(country.facts["capital"])
        return city if city is not None and city.facts["country"] == country.name else None

    def _belongs(self, path: Sequence[Entity]) -> bool:
        if self._held_out:
            return is_held_out(path[0])
        return not any(is_held_out(entity) for entity in path)

    @staticmethod
    def _is_told_before(path: Sequence[Entity], field: str) -> bool:
        """Whether an earlier page already says the answer, as the time zone of the country's other cities."""
        return any(entity.facts.get(field) == path[-1].facts[field] for entity in path[:-1])


def ask(path: Sequence[Entity], field: str, wording: int) -> dict[str, Any]:
    """Return the task that asks for a field at the end of a path, in the first or second wording."""
    subject = path[0].name
    for entity in path[:-1]:
        subject = _SUBJECTS[entity.kind].format(subject)
    wordings = _POPULATION if field == "population" else WORDINGS[field]
    question = wordings[wording].format(subject)
    return {
        "id": re.sub(r"[^a-z0-9]+", "-", f"{field} of {subject}".lower()),
        "question": question,
        "answer": path[-1].facts[field],
        "hops": len(path),
    }


def pages() -> list[dict[str, str]]:
    """Return the corpus: one page for each entity."""
    found = []
    for entity in encyclopedia():
        slug = re.sub(r"[^a-z0-9]+", "-", entity.name.lower()).strip("-")
        url = f"{SITE}/{entity.kind}/{slug}"
        found.append(
            {"id": f"{entity.kind}/{slug}", "title": entity.name, "text": entity.passage, "url": url}
        )
    return found


def tasks(split: str, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return the tasks of "train" or of "heldout"."""
    held_out = split == "heldout"
    rng = random.Random(f"{split}-{seed}")
    return Questions(encyclopedia(), held_out=held_out).sample(rng, HELD_OUT if held_out else TRAIN)


def files() -> dict[str, str]:
    """Return the contents of the files of `data/`, by name."""
    rows = {"corpus": pages(), "train": tasks("train"), "heldout": tasks("heldout")}
    return {f"{name}.jsonl": _lines(of_file) for name, of_file in rows.items()}


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    for name, content in files().items():
        write_whole(DATA / name, content)
        print(f"{DATA / name}: {content.count(chr(10)):,} lines")
