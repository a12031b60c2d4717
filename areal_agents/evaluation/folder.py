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
from areal_agents.launch.run_folder import RunFolder
from areal_agents.whole_files import write_whole

_SAMPLED_BYTES = 2**20  # of each weight file, at its beginning and at its end


@dataclass(frozen=True, slots=True)
class EvaluationFolder:
    """The files of one evaluation, beside those of `launch.run_folder.RunFolder`."""

    root: Path

    @property
    def identity(self) -> Path:
        """What is evaluated: the settings that results depend on, and a fingerprint of the model."""
        return RunFolder(self.root).evaluation

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


def differing_settings(first: Path, second: Path) -> dict[str, tuple[Any, Any]] | None:
    """Return the settings in which two evaluations differ, besides the model, with both values.

    Args:
        first, second: the folders of evaluations, or their results.json.

    Returns:
        The values by the name of the setting, and the digests of files and packages by "sources" and what
        they are of, such as "sources: agent". None if one has no evaluation.json beside its results.
    """
    trees = []
    for path in (first, second):
        identity = EvaluationFolder(path if path.is_dir() else path.parent).identity
        if not identity.is_file():
            return None
        tree = json.loads(identity.read_text())
        # The limits are among the settings too, with their names.
        sources = {part: of for part, of in tree["sources"].items() if part != "limits of an episode"}
        trees.append(({**tree["config"], "--ablate-tool": tree["ablate_tool"]}, sources))
    (settings, sources), (other_settings, other_sources) = trees
    changed = [p for p in dict.fromkeys((*sources, *other_sources)) if sources.get(p) != other_sources.get(p)]
    return {
        **_differing(settings, other_settings),
        **{f"sources: {part}": (sources.get(part), other_sources.get(part)) for part in changed},
    }


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


def _differing(found: Any, wanted: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two trees differ: both values, by the name of the setting."""
    if not isinstance(found, dict) or not isinstance(wanted, dict):
        return {} if found == wanted else {name: (found, wanted)}
    differing: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys((*found, *wanted)):
        differing |= _differing(found.get(key), wanted.get(key), f"{name}.{key}" if name else key)
    return differing
