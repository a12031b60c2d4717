"""Small functions with one mistake each, and the folders in which an agent repairs them.

A docstring says in words what a function does. Of its parts (how values are aggregated, which are chosen, how
each is changed) exactly one differs in the code. A task is a folder with the function and a test that fails.
The cases that decide the reward are other ones, and are in no folder.
"""

from __future__ import annotations

import operator
import random
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

AGGREGATES: dict[str, tuple[str, Callable[[list[int]], int]]] = {
    "sum": ("Sum", sum),
    "max": ("Largest", max),
    "min": ("Smallest", min),
    "len": ("Number", len),
}
RELATIONS: dict[str, tuple[str, Callable[[int, int], bool]]] = {
    ">": ("above", operator.gt),
    "<": ("below", operator.lt),
    ">=": ("at least", operator.ge),
    "<=": ("at most", operator.le),
}
CHANGES: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "+": ("plus", operator.add),
    "-": ("minus", operator.sub),
    "%": ("modulo", operator.mod),
}
NUMBERS = range(2, 10)
NOUNS = """
ages apples bags balls bands banks bars beans bells bills birds blocks boats books boxes bricks buses
cakes calls cards cells chairs coins costs crops cups dates days deals desks dogs doors drops ducks eggs
farms fees files fines flags floors forks games gates gifts goals goats grades grants guests hats hills
homes hooks hours hotels jars jobs jumps keys kites lamps lanes leaks leaves lengths lights lines loads
loans locks logs loops maps marks masks meals miles mines nails nets notes nuts oaks orders pages pairs
paths peaks pens phones pipes plans plates plots points ponds pools ports posts prices prizes pumps
ranks rates rents rings rivers roads rocks roofs rooms ropes roses runs sales scores seats seeds ships
shirts shops shots signs sizes skills socks songs spots stacks stars steps stones stores streets tables
tanks taxes teams tents ticks tides tiles times tools towers towns toys trees trips trucks tubes votes
wages walls weeks weights wheels widths winds wires words yards years
"""
TASKS = Path(__file__).parent / "tasks"
TEST = "test.py"
HELD_OUT_OF = 5  # one noun of so many, and one combination of parts, is held out
SHOWN, HIDDEN = 2, 4  # cases in the folder's test, and cases that decide the reward


@dataclass(frozen=True, slots=True)
class Function:
    """The sum, largest, smallest or number of the values that satisfy a relation, each of them changed."""

    noun: str  # the name of its argument and of its file
    aggregate: str
    relation: str
    change: str
    number: int

    @property
    def file(self) -> str:
        return f"{self.noun}.py"

    @property
    def docstring(self) -> str:
        return (
            f"{AGGREGATES[self.aggregate][0]} of {self.noun} {RELATIONS[self.relation][0]} limit, "
            f"each {CHANGES[self.change][0]} {self.number}."
        )

    @property
    def parts(self) -> str:
        """All of it but the noun, which tells combinations apart."""
        return f"{self.aggregate} {self.change} {self.number} {self.relation}"

    @property
    def code(self) -> str:
        """The statement that computes it."""
        chosen = f"for n in {self.noun} if n {self.relation} limit"
        return f"return {self.aggregate}([n {self.change} {self.number} {chosen}])"

    def source(self, docstring: str) -> str:
        return f'def pick({self.noun}, limit):\n    """{docstring}"""\n    {self.code}\n'

    def __call__(self, values: list[int], limit: int) -> int | None:
        """The value of the function; None where no value is chosen and there is no largest or smallest."""
        satisfies, changed = RELATIONS[self.relation][1], CHANGES[self.change][1]
        chosen = [changed(value, self.number) for value in values if satisfies(value, limit)]
        return AGGREGATES[self.aggregate][1](chosen) if chosen or self.aggregate in ("sum", "len") else None

    def is_held_out(self) -> bool:
        """Whether its noun or the combination of its parts is kept from training."""
        return _held_out(self.noun) or _held_out(self.parts)


@dataclass(frozen=True, slots=True)
class Repair:
    """The function that a docstring describes, the one in the file, and cases that tell them apart."""

    wanted: Function
    broken: Function
    shown: tuple[tuple[list[int], int, int], ...]  # (values, limit, result)
    hidden: tuple[tuple[list[int], int, int], ...]

    @property
    def source(self) -> str:
        """What is in the file that is to be repaired."""
        return self.broken.source(self.wanted.docstring)

    @property
    def test(self) -> str:
        """The test that is in the folder: it prints ok, or one line that says what is wrong."""
        cases = ", ".join(f"({values}, {limit}, {result})" for values, limit, result in self.shown)
        return (
            f"from {self.wanted.noun} import pick\n"
            f"\n"
            f"for values, limit, wanted in [{cases}]:\n"
            f"    try:\n"
            f"        right = pick(values, limit) == wanted\n"
            f"    except ValueError:  # there is no largest of no values\n"
            f"        right = False\n"
            f"    if not right:\n"
            f"        raise SystemExit('wrong')\n"
            f"print('ok')\n"
        )

    def passes(self, function: Function) -> bool:
        """Whether the folder's test passes with a function in the file."""
        return all(function(values, limit) == result for values, limit, result in self.shown)


def sample_function(rng: random.Random) -> Function:
    """A function of any kind."""
    return Function(
        rng.choice(NOUNS.split()),
        rng.choice(list(AGGREGATES)),
        rng.choice(list(RELATIONS)),
        rng.choice(list(CHANGES)),
        rng.choice(NUMBERS),
    )


def mutants(function: Function, rng: random.Random) -> list[Function]:
    """Functions that differ in one part; there are as many of each part's, in random order."""
    found = [
        replace(function, aggregate=rng.choice([x for x in AGGREGATES if x != function.aggregate])),
        replace(function, relation=rng.choice([x for x in RELATIONS if x != function.relation])),
        replace(function, change=rng.choice([x for x in CHANGES if x != function.change])),
        replace(function, number=rng.choice([x for x in NUMBERS if x != function.number])),
    ]
    rng.shuffle(found)
    return found


def sample_repair(rng: random.Random, *, held_out: bool) -> Repair:
    """A task of training, or one whose function is held out. Both of its tests fail as it stands."""
    while True:
        wanted = sample_function(rng)
        if wanted.is_held_out() != held_out:
            continue
        for broken in mutants(wanted, rng):
            shown, hidden = (_cases(wanted, broken, count, rng) for count in (SHOWN, HIDDEN))
            if shown is not None and hidden is not None:
                return Repair(wanted, broken, shown, hidden)


def _cases(
    wanted: Function, broken: Function, count: int, rng: random.Random
) -> tuple[tuple[list[int], int, int], ...] | None:
    """Cases of which at least one has another result with `broken`; None if they are not found."""
    for _ in range(20):
        cases = []
        while len(cases) < count:
            values = [rng.randrange(1, 10) for _ in range(5)]
            limit = rng.choice(values)  # so that "above" and "at least" differ
            result = wanted(values, limit)
            if result is not None:
                cases.append((values, limit, result))
        if any(broken(values, limit) != result for values, limit, result in cases):
            return tuple(cases)
    return None


def _held_out(text: str) -> bool:
    return zlib.crc32(text.encode()) % HELD_OUT_OF == 0


def train_tasks(seed: int = 0) -> list[dict[str, Any]]:
    """The tasks of training; their folders are written if they are not there."""
    return _tasks("train", seed, count=1000)


def heldout_tasks() -> list[dict[str, Any]]:
    """The tasks of the held-out evaluation: functions that no task of training has. They never change."""
    return _tasks("heldout", 0, count=256)


def _tasks(split: str, seed: int, *, count: int) -> list[dict[str, Any]]:
    rng = random.Random(f"{split}/{seed}")
    root = TASKS / f"{split}-{seed}"
    tasks = []
    for number in range(count):
        repair = sample_repair(rng, held_out=split == "heldout")
        folder = root / f"{number:04}"
        _write(folder, {repair.wanted.file: repair.source, TEST: repair.test})
        tasks.append(
            {
                "id": f"{split}-{seed}-{number:04}",
                "instruction": instruction(repair),
                "folder": str(folder),
                "file": repair.wanted.file,
                "cases": [list(case) for case in repair.hidden],
            }
        )
    return tasks


def instruction(repair: Repair) -> str:
    """What the agent is told."""
    return f"Repair {repair.wanted.file}"


def _write(folder: Path, files: dict[str, str]) -> None:
    """Write a folder whole or not at all; several processes may do so at once."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as made:
        for name, text in files.items():
            (Path(made) / name).write_text(text)
        # A temporary folder can be read by its owner alone, and an agent's sandbox may be another user.
        Path(made).chmod(0o755)
        try:
            Path(made).rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same content
                raise
            return
        Path(made).mkdir()  # what TemporaryDirectory removes
