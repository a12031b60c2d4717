"""Compares the curve of a run with those of reference runs, which are in a file or in run folders.

The curve of a run is its held-out reward. A run on users' conversations (`data.traffic`) has no held-out
tasks; its curve is the reward of these conversations, in the order in which they began.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from areal_agents.errors import ConfigError
from areal_agents.evaluation.estimators import t_quantile
from areal_agents.inspection.sources import config_of_run, store_of_run
from areal_agents.launch.progress import MetricsFile, read_held_out
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.summary import comparable, complete_evaluations, step_of_label
from areal_agents.store.rows import SCORED
from areal_agents.version import __version__
from areal_agents.whole_files import write_whole

CONFIDENCE = 0.95
SMOOTHED = 5  # steps whose training rewards are averaged
RATED = 100  # conversations of users whose rewards are averaged
HELD_OUT, OF_USERS = "held-out reward", f"reward of each {RATED} conversations of users"
_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A complete evaluation, or RATED conversations of users.

    Attributes:
        step: the number of steps after which the policy was evaluated; of conversations, the number of the
            last one that was rated.
        reward: the mean score.
        episodes: how many episodes it is the mean of.
    """

    step: int
    reward: float
    episodes: int


@dataclass(frozen=True, slots=True)
class Curve:
    """What a run has learned.

    Attributes:
        name: the name of the run.
        seed: its seed.
        rewards: the mean reward of each step's batch, from step 1.
        measured: what `points` are: HELD_OUT or OF_USERS.
        points: the complete evaluations, by step; of users' conversations, the mean of each RATED ones that
            have a reward.
        wall_s: seconds of its steps.
    """

    name: str
    seed: int
    rewards: tuple[float, ...]
    measured: str
    points: tuple[Evaluated, ...]
    wall_s: float


@dataclass(frozen=True, slots=True)
class Point:
    """The run beside the references at one evaluation.

    Attributes:
        reference: the mean of the references.
        low, high: where a further run of their kind is expected with 95% confidence.
    """

    step: int
    reward: float
    reference: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Whether the run is below, within or above the interval."""
        return "below" if self.reward < self.low else "above" if self.reward > self.high else "within"


def curve_of(root: Path) -> Curve:
    """Return the curve of a run. Raises ConfigError if the folder is not that of a run."""
    folder = RunFolder(root)
    config = config_of_run(folder)
    metrics = MetricsFile(folder.metrics)
    metrics.update()
    rows = metrics.rows
    users = bool(config.get("data", {}).get("traffic"))
    return Curve(
        name=root.resolve().name,
        seed=int(config.get("seed", 0)),
        rewards=tuple(row["reward_mean"] for row in rows),
        measured=OF_USERS if users else HELD_OUT,
        points=_of_users(folder) if users else _held_out(folder, rows),
        wall_s=round(sum(row["step_s"] for row in rows), 1),
    )


def _held_out(folder: RunFolder, rows: Sequence[Mapping[str, Any]]) -> tuple[Evaluated, ...]:
    last = rows[-1]["step"] if rows else 0
    with store_of_run(folder) as store:
        evaluations = complete_evaluations([e for e in read_held_out(store) if "without" not in e.label])
    # Only rewards of one agent are a curve: those of the newest, if it was changed on the way.
    evaluations = [e for e in evaluations if comparable(e, evaluations[-1])]
    points = [Evaluated(step_of_label(e.label, last), e.reward, e.done) for e in evaluations]
    return tuple(sorted(points, key=lambda point: point.step))


def _of_users(folder: RunFolder) -> tuple[Evaluated, ...]:
    with store_of_run(folder) as store:
        episodes = store.episodes(split="train")
    scores = [e.score for e in episodes if e.status in SCORED and e.score is not None]
    ends = range(RATED, len(scores) + 1, RATED)
    return tuple(Evaluated(end, fmean(scores[end - RATED : end]), RATED) for end in ends)


def curves_in(place: Path) -> list[Curve]:
    """Return the curves of a reference file, or that of a run folder. Raises ConfigError if it is neither."""
    if place.is_dir():
        return [curve_of(place)]
    try:
        tree = json.loads(place.read_text())
        if tree["format"] != _FORMAT:
            raise ConfigError(
                f"{place} has the format {tree['format']}, and this release reads {_FORMAT}; make it again "
                "with areal-agents reference"
            )
        return [_curve(found) for found in tree["runs"]]
    except FileNotFoundError:
        raise ConfigError(f"there is no {place}; give a reference file or the folder of a run") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{place} is not a reference file, which areal-agents reference writes: {type(error).__name__}: "
            f"{error}"
        ) from None


def write_reference(path: Path, runs: Sequence[Path], *, note: str = "") -> list[Curve]:
    """Write the curves of runs to a reference file.

    Args:
        note: how the runs were made: the command, the machine.

    Raises:
        ConfigError: a folder is not that of a run, or a run has no complete evaluation, or fewer than
            RATED rated conversations of users.
    """
    curves = [curve_of(run) for run in runs]
    for run, curve in zip(runs, curves, strict=True):
        if not curve.points:
            lacks = (
                f"fewer than {RATED} rated conversations, so it cannot be a reference; let it go on"
                if curve.measured == OF_USERS
                else "no complete evaluation, so it cannot be a reference; add eval.data"
            )
            raise ConfigError(f"{run} has {lacks}")
    tree = {
        "format": _FORMAT,
        "version": __version__,
        "date": time.strftime("%Y-%m-%d"),
        "note": note,
        "runs": [asdict(curve) for curve in curves],
    }
    write_whole(path, json.dumps(tree, indent=1) + "\n")
    return curves


def compare(run: Curve, references: Sequence[Curve]) -> list[Point]:
    """Compare the points of a run with those of references at the steps that both have.

    The interval is that of a further run, given k reference runs with mean m and deviation s:
    m ± t(0.975, k − 1) s √(1 + 1/k). s is at least the deviation of a mean of n scores of 0 or 1,
    √(m (1 − m) / n), which is all that is known if there is one reference; t is then the normal quantile.
    For that deviation m is at least 1 / (n + 2) and at most (n + 1) / (n + 2), which is the estimate by the
    rule of succession where every score was 0 or 1: another run may fail a task.

    Raises ConfigError if one has held-out rewards, and another the rewards of users.
    """
    for reference in references:
        if reference.measured != run.measured:
            raise ConfigError(
                f"nothing was compared: the curve of {run.name} is its {run.measured}, and that of "
                f"{reference.name} its {reference.measured}; compare with the reference of a run of its kind"
            )
    found = []
    for point in run.points:
        same = [other for curve in references for other in curve.points if other.step == point.step]
        if not same:
            continue
        low, high = _interval([other.reward for other in same], min(other.episodes for other in same))
        found.append(Point(point.step, point.reward, fmean(other.reward for other in same), low, high))
    return found


def require_trained_step(run: Curve, references: Sequence[Curve], points: Sequence[Point]) -> None:
    """Raise ConfigError if no evaluation of a trained policy is compared: step 0 is before training."""
    if any(point.step > 0 for point in points):
        return
    steps = sorted({point.step for curve in references for point in curve.points if point.step > 0})
    if not steps:
        raise ConfigError(
            "nothing was compared: the reference has no evaluation after step 0, which is before training; "
            "add eval.data and eval.every to it"
        )
    ours = sorted(point.step for point in run.points)
    found = f"at the steps {', '.join(map(str, ours))}" if ours else "not at all"
    only = " (step 0 is before training, so it says nothing about what was learned)" if points else ""
    raise ConfigError(
        f"nothing was compared: the run was evaluated {found}, and the reference at "
        f"{', '.join(map(str, steps))}{only}; evaluate at one of these steps with eval.every and "
        "trainer.steps, or compare with a reference that was evaluated at those of the run"
    )


def _interval(values: Sequence[float], episodes: int) -> tuple[float, float]:
    count, mean = len(values), fmean(values)
    share = min((episodes + 1) / (episodes + 2), max(1 / (episodes + 2), mean))
    sampling = math.sqrt(share * (1.0 - share) / episodes)
    spread = max(stdev(values), sampling) if count > 1 else sampling
    quantile = t_quantile(0.5 + CONFIDENCE / 2, count - 1) if count > 1 else 1.96
    half = quantile * spread * math.sqrt(1 + 1 / count)
    return mean - half, mean + half


def rewards_at(curve: Curve, shares: Sequence[float]) -> list[float | None]:
    """Return the smoothed training reward after these shares of the run's steps; None without steps."""
    if not curve.rewards:
        return [None for _ in shares]
    ends = [max(1, round(share * len(curve.rewards))) for share in shares]
    return [fmean(curve.rewards[max(0, end - SMOOTHED) : end]) for end in ends]


def _curve(tree: Mapping[str, Any]) -> Curve:
    points = tuple(Evaluated(**point) for point in tree["points"])
    curve = Curve(**{**tree, "rewards": tuple(tree["rewards"]), "points": points})
    for reward in (*curve.rewards, *(point.reward for point in points)):
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ValueError(f"a reward must be a finite number, got {reward!r:.100}")
    for point in points:
        if type(point.step) is not int or type(point.episodes) is not int or point.episodes < 1:
            raise ValueError(f"step and episodes must be integers, and episodes at least 1, got {point}")
    return curve
