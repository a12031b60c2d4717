"""Tasks that reasoning-gym generates and grades: `reasoning-gym:countdown?size=500&difficulty=2`.

Every episode is one question and one answer. The options `size` and `held_out` are the numbers of training
and held-out tasks, `seed` begins the generation, `difficulty` is a level of the data set's curriculum, 0
being the first, and `system` is the system message. All other options are settings of the data set. A
held-out question is in no training task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from reasoning_gym.factory import CURRICULA, DATASETS
from reasoning_gym.utils import extract_answer

from areal_agents.environments.adapters.evaluated_answers import may_be_graded
from areal_agents.environments.environment import Split
from areal_agents.environments.line import EnvironmentLine
from areal_agents.environments.own_thread import OwnThread
from areal_agents.environments.players import Model
from areal_agents.environments.schemes import SCHEMES
from areal_agents.episode import Episode
from areal_agents.errors import TaskEnvironmentError

_HELD_OUT_SEED = 1 << 31  # the task at index i is generated from seed + i, and some data sets allow 32 bits
_SYSTEM = "Think about the question. Then put the final answer alone between <answer> and </answer>."


def open(line: EnvironmentLine) -> ReasoningGym:
    """Open a data set. Raises TaskEnvironmentError if there is none, or it refuses an option."""
    return ReasoningGym(line)


class ReasoningGym:
    """A data set of reasoning-gym."""

    def __init__(self, line: EnvironmentLine) -> None:
        if line.name not in DATASETS:
            raise TaskEnvironmentError(
                f"reasoning-gym has no data set {line.name!r}; it has {', '.join(sorted(DATASETS))}"
            )
        own, settings = SCHEMES["reasoning-gym"].take(line)
        size, held_out, seed = own["size"], own["held_out"], own["seed"]
        if size < 1 or held_out < 1 or seed < 0 or seed + max(size, held_out) > _HELD_OUT_SEED:
            raise TaskEnvironmentError(
                f"{line.text!r}: size and held_out must be at least 1, and seed at least 0, all below 2**31"
            )
        self._line = line
        self.system = own["system"] or _SYSTEM
        self._sets: dict[str, Any] = {
            "train": self._data(settings, own["difficulty"], size=size, seed=seed),
            "eval": self._data(settings, own["difficulty"], size=held_out, seed=seed + _HELD_OUT_SEED),
        }
        self._model = Model()

    def tasks(self, split: Split) -> list[dict[str, Any]]:
        """Return the questions of a split, each with its index, from which it is generated again."""
        held_out = self._rows("eval")
        if split == "eval":
            return held_out
        questions = {row["question"] for row in held_out}
        rows = [row for row in self._rows("train") if row["question"] not in questions]
        if not rows:
            raise TaskEnvironmentError(
                f"{self._line.text!r}: every training question is held out, because the data set has so few; "
                "give a smaller held_out"
            )
        return rows

    async def play(self, task: Mapping[str, Any], ep: Episode) -> float:
        """Ask the question, and return the score of the last answer between tags, or of the whole reply.

        An answer that would run code in its grader counts as none.
        """
        data, messages = (
            self._sets[task["split"]],
            [
                {"role": "system", "content": self.system},
                {"role": "user", "content": task["question"]},
            ],
        )
        thread = OwnThread(f"grader of episode {ep.id}")  # to generate and to grade may take seconds
        try:
            entry = await thread.run(data.__getitem__, task["index"])
            if entry["question"] != task["question"]:
                raise TaskEnvironmentError(
                    f"task {task['id']} is another question in this version of reasoning-gym; begin a new run"
                )
            reply = (await self._model.reply(ep, messages)).get("content") or ""
            answer = extract_answer(reply)
            given = reply.strip() if answer is None else answer
            graded = given if may_be_graded(self._line.name, given) else None
            return float(await thread.run(data.score_answer, graded, entry))
        finally:
            thread.close()

    async def close(self) -> None:
        """Close the connections to the model."""
        await self._model.close()

    def _rows(self, split: Split) -> list[dict[str, Any]]:
        """Return the tasks of a split, each question once."""
        rows: dict[str, dict[str, Any]] = {}
        for index, entry in enumerate(self._sets[split]):
            row = {"id": f"{split}-{index}", "question": entry["question"], "answer": entry["answer"]}
            rows.setdefault(entry["question"], {**row, "split": split, "index": index})
        return list(rows.values())

    def _data(self, settings: Mapping[str, Any], difficulty: int, *, size: int, seed: int) -> Any:
        make, config_type = DATASETS[self._line.name]
        try:
            if difficulty < 0:
                config = config_type(**settings, size=size, seed=seed)
            else:
                config = replace(self._at(difficulty, size=size, seed=seed), **settings)
            config.validate()
            return make(config=config)
        except (AssertionError, TypeError, ValueError) as error:
            known = ", ".join(sorted({field.name for field in fields(config_type)} - {"size", "seed"}))
            ours = ", ".join(option.name for option in SCHEMES["reasoning-gym"].options)
            raise TaskEnvironmentError(
                f"{self._line.text!r}: {error}; its settings are {known}, beside {ours}"
            ) from error

    def _at(self, difficulty: int, **given: int) -> Any:
        """Return the settings of a level of the curriculum; an attribute with fewer levels is at its last.

        Raises:
            ValueError: there is no curriculum, or no attribute has this level.
        """
        if self._line.name not in CURRICULA:
            raise ValueError("the data set has no curriculum; leave difficulty out")
        curriculum = CURRICULA[self._line.name]()
        levels = {name: len(attribute.levels) for name, attribute in curriculum.attributes.items()}
        if difficulty >= max(levels.values()):
            raise ValueError(f"difficulty must be at most {max(levels.values()) - 1}, got {difficulty}")
        for name, count in levels.items():
            curriculum.set_attr_level(name, min(difficulty, count - 1))
        return curriculum.generate_configuration(given)
