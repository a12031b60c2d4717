"""Counts the damage of the kills from the store, the metrics, the agents' log and the weights.

A `Ledger` reads the store from outside during the run, so that `count` can determine afterwards what was
lost.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chaos_run_support import GROUPS, ChaosRun
from transformers import AutoModelForCausalLM

from areal_agents.core.rollout import RecordedEpisode
from areal_agents.store import Store

TOLERANCE = 2e-3  # tolerance of a logprob, since another kernel rounds differently
_LOOK_S = 1.0


@dataclass(slots=True)
class Ledger:
    """The contents of a run's store that were observed during the run.

    Attributes:
        scores: episode → (score, digest of its turns), of the episodes that were seen in a complete group.
        settled: (group, use) → step, of the uses of groups that a checkpoint includes.
        trained_twice: groups with a use that was trained in two steps, or with two uses in one step.
    """

    store: Path
    scores: dict[str, tuple[float, str]] = field(default_factory=dict)
    settled: dict[tuple[str, int], int] = field(default_factory=dict)
    trained_twice: set[str] = field(default_factory=set)
    _next_look: float = 0.0

    def look(self) -> None:
        """Record the state of the store, at most once a second."""
        if time.monotonic() < self._next_look or not self.store.exists():
            return
        try:
            with sqlite3.connect(f"file:{self.store}?mode=ro", uri=True, timeout=5) as connection:
                connection.execute("BEGIN")
                self._note(connection)
        except sqlite3.OperationalError:  # the store is being created or recovered
            return
        finally:
            self._next_look = time.monotonic() + _LOOK_S

    def _note(self, connection: sqlite3.Connection) -> None:
        for episode, score in connection.execute(
            "SELECT e.id, SUM(r.value) FROM episodes e JOIN groups g ON g.id = e.group_id "
            "JOIN rewards r ON r.episode_id = e.id WHERE g.state = 'complete' "
            "AND e.status IN ('finished', 'truncated') GROUP BY e.id"
        ):
            if episode not in self.scores:
                self.scores[episode] = (score, _digest(connection, episode))
        checkpoint = connection.execute("SELECT COALESCE(MAX(step), 0) FROM checkpoints").fetchone()[0]
        steps: dict[str, set[int]] = defaultdict(set)
        query = "SELECT group_id, use, step FROM leases WHERE state = 'trained' ORDER BY group_id, use"
        for group, use, step in connection.execute(query):
            # The uses of a group are numbered without gaps, and each belongs to a different step.
            if (
                self.settled.get((group, use), step) != step
                or step in steps[group]
                or use != len(steps[group])
            ):
                self.trained_twice.add(group)
            steps[group].add(step)
            if step <= checkpoint:
                self.settled[group, use] = step


@dataclass(frozen=True, slots=True)
class Counts:
    """The damage of the kills; `faults` has the counts that must be 0 and are not.

    Attributes:
        deaths: number of kills by role; starts: number of calls of `areal-agents train`.
        steps: number of steps at the end of the run; steps_lost: steps that were trained again after a kill;
            steps_lost_beyond_checkpoint: those of them that the newest checkpoint on the disk included.
        tokens_checked: number of tokens whose logprob was recomputed with the weights of their version;
            telling: the share of them whose logprob under the previous version differs by more than the
            tolerance, so that a wrong version would be detected.
        completions_answered: number of completions that agents received, according to their log.
    """

    deaths: dict[str, int]
    starts: int
    steps: int
    episodes_completed: int
    completions_answered: int
    tokens_checked: int
    telling: float
    steps_lost: int
    steps_lost_beyond_checkpoint: int
    episodes_lost: int
    completions_lost: int
    groups_trained_twice: int
    groups_missing_from_a_step: int
    tokens_of_wrong_version: int
    versions_repeated: int
    processes_left: int

    @property
    def faults(self) -> dict[str, int]:
        """The counts that must be 0 and are not."""
        names = (
            "steps_lost_beyond_checkpoint", "episodes_lost", "completions_lost", "groups_trained_twice",
            "groups_missing_from_a_step", "tokens_of_wrong_version", "versions_repeated", "processes_left",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names if getattr(self, name)}


def count(run: ChaosRun, ledger: Ledger, *, most_turns: int = 500) -> Counts:
    """Compare the final state of a run, which has ended, with the ledger.

    Args:
        most_turns: largest number of turns whose tokens are recomputed; of more turns, a random sample of
            this size is used.
    """
    left = run.processes()
    ledger._next_look = 0.0
    ledger.look()
    with sqlite3.connect(f"file:{ledger.store}?mode=ro", uri=True) as connection:
        lost = _episodes_lost(connection, ledger)
        versions = connection.execute("SELECT version, step, path FROM versions ORDER BY version").fetchall()
        per_step = Counter(
            dict(
                connection.execute(
                    "SELECT step, COUNT(*) FROM leases WHERE state = 'trained' AND use = 0 GROUP BY step"
                )
            )
        )
        turns = {row[0] for row in connection.execute("SELECT id FROM turns")}
    answered = _answered(run.agent_log)
    wrong, checked, telling = _check_tokens(ledger.store, versions, most_turns)
    lost_steps, beyond = _steps_lost(run, versions)
    return Counts(
        deaths=dict(Counter(run.deaths)),
        starts=len(run.starts),
        steps=run.steps,
        episodes_completed=len(ledger.scores),
        completions_answered=len(answered),
        tokens_checked=checked,
        telling=round(telling, 3),
        steps_lost=lost_steps,
        steps_lost_beyond_checkpoint=beyond,
        episodes_lost=lost,
        completions_lost=len(answered - turns),
        groups_trained_twice=len(ledger.trained_twice),
        groups_missing_from_a_step=sum(per_step[step] != GROUPS for step in range(1, run.steps + 1)),
        tokens_of_wrong_version=wrong,
        versions_repeated=_repeated(run.metrics()),
        processes_left=len(left),
    )


def _episodes_lost(connection: sqlite3.Connection, ledger: Ledger) -> int:
    """Return the number of episodes that were complete, and are missing or changed now."""
    held = {
        row[0]
        for row in connection.execute(
            "SELECT e.id FROM episodes e JOIN groups g ON g.id = e.group_id LEFT JOIN leases l "
            "ON l.group_id = g.id AND l.use = 0 "
            "WHERE g.state = 'complete' AND COALESCE(l.state, '') != 'dropped'"
        )
    }
    return sum(
        episode not in held or _digest(connection, episode) != digest
        for episode, (_, digest) in ledger.scores.items()
    )


def _digest(connection: sqlite3.Connection, episode: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    query = (
        "SELECT id, prompt_ids, token_ids, logprobs, versions FROM turns WHERE episode_id = ? ORDER BY seq"
    )
    for row in connection.execute(query, (episode,)):
        digest.update(repr(row).encode())
    return digest.hexdigest()


def _answered(log: Path) -> set[str]:
    """Return the completions that agents received, according to their log; an incomplete line is skipped."""
    if not log.exists():
        return set()
    lines = (line for line in log.read_text().splitlines(True) if line.endswith("\n"))
    return {json.loads(line)["completion"] for line in lines}


def _steps_lost(run: ChaosRun, versions: list[tuple[int, int, str]]) -> tuple[int, int]:
    """Return the number of steps that were trained again, and of those that a checkpoint already included."""
    steps = [step for _, step, _ in versions]
    lost = sum(max(0, before - after) for before, after in itertools.pairwise(steps))
    beyond = 0
    for start in run.starts:
        resumed = next((step for version, step, _ in versions if version > start.version), start.checkpoint)
        beyond += max(0, start.checkpoint - resumed)
    return lost, beyond


def _repeated(metrics: list[dict[str, Any]]) -> int:
    """Return the number of lines of metrics.jsonl that repeat a step or a version."""
    return sum(len(metrics) - len({line[name] for line in metrics}) for name in ("step", "version"))


def _check_tokens(
    store_path: Path, versions: list[tuple[int, int, str]], most_turns: int
) -> tuple[int, int, float]:
    """Return the number of tokens whose recorded logprob is not that of their version, the number of tokens
    that were checked, and the share `Counts.telling`."""
    torch.set_num_threads(1)
    wanted: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]] = defaultdict(list)
    for ids, logprobs, of, where in _sampled(store_path, most_turns):
        for version in np.unique(of[where]):
            wanted[int(version)].append((ids, logprobs, of, where))
    paths = {version: path for version, _, path in versions}
    wrong = checked = told = 0
    for version, sequences in sorted(wanted.items()):
        model = _model(paths[version])
        before = _model(paths[version - 1]) if version - 1 in paths else None
        for ids, logprobs, of, where in sequences:
            own = where & (of == version)
            off = np.abs(_logprobs(model, ids) - logprobs)[own] > TOLERANCE
            wrong, checked = wrong + int(off.sum()), checked + len(off)
            if before is not None:
                told += int((np.abs(_logprobs(before, ids) - logprobs)[own] > TOLERANCE).sum())
    return wrong, checked, told / max(1, checked)


def _sampled(
    store_path: Path, most_turns: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (token ids, recorded logprobs, versions, whether the last turn sampled the token), each [L], of
    the paths from a root to a turn."""
    with Store.open(store_path) as store:
        ids = [summary.id for summary in store.episodes(split="train") if summary.turns]
        rng = random.Random(0)
        rng.shuffle(ids)
        taken = 0
        for episode_id in ids:
            if taken >= most_turns:
                return
            episode = store.load_episode(episode_id)
            taken += len(episode.turns)
            yield from _paths(episode)


def _paths(episode: RecordedEpisode) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    by_id = {turn.id: turn for turn in episode.turns}
    for turn in episode.turns:
        ids, node = [turn.completion.token_ids, turn.new_prompt_ids], turn
        while node.parent is not None:
            node = by_id[node.parent]
            ids += [node.completion.token_ids, node.new_prompt_ids]
        whole = np.concatenate(ids[::-1]).astype(np.int64)
        count = len(turn.completion)
        logprobs, versions = np.zeros(len(whole)), np.full(len(whole), -1)
        where = np.zeros(len(whole), bool)
        if count:
            logprobs[-count:], versions[-count:] = turn.completion.logprobs, turn.completion.versions
            where[-count:] = True
            yield whole, logprobs, versions, where


def _model(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def _logprobs(model: Any, ids: np.ndarray) -> np.ndarray:
    """Return the logprob of each token given those before it [L]; 0 for the first token."""
    tokens = torch.from_numpy(ids)[None]
    logits = model(tokens).logits[0, :-1].log_softmax(-1)
    return np.concatenate([[0.0], logits.gather(-1, tokens[0, 1:, None])[:, 0].numpy()])
