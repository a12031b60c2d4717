"""Why a token was trained as it was: the path from the rewards of its episode to its share of the loss.

Rewards, scores, returns and advantages are computed again from the store, with the functions that the trainer
used and the settings of the run, and compared with what the step recorded. Logprobs, ratios, weights, clips
and shares of the loss are those that the step recorded; nothing is estimated.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_agents.core.completion import NO_VERSION, Completion
from areal_agents.errors import ArealAgentsError, ConfigError
from areal_agents.inspection.sources import config_of_run, store_of_run
from areal_agents.inspection.why_terms import Settings, credit_terms, token_terms, turn_terms
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store import EpisodeRow, GroupHistory, Store

if TYPE_CHECKING:
    from areal_agents.core.rollout import RecordedEpisode, RolloutGroup
    from areal_agents.core.trajectory import Turn
    from areal_agents.training.batches.recorded import RecordedGroups
    from areal_agents.training.batches.stored_steps import StoredSteps
    from areal_agents.training.records.files import TurnRecord
    from areal_agents.training.records.recompute import StepCredit

# Why a turn of a batch has no trained token; the keys are those of `algorithms.samples.Untrained`.
UNTRAINED: Mapping[str, str] = {
    "truncated": "its episode was truncated, and algorithm.truncated is mask",
    "constrained": "it was sampled under a grammar or with a lifted pin (algorithm.train_constrained)",
    "discarded": "its reply never reached the agent, was superseded by a retry, or was imported as context",
    "aborted": "its call was aborted",
    "label": "algorithm.exclude_labels names its label",
    "greedy": "it was sampled at temperature 0, so it has no sampling distribution",
    "empty": "nothing was sampled",
    "equal": "all scores or advantages of its group are equal (algorithm.drop_equal_groups)",
    "not chosen": "the algorithm does not learn from its episode, which is not the best of its "
    "group, or is in no pair",
    "stale": "its tokens are older than rollout.max_staleness allows",
}
_DIFFERENCE = 1e-5  # relative and absolute: rounding of float32, and of sums in another order


@dataclass(frozen=True, slots=True, eq=False)
class _Use:
    """One step that the episode's group was part of; without a `credit`, `fault` says why."""

    step: int
    use: int
    version: int | None
    records: Mapping[str, TurnRecord]
    credit: StepCredit | None
    fault: str | None


def trained_turns(run: Path, turn_ids: Collection[str]) -> dict[str, list[TurnRecord]]:
    """Return what the steps of a run recorded of turns, by turn id in the order of the steps.

    Raises:
        ConfigError: a file cannot be read, or pyarrow is not installed.
    """
    from areal_agents.training.records.files import read_records

    found: dict[str, list[TurnRecord]] = {turn_id: [] for turn_id in turn_ids}
    for record in read_records(run, turn_ids=turn_ids):
        found[record.turn_id].append(record)
    return found


def why(
    run: Path, episode_id: str, turn: str | int | None = None, token: int | None = None
) -> dict[str, Any]:
    """Return the path of an episode's, a turn's or a token's gradient as plain data.

    Args:
        run: the folder of a run.
        turn: the id of a turn, or its number in the episode, from 1.
        token: the index of a sampled token in the turn, from 0.

    Returns:
        The keys `episode`, `rewards`, `group` (None without one), `verdict` (a sentence: why it was trained,
        or why not), `algorithm`, and `steps`, one entry for each step that the episode's group was part of:
        `step`, `version`, `use`, `recorded`, `fault`, `credit` (terms of the episode), and `turns`. With a
        `turn` the key `turn` has its tokens, and each step `path`: the terms of the turn or of the token. A
        term has `name`, `formula`, `value`, `text` and `doc`.

    Raises:
        ConfigError: this is not the folder of a run, or there is no such turn or token.
        NotFound: there is no such episode.
    """
    with ExitStack() as opened:
        place = _Place.open(run, opened)
        row = place.store.episode_row(episode_id)
        episode = place.with_rewards(place.store.load_episode(episode_id))
        chosen = None if turn is None else _chosen(episode, turn)
        if token is not None and chosen is None:
            raise ConfigError("a token is an index into a turn; give the turn too")
        if chosen is not None and token is not None and not 0 <= token < len(chosen.completion):
            raise ConfigError(
                f"turn {chosen.id} has {len(chosen.completion)} sampled tokens; expected an index from 0 to "
                f"{len(chosen.completion) - 1}, got {token}"
            )
        history = None
        if row.group_id is not None:
            history = place.store.group_history(row.group_id)
        uses = _uses(place, row, episode, history)
        return {
            "run": str(run),
            "episode": {
                "id": row.id, "task": row.task_id, "split": row.split, "status": row.status,
                "error": row.error, "group": row.group_id, "index": row.index, "score": episode.score,
            },
            "rewards": [asdict(reward) for reward in episode.rewards],
            "group": _group(place, history),
            "verdict": _verdict(row, episode, history, uses, place),
            "algorithm": _algorithm(place.settings),
            "turn": None if chosen is None else _turn(place, episode, chosen, token),
            "steps": [_step(use, place.settings, episode, chosen, token) for use in uses],
        }  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A run and the store that has its episodes; `recorded` if that is the store of `data.episodes`, and
    `again` if the run is a rerun."""

    run: Path
    tree: Mapping[str, Any]
    store: Store
    settings: Settings
    recorded: RecordedGroups | None = None
    again: StoredSteps | None = None

    @classmethod
    def open(cls, run: Path, opened: ExitStack) -> _Place:
        from areal_agents.algorithms.config import AlgorithmConfig
        from areal_agents.rollout.config import RolloutConfig

        folder = RunFolder(run)
        tree = config_of_run(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run has given its warnings
            algorithm = AlgorithmConfig.model_validate(tree.get("algorithm", {}))
            rollout = RolloutConfig.model_validate(tree.get("rollout", {}))
        settings = Settings(algorithm, rollout.max_staleness, rollout.on_stale)
        if folder.rerun.exists():
            return cls._of_rerun(folder, tree, settings, opened)
        data = tree.get("data") or {}
        if not data.get("episodes"):
            return cls(run, tree, opened.enter_context(store_of_run(folder)), settings)
        from areal_agents.training.batches.recorded import RecordedGroups, recorded_store

        store = opened.enter_context(Store.open(recorded_store(data["episodes"])))
        recorded = RecordedGroups.read(
            store, seed=0, split="eval" if data.get("split") == "eval" else "train"
        )
        return cls(run, tree, store, settings, recorded)

    @classmethod
    def _of_rerun(
        cls, folder: RunFolder, tree: Mapping[str, Any], settings: Settings, opened: ExitStack
    ) -> _Place:
        from areal_agents.rerun.record import RerunRecord, rewards_in
        from areal_agents.store.read_only import ReadOnlyStore
        from areal_agents.training.batches.stored_steps import StoredSteps

        record = RerunRecord.read(folder)
        read_only = opened.enter_context(closing(ReadOnlyStore(record.store)))
        found = StoredSteps.read(
            read_only,
            max_staleness=settings.max_staleness,
            rewards=rewards_in(folder) if record.new_rewards else None,
        )
        own = {step: known for step, known in found.steps.items() if record.step < step <= record.until}
        store = opened.enter_context(Store.open(record.store))
        return cls(folder.root, tree, store, settings, again=replace(found, steps=own))

    def with_rewards(self, episode: RecordedEpisode) -> RecordedEpisode:
        """Return an episode with the rewards that the run was trained on."""
        return episode if self.again is None else self.again.with_rewards(episode)


def _chosen(episode: RecordedEpisode, turn: str | int) -> Turn:
    """Return the turn with this id or number."""
    by_id = {known.id: known for known in episode.turns}
    if isinstance(turn, str) and turn in by_id:
        return by_id[turn]
    if str(turn).isdecimal() and 1 <= int(turn) <= len(episode.turns):
        return episode.turns[int(turn) - 1]
    raise ConfigError(
        f"episode {episode.id} has no turn {turn}; give its id, or its number from 1 to {len(episode.turns)}"
    )


def _uses(
    place: _Place, row: EpisodeRow, episode: RecordedEpisode, history: GroupHistory | None
) -> list[_Use]:
    """The steps that the episode's group was part of, in order."""
    from areal_agents.training.records.files import read_records

    own = [turn.id for turn in episode.turns]
    steps = None
    if place.recorded is None:
        if history is None:
            return []
        steps = {use.step: use for use in history.uses if use.state == "trained"}
        if place.again is not None:
            steps = {step: use for step, use in steps.items() if step in place.again.steps}
    by_step: dict[int, dict[str, TurnRecord]] = {step: {} for step in steps or ()}
    for record in read_records(place.run, turn_ids=own, steps=steps):
        by_step.setdefault(record.step, {})[record.turn_id] = record
    uses = []
    for step, records in sorted(by_step.items()):
        first = next(iter(records.values()), None)
        use = steps[step].use if steps is not None else 0
        version = first.version if first is not None else _version_before(place.store, step)
        try:
            credit, fault = _credit(place, step, version), None
        except ArealAgentsError as error:
            credit, fault = None, f"the advantages cannot be computed again: {error}"
        uses.append(_Use(step, use, version, records, credit, fault))
    return uses


def _version_before(store: Store, step: int) -> int | None:
    """The last version whose weights are those before `step`."""
    return next((v.version for v in reversed(store.published_versions()) if v.step == step - 1), None)


def _credit(place: _Place, step: int, version: int | None) -> StepCredit:
    from areal_agents.training.batches.staleness import Lineage
    from areal_agents.training.records.files import read_records
    from areal_agents.training.records.recompute import recompute

    algorithm = place.settings.algorithm
    records: Sequence[TurnRecord] = ()
    if algorithm.needs_token_credit or algorithm.policy_loss.kind == "dpo" or place.recorded is not None:
        records = read_records(place.run, steps=[step])
    if place.recorded is not None:
        names = {record.group_id for record in records}
        found = place.recorded.load([group for group in place.recorded.groups if group.id in names])
        groups = [_readable(group) for group in found]
        return recompute(groups, records, algorithm, uses={}, version=None, max_staleness=None)
    if place.again is not None:
        known = place.again.steps[step]
        return recompute(
            place.again.groups(known), records, algorithm,
            uses=known.uses, version=known.version, max_staleness=place.settings.max_staleness,
        )  # fmt: skip
    uses = place.store.groups_of_step(step)
    groups = place.store.load_groups([*uses])
    if version is not None:
        lineage = Lineage.of(place.store, version)
        groups = [lineage.of_group(group) for group in groups]
    return recompute(
        groups, records, algorithm, uses=uses, version=version, max_staleness=place.settings.max_staleness
    )


def _readable(group: Any) -> RolloutGroup:
    from areal_agents.training.batches.checks import Refused

    if isinstance(group, Refused):
        raise ConfigError(group.reason)
    return group


def _group(place: _Place, history: GroupHistory | None) -> dict[str, Any] | None:
    """The group, with the given scores of its finished episodes."""
    if history is None:
        return None
    (group,) = place.store.load_groups([history.id]) if history.scored else (None,)
    members = () if group is None else group.rollouts
    return {
        **{key: value for key, value in asdict(history).items() if key != "uses"},
        "uses": [asdict(use) for use in history.uses],
        "scores": [
            {
                "episode": member.episode.id,
                "index": member.index,
                "score": place.with_rewards(member.episode).score,
            }
            for member in members
        ],
    }


def _verdict(
    row: EpisodeRow,
    episode: RecordedEpisode,
    history: GroupHistory | None,
    uses: Sequence[_Use],
    place: _Place,
) -> str:
    """Say in a sentence what became of an episode."""
    if any(_is_trained(use, episode) for use in uses):
        steps = [use.step for use in uses if _is_trained(use, episode)]
        named = "step" if len(steps) == 1 else "steps"
        return f"trained in {named} {', '.join(map(str, steps))}"
    if uses:
        reasons = list(dict.fromkeys(_untrained_reason(use, turn) for use in uses for turn in episode.turns))
        which = ", ".join(str(use.step) for use in uses)
        known = "; ".join(UNTRAINED.get(reason, reason) for reason in reasons if reason)
        return f"its group was part of step {which}, but no token was trained: {known or 'it has no turn'}"
    if place.recorded is not None or place.again is not None:
        return "no step of this run was trained on it, or its records were removed (trainer.record_tokens)"
    if row.split == "eval":
        return "it is a held-out evaluation, which is never trained on"
    if row.status == "open":
        return "it is still running"
    if row.status in ("failed", "aborted"):
        what = "failed" if row.status == "failed" else "was aborted"
        return (
            f"it {what} ({row.error or 'no reason was given'}). That is not the policy's doing, so it is "
            "outside the baseline and never trained on"
        )
    if history is None:
        return "it belongs to no group, and only a run with data.episodes trains on such episodes"
    if history.state == "pending":
        scored = f"{history.scored} of {history.size} episodes"
        return f"its group is not complete: {scored} are finished and rewarded"
    if history.state == "complete":
        return "its group is complete and waits for the trainer, which takes the oldest groups first"
    last = history.uses[-1] if history.uses else None
    if history.state == "leased" and last is not None:
        return f"its group is being trained on in step {last.step}"
    reason = last.reason if last is not None and last.reason else history.reason
    at = f" in step {last.step}" if last is not None else ""
    return f"its group was dropped{at}: {reason or 'no reason was recorded'}"


def _is_trained(use: _Use, episode: RecordedEpisode) -> bool:
    if use.records:
        return any(record.untrained is None for record in use.records.values())
    return use.credit is None or any(turn.id in use.credit.advantages for turn in episode.turns)


def _untrained_reason(use: _Use, turn: Turn) -> str | None:
    """Why no token of a turn was trained in a step, None if one was or it is not known."""
    record = use.records.get(turn.id)
    if record is not None:
        return record.untrained
    if use.credit is None or turn.id in use.credit.advantages:
        return None
    known = (known for turns in use.credit.data.turns.values() for known in turns if known.id == turn.id)
    found = next(known, None)
    return None if found is None else found.untrained or "stale"


def _algorithm(settings: Settings) -> dict[str, Any]:
    algorithm = settings.algorithm
    return {
        "preset": algorithm.preset,
        "estimator": algorithm.estimator.kind,
        "policy_loss": algorithm.policy_loss.kind,
        "correction": algorithm.correction.kind,
        "max_staleness": settings.max_staleness,
    }


def _turn(place: _Place, episode: RecordedEpisode, turn: Turn, token: int | None) -> dict[str, Any]:
    """A turn and its tokens, as they were sampled."""
    completion = turn.completion
    texts = _texts(place, completion.token_ids.tolist())
    return {
        "id": turn.id,
        "number": [known.id for known in episode.turns].index(turn.id) + 1,
        "label": turn.label,
        "token": token,
        "token_ids": completion.token_ids.tolist(),
        "texts": texts,
        "logprobs": _logprobs(completion),
        "versions": [None if version == NO_VERSION else version for version in completion.versions.tolist()],
        "temperature": turn.sampling.temperature,
    }


def _logprobs(completion: Completion) -> list[float] | list[None]:
    """The behavior logprobs; None for each imported token."""
    if completion.logprobs is None:
        return [None] * len(completion)
    return [float(value) for value in completion.logprobs]


def _texts(place: _Place, token_ids: Sequence[int]) -> list[str] | None:
    """The text of each token; None if the run's model has no tokenizer here."""
    from areal_agents.rendering.tokenization.tokenizer import Tokenizer

    model = Path(str(place.tree.get("model") or ""))
    if not (model / "tokenizer.json").is_file():
        return None
    tokenizer = Tokenizer.from_folder(model)
    return [tokenizer.decode([token_id]) for token_id in token_ids]


def _step(
    use: _Use, settings: Settings, episode: RecordedEpisode, chosen: Turn | None, token: int | None
) -> dict[str, Any]:
    turns = [_turn_in_step(use, number, turn) for number, turn in enumerate(episode.turns, start=1)]
    credit = use.credit
    if credit is not None and episode.id not in credit.data.rewards:
        credit = None
    shown: dict[str, Any] = {
        "step": use.step,
        "version": use.version,
        "use": use.use,
        "recorded": bool(use.records),
        "fault": use.fault,
        "credit": [] if credit is None else credit_terms(credit, settings, episode.id),
        "turns": turns,
    }
    if chosen is None:
        return shown
    place = [turn.id for turn in episode.turns].index(chosen.id)
    record = use.records.get(chosen.id)
    path = [*shown["credit"]]
    if credit is not None:
        path += turn_terms(credit, settings, episode.id, place)
    path += token_terms(record, settings, chosen, token, recomputed=_advantage(use, chosen))
    return {**shown, "path": path, "tokens": None if record is None else record.as_dict()}


def _turn_in_step(use: _Use, number: int, turn: Turn) -> dict[str, Any]:
    """A row of the table of a step's turns."""
    record = use.records.get(turn.id)
    reason = _untrained_reason(use, turn)
    row: dict[str, Any] = {
        "number": number,
        "id": turn.id,
        "label": turn.label,
        "tokens": len(turn.completion),
        "untrained": reason,
        "reason": None if reason is None else UNTRAINED.get(reason, reason),
        "advantage": compared(record, _advantage(use, turn)),
    }
    if record is not None and record.untrained is None:
        states = record.states
        row["states"] = {state: states.count(state) for state in sorted({s for s in states if s})}
        row["clipped"] = sum(bound not in (None, "no") for bound in record.clipped)
        row["loss"] = float(np.nansum(record.values["loss"]))
    return row


def _advantage(use: _Use, turn: Turn) -> np.ndarray | None:
    """The advantages of a turn's tokens [C] that were computed again; None if they cannot be."""
    if use.credit is None:
        return None
    return use.credit.advantages.get(turn.id)


def compared(record: TurnRecord | None, recomputed: np.ndarray | None) -> dict[str, Any]:
    """The mean advantage of a turn's trained tokens as recorded and as computed again, and whether all agree.

    `agrees` is None where one of the two is not known.
    """
    own = None if record is None or record.untrained is not None else record.values["advantage"]
    agrees = None
    if own is not None and recomputed is not None:
        agrees = bool(np.allclose(own, recomputed, rtol=_DIFFERENCE, atol=_DIFFERENCE, equal_nan=True))
    return {
        "recorded": None if own is None else _mean(own),
        "recomputed": None if recomputed is None else _mean(recomputed),
        "agrees": agrees,
    }


def _mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean(dtype=np.float64)) if len(known) else None
