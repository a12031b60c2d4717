"""Writes the facts and questions of the starter projects, from those of the search-agent example.

    python tools/make_starter_tasks.py

They are about countries and elements only, and each question needs one search.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "search_agent"))

from corpus import Entity, encyclopedia  # noqa: E402
from questions import FIELDS, ask, is_held_out  # noqa: E402

COMMON = ROOT / "areal_agents" / "starter" / "files" / "common"
TRAIN, HELD_OUT = 400, 60


def main() -> None:
    """Write facts.json, tasks.jsonl and heldout.jsonl."""
    entities = [entity for entity in encyclopedia() if entity.kind != "city"]
    # The longest names are first, so that Guinea-Bissau is found before Guinea.
    facts = {e.name: e.passage for e in sorted(entities, key=lambda e: -len(e.name))}
    (COMMON / "facts.json").write_text(json.dumps(facts, ensure_ascii=False, indent=0) + "\n")
    rng = random.Random(0)
    for name, count, held_out in (("tasks", TRAIN, False), ("heldout", HELD_OUT, True)):
        chosen = [entity for entity in entities if is_held_out(entity) == held_out]
        (COMMON / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in _questions(chosen, count, rng)))


def _questions(entities: list[Entity], count: int, rng: random.Random) -> list[str]:
    pairs = [(entity, field) for entity in entities for field in FIELDS[entity.kind]]
    questions = (ask((entity,), field, rng.randrange(2)) for entity, field in rng.sample(pairs, count))
    return [
        json.dumps({"id": q.id, "question": q.text, "answer": q.answer}, ensure_ascii=False)
        for q in questions
    ]


if __name__ == "__main__":
    main()
