"""The folder of an evaluation: what was asked for, its tasks, its episodes, and at its end results.json.

A folder belongs to one evaluation. The same one continues in it, without playing an episode again; anything
else is refused, because its results would be of two policies or of two sets of tasks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agents.core.rollout import Task
from areal_agents.errors import ConfigError
from areal_agents.whole_files import write_whole

_SAMPLED_BYTES = 2**20  # of each weight file, at its beginning and at its end


@dataclass(frozen=True, slots=True)
class EvaluationFolder:
    """The files of one evaluation, beside those of `launch.run_folder.RunFolder`."""

    root: Path

    @property
    def identity(self) -> Path:
        """What is evaluated: the settings that results depend on, and a fingerprint of the model."""
        return self.root / "evaluation.json"

    @property
    def tasks(self) -> Path:
        """The tasks, in the order in which they are played."""
        return self.root / "tasks.json"

    @property
    def results(self) -> Path:
        """The results, once the evaluation has ended."""
        return self.root / "results.json"

    def begin(self, identity: Mapping[str, Any]) -> bool:
        """Begin the evaluation of this folder, or continue it; return whether it continues.

        Raises:
            ConfigError: the folder belongs to another evaluation, or is not one of an evaluation.
        """
        wanted = json.loads(json.dumps(identity))
        if self.identity.exists():
            found = json.loads(self.identity.read_text())
            if found != wanted:
                raise ConfigError(
                    f"{self.root} is the evaluation of something else; it differs in "
                    f"{', '.join(_differing(found, wanted))}; choose another folder with --out"
                )
            return True
        if self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir())):
            raise ConfigError(f"{self.root} is not the folder of an evaluation; choose another with --out")
        self.root.mkdir(parents=True, exist_ok=True)
        write_whole(self.identity, json.dumps(wanted, indent=1) + "\n")
        return False

    def keep_tasks(self, tasks: Sequence[Task]) -> None:
        """Write the tasks at the first start, and compare them at each further one.

        Raises:
            ConfigError: they have changed.
        """
        given = [{"id": task.id, "input": json.loads(json.dumps(dict(task.input)))} for task in tasks]
        if not self.tasks.exists():
            write_whole(self.tasks, json.dumps(given, ensure_ascii=False) + "\n")
            return
        kept = json.loads(self.tasks.read_text())
        if kept != given:
            before = {task["id"]: task["input"] for task in kept}
            other = [task["id"] for task in given if before.get(task["id"]) != task["input"]]
            what = f"the first that differs is {other[0]}" if other else f"{len(kept)} became {len(given)}"
            raise ConfigError(
                f"the tasks have changed since the evaluation in {self.root} began ({what}); choose another "
                "folder with --out"
            )

    def read_tasks(self) -> list[Task]:
        """Return the tasks; none before they were written."""
        if not self.tasks.exists():
            return []
        return [Task(task["id"], task["input"]) for task in json.loads(self.tasks.read_text())]


def fingerprint(model: Path) -> str:
    """Return a digest of a model folder: of small files whole, of weights the size and both ends."""
    digest = hashlib.sha256()
    for path in sorted(model.iterdir()):
        if not path.is_file() or path.name.startswith("."):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_SAMPLED_BYTES))
            if size > _SAMPLED_BYTES:
                file.seek(max(_SAMPLED_BYTES, size - _SAMPLED_BYTES))
                digest.update(file.read(_SAMPLED_BYTES))
    return digest.hexdigest()


def _differing(found: Any, wanted: Any, name: str = "") -> list[str]:
    """Return the names of the settings in which two trees differ."""
    if not isinstance(found, dict) or not isinstance(wanted, dict):
        return [] if found == wanted else [name]
    keys = dict.fromkeys((*found, *wanted))
    return [
        inner
        for key in keys
        for inner in _differing(found.get(key), wanted.get(key), f"{name}.{key}" if name else key)
    ]
