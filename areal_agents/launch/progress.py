"""Reads the progress of a run from its store and its metrics file, without writing to either."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_agents.core.rollout import AGENT_ERROR, FINGERPRINT
from areal_agents.errors import ConfigError
from areal_agents.store import EpisodeSummary, Store


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One held-out evaluation.

    Attributes:
        label: "before", "step-<version>" or "after".
        done: the number of episodes that ended.
        reward: the mean score of these episodes; a failed one counts as 0.
        failed: the number of episodes that failed for reasons that are not the policy's doing.
        versions: the smallest and the largest policy version of its tokens; -1 without tokens.
        fingerprint: a name of what it was played with; "" if that was not recorded.
        scores: the mean score of the attempts at each task, with the task's id.
    """

    label: str
    done: int
    reward: float
    failed: int
    versions: tuple[int, int]
    fingerprint: str = ""
    scores: tuple[tuple[str, float], ...] = ()


_ALWAYS = ("step", "time")  # what readers of any row rely on
_SHARE = 1 / 40  # of the time that passes, for which a reader may read
_LONGEST_PAUSE_S = 30.0  # between readings, for a store that is large, or was away for a while
_HELD_OUT_S = 10.0  # after which evaluations are read again although no episode of them has begun or ended


class MetricsFile:
    """Follows metrics.jsonl as it grows; an incomplete last line is read when it is complete.

    A trainer that resumes replaces the file by one without the steps that it repeats; the new file is then
    read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self.rows: list[dict[str, Any]] = []

    def update(self) -> None:
        """Bring `rows` up to date. Raises ConfigError, and changes nothing, if a complete line is broken."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset, self.rows = inode, 0, []
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        new = [
            self._parsed(line, number) for number, line in enumerate(whole.splitlines(), len(self.rows) + 1)
        ]
        self._offset += len(whole)
        self.rows.extend(new)

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ConfigError(
                f"line {number} of {self._path} is not the JSON object of a step; a full disk leaves "
                "such lines: remove it"
            )
        for name in _ALWAYS:
            value = row.get(name)
            if isinstance(value, bool) or not isinstance(value, int if name == "step" else int | float):
                raise ConfigError(
                    f"line {number} of {self._path} is not the row of a step, in which {name} is a number, "
                    f"got {value!r}; another program has written it: remove it"
                )
        return row


@dataclass(frozen=True, slots=True)
class RunProgress:
    """A snapshot of a run.

    Attributes:
        version: the newest published version; -1 before the first.
        published_at: when it was published, in seconds since the epoch; None before the first.
        groups: the number of groups in each state.
        held_out: every evaluation so far.
        failed: the number of training episodes that have failed.
        failure: why the last of them failed; None if none has.
        unrewarded: the number of training episodes that have ended and wait for a reward from outside.
        agent_errors: the number of training episodes that are scored although their agent raised.
        constrained: the number of constrained turns among the latest training turns.
        turns: the number of these latest turns.
        sampled_tokens_per_s: the tokens that the engines sampled in the last half minute, per second.
    """

    version: int
    groups: dict[str, int]
    held_out: list[HeldOut] = field(default_factory=list)
    failed: int = 0
    failure: str | None = None
    unrewarded: int = 0
    agent_errors: int = 0
    constrained: int = 0
    turns: int = 0
    published_at: float | None = None
    sampled_tokens_per_s: float = 0.0


class ProgressReader:
    """Reads the progress of a run again and again, for at most a fortieth of the time that passes.

    Reading takes longer the more episodes a store has, and a laptop's processors are those of the run.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._progress: RunProgress | None = None
        self._next_s = 0.0
        self._evaluated: dict[str, int] = {}
        self._held_out: list[HeldOut] = []
        self._held_out_s = 0.0

    def latest(self) -> RunProgress:
        """Return a snapshot, which is an earlier one while it is too early to read again."""
        if self._progress is None or time.monotonic() >= self._next_s:
            return self.read()
        return self._progress

    def read(self) -> RunProgress:
        """Return a snapshot of the run as it is now."""
        began = time.monotonic()
        self._progress = _progress_of(self._store, self._evaluations())
        ended = time.monotonic()
        self._next_s = ended + min((ended - began) / _SHARE, _LONGEST_PAUSE_S)
        return self._progress

    def _evaluations(self) -> list[HeldOut]:
        counts = self._store.episode_counts("eval")
        now = time.monotonic()
        # Rewards that come late, over HTTP, do not change these counts.
        if counts != self._evaluated or now - self._held_out_s >= _HELD_OUT_S:
            self._held_out = read_held_out(self._store)
            self._evaluated, self._held_out_s = counts, now
        return self._held_out


def _progress_of(store: Store, held_out: list[HeldOut]) -> RunProgress:
    failed = store.failed_episodes()
    constrained, turns = store.constrained_turns()
    latest = store.latest_version()
    return RunProgress(
        version=-1 if latest is None else latest.version,
        published_at=None if latest is None else latest.published_at,
        sampled_tokens_per_s=store.sampled_tokens_per_s(),
        groups=store.group_counts(),
        held_out=held_out,
        failed=failed,
        failure=store.last_failure() if failed else None,
        unrewarded=len(store.unrewarded_episodes()),
        agent_errors=store.episodes_with_reward(AGENT_ERROR),
        constrained=constrained,
        turns=turns,
    )


def read_held_out(store: Store) -> list[HeldOut]:
    """Return every evaluation in the store, in the order in which they began.

    If the weights of a step were evaluated with several fingerprints, the evaluation with that of the newest
    evaluation counts, or the last one.
    """
    found: dict[str, dict[tuple[int, str], dict[tuple[str, int], EpisodeSummary]]] = {}
    newest = ""
    for episode in store.episodes(split="eval", metadata={"source": "rollout"}):
        if episode.status != "aborted" and "eval" in episode.metadata:
            # If an attempt was repeated because it failed, the last episode counts.
            newest = episode.metadata.get(FINGERPRINT, "")
            of_label = found.setdefault(episode.metadata["eval"], {})
            played = of_label.setdefault((episode.metadata.get("step", 0), newest), {})
            played[episode.task_id, episode.metadata.get("attempt", 0)] = episode
    return [_chosen(label, of_label, newest) for label, of_label in found.items()]


def _chosen(
    label: str, evaluations: dict[tuple[int, str], dict[tuple[str, int], EpisodeSummary]], newest: str
) -> HeldOut:
    """Return the one of several evaluations with a label that counts; `newest` is the newest fingerprint."""
    last = max(step for step, _ in evaluations)  # a run that was extended evaluates "after" again
    of_step = {fingerprint: played for (step, fingerprint), played in evaluations.items() if step == last}
    fingerprint = newest if newest in of_step else list(of_step)[-1]
    return _held_out(label, fingerprint, list(of_step[fingerprint].values()))


def _held_out(label: str, fingerprint: str, episodes: list[EpisodeSummary]) -> HeldOut:
    scored = [e for e in episodes if e.status in ("finished", "truncated")]
    failed = [e for e in episodes if e.status == "failed"]
    seen = [e for e in scored if e.sampled_tokens]
    versions = (
        min((e.version_min for e in seen if e.version_min is not None), default=-1),
        max((e.version_max for e in seen if e.version_max is not None), default=-1),
    )
    done = len(scored) + len(failed)
    reward = sum(e.score or 0.0 for e in scored) / done if done else 0.0
    by_task: dict[str, list[float]] = {}
    for episode in (*scored, *failed):
        earned = 0.0 if episode.status == "failed" else episode.score or 0.0
        by_task.setdefault(episode.task_id, []).append(earned)
    scores = tuple((task_id, sum(earned) / len(earned)) for task_id, earned in by_task.items())
    return HeldOut(label, done, reward, len(failed), versions, fingerprint, scores)
