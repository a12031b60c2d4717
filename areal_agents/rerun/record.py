"""The files that describe a rerun: rerun.json, and rewards.json if the rewards were computed again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_agents.core.rollout import Reward
from areal_agents.errors import ConfigError, RequestError
from areal_agents.inspection.sources import rerun_in
from areal_agents.launch.run_folder import RunFolder
from areal_agents.proxy.episodes.control_forms import rewards_of
from areal_agents.whole_files import write_whole

FORMAT = "areal-agents rerun 1"


@dataclass(frozen=True, slots=True)
class RerunRecord:
    """The content of rerun.json.

    Attributes:
        run, store: the paths of the run's folder and of the store with its episodes.
        step, until: the rerun trains the steps after `step`, up to `until`.
        version: the version of the weights of `step` when the run trained the next step.
        checkpoint: the checkpoint that it starts from; None: the initial weights.
        changes: the settings that differ, as key=value.
        new_rewards: whether the rewards were computed again; they are in rewards.json.
    """

    run: str
    store: str
    step: int
    until: int
    version: int
    checkpoint: str | None
    changes: tuple[str, ...]
    new_rewards: bool

    def write(self, folder: RunFolder) -> None:
        """Write rerun.json."""
        write_whole(folder.rerun, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, folder: RunFolder) -> RerunRecord:
        """Read rerun.json. Raises ConfigError if it is missing, or was written by another release."""
        found = rerun_in(folder)
        if found is None or found.pop("format", None) != FORMAT:
            raise ConfigError(f"{folder.root} has no rerun that this release reads ({folder.rerun.name})")
        return cls(**{**found, "changes": tuple(found["changes"])})


def rewards_in(folder: RunFolder) -> dict[str, tuple[Reward, ...]]:
    """Return the rewards in rewards.json by episode id. Raises ConfigError if one of them is invalid."""
    tree = json.loads(folder.new_rewards.read_text())
    return {row["episode"]: _rewards(row) for row in tree["episodes"]}


def _rewards(row: Mapping[str, object]) -> tuple[Reward, ...]:
    try:
        return tuple(rewards_of({"reward": row["rewards"]}))
    except RequestError as error:
        raise ConfigError(f"the new reward of episode {row['episode']}: {error}") from error


def start_checkpoint(record: RerunRecord) -> Path | None:
    """Return the folder of the checkpoint to start from; None for the initial weights."""
    return None if record.checkpoint is None else Path(record.checkpoint)
