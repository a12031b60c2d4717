"""Fictional encyclopedias in the surface form of the real one.

The warm-up learns to read from facts that exist nowhere else, so nothing can be memorised. Names are sampled
letter by letter from the letter statistics of real training names and look like them.
"""

from __future__ import annotations

import random
import string
from collections import defaultdict
from collections.abc import Iterable, Iterator

from corpus import CONTINENTS, Entity

_START, _END = "\x02", "\x03"
COUNTRIES, CITIES_EACH, ELEMENTS = 8, 5, 12


class NameMaker:
    """Makes up words whose letter triples occur in `examples`."""

    def __init__(self, examples: Iterable[str]) -> None:
        self._following: dict[str, list[str]] = defaultdict(list)
        for name in examples:
            for word in name.replace("-", " ").split():
                letters = _START * 2 + word + _END
                for i in range(2, len(letters)):
                    self._following[letters[i - 2 : i]].append(letters[i])

    def word(self, rng: random.Random) -> str:
        """One made-up word of 3 to 12 characters."""
        while True:
            letters = _START * 2
            while letters[-1] != _END:
                letters += rng.choice(self._following[letters[-2:]])
            if 3 <= len(letters) - 3 <= 12:
                return letters[2:-1]

    def name(self, rng: random.Random, *, share_first: float = 0.3) -> str:
        """One or two made-up words, the first one capitalised."""
        words = [self.word(rng)] + ([self.word(rng)] if rng.random() < share_first else [])
        text = " ".join(words)
        return text[0].upper() + text[1:]


def fictional_world(names: NameMaker, rng: random.Random) -> list[Entity]:
    """A small encyclopedia with new countries, their cities, and elements; all names differ."""
    fresh = _distinct_names(names, rng)
    countries = [Entity("country", next(fresh), _country_facts(names, rng)) for _ in range(COUNTRIES)]
    cities = [
        Entity("city", next(fresh), _city_facts(country.name, names, rng))
        for country in countries
        for _ in range(CITIES_EACH)
    ]
    elements = [Entity("element", next(fresh), _element_facts(names, rng)) for _ in range(ELEMENTS)]
    return [*countries, *cities, *elements]


def _distinct_names(names: NameMaker, rng: random.Random) -> Iterator[str]:
    """Endless new names; some begin with one of a few common words, as San José and San Juan do."""
    common = [names.word(rng).capitalize() for _ in range(4)]
    seen: set[str] = set()
    while True:
        name = f"{rng.choice(common)} {names.word(rng)}" if rng.random() < 0.15 else names.name(rng)
        if name.lower() not in seen:
            seen.add(name.lower())
            yield name


def _country_facts(names: NameMaker, rng: random.Random) -> dict[str, str]:
    code = f"+{rng.randint(1, 999)}" + (f"-{rng.randint(10, 9999)}" if rng.random() < 0.15 else "")
    return {
        "capital": names.name(rng),
        "currency": names.name(rng, share_first=0.1),
        "internet domain": "." + "".join(rng.choices(string.ascii_lowercase, k=2)),
        "calling code": code,
        "continent": rng.choice(list(CONTINENTS.values())),
        "population": str(int(10 ** rng.uniform(3, 9))),
        "area": str(int(10 ** rng.uniform(1, 7))),
    }


def _city_facts(country: str, names: NameMaker, rng: random.Random) -> dict[str, str]:
    zone = [rng.choice(["Africa", "America", "Asia", "Europe", "Pacific"]), names.word(rng).capitalize()]
    if rng.random() < 0.1:
        zone.insert(1, names.word(rng).capitalize())
    if rng.random() < 0.3:
        zone[-1] += "_" + names.word(rng).capitalize()
    return {
        "country": country,
        "time zone": "/".join(zone),
        "population": str(int(10 ** rng.uniform(4, 7.3))),
    }


def _element_facts(names: NameMaker, rng: random.Random) -> dict[str, str]:
    return {
        "symbol": names.word(rng).capitalize()[: rng.choice([1, 2, 2, 2])],
        "atomic number": str(rng.randint(1, 130)),
        "atomic weight": f"{rng.uniform(1, 300):.2f}",
        "discovery": "antiquity" if rng.random() < 0.1 else str(rng.randint(1669, 2015)),
        "period": str(rng.randint(1, 7)),
    }
