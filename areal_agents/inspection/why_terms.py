"""The terms on the path from rewards to the loss of a token: name, formula, value, a sentence, and a page.

Each formula is the one of docs/algorithms.md or docs/credit.md that the term names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from areal_agents.algorithms.config import AlgorithmConfig
    from areal_agents.core.completion import Completion
    from areal_agents.core.trajectory import Turn
    from areal_agents.training.records.files import TurnRecord
    from areal_agents.training.records.recompute import StepCredit

Term = dict[str, Any]

_CREDIT = "docs/credit.md#formulas"
_PARTS = "docs/algorithms.md#parts"
_TERMS = "docs/algorithms.md#terms"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run that decide what a token is credited with; `max_staleness` None: no bound."""

    algorithm: AlgorithmConfig
    max_staleness: int | None
    on_stale: str


def credit_terms(credit: StepCredit, settings: Settings, episode_id: str) -> list[Term]:
    """The score of an episode and those of its group."""
    rewards, algorithm = credit.data.rewards[episode_id], settings.algorithm
    shaped = algorithm.rewards
    is_shaped = shaped != type(shaped)()
    terms = [
        _term(
            "score",
            "the sum of all its rewards, each once" + (", shaped by algorithm.rewards" if is_shaped else ""),
            rewards.score,
            f"turns {_number(float(rewards.turns.sum()))} + episode {_number(rewards.episode)}",
            _CREDIT,
            turns=rewards.turns.tolist(),
            episode=rewards.episode,
        )
    ]
    group_id = rewards.group_id
    scores = credit.data.group_scores[group_id]
    members = [member.episode.id for member in credit.groups[group_id].rollouts]
    of_batch = np.concatenate([*credit.data.group_scores.values()])
    estimator = algorithm.estimator
    ddof = 1 if getattr(estimator, "std_estimator", "sample") == "sample" else 0
    statistics = {
        over: {"episodes": len(values), "mean": float(values.mean()), "std": _std(values, ddof)}
        for over, values in (("group", scores), ("batch", of_batch))
    }
    terms.append(
        _term(
            "group",
            f"mean and standard deviation (over n − {ddof}) of the scores",
            statistics["group"]["mean"],
            f"{len(scores)} episodes of one task: {', '.join(map(_number, scores.tolist()))}; "
            f"mean {_number(statistics['group']['mean'])}, std {_number(statistics['group']['std'])}",
            _CREDIT,
            scores=dict(zip(members, scores.tolist(), strict=True)),
            **statistics,
        )
    )
    return terms


def turn_terms(credit: StepCredit, settings: Settings, episode_id: str, place: int) -> list[Term]:
    """The return and the baseline of turn `place` of an episode, as far as the estimator has them."""
    group_id = credit.data.rewards[episode_id].group_id
    comparison = credit.comparisons.get(group_id)
    if comparison is None:
        return []
    algorithm = settings.algorithm
    estimator = algorithm.estimator
    members = [member.episode.id for member in credit.groups[group_id].rollouts]
    member = members.index(episode_id)
    earned, baseline = (float(x[member][place]) for x in (comparison.returns, comparison.baselines))
    kind = estimator.credit.kind  # type: ignore[union-attr]
    before = credit.data.rewards[episode_id].recorded_before[place]
    formula = "score_i" if kind == "episode" else "D_i(k), the rewards of turns recorded after its call began"
    over = estimator.advantage_mean  # type: ignore[union-attr]
    others = ", without this episode" if estimator.leave_one_out else ""  # type: ignore[union-attr]
    quantity = "score_j" if kind == "episode" else f"D_j({before})"
    return [
        _term("return", f"credit: {kind}: {formula}", earned, f"k = {before}", _CREDIT, k=before),
        _term(
            "baseline",
            "no mean is subtracted" if over == "none" else f"mean over the {over}{others} of {quantity}",
            baseline,
            "what an episode of this task earns on average",
            _CREDIT,
        ),
        _term(
            "scale",
            "1" if estimator.advantage_std == "none"  # type: ignore[union-attr]
            else f"1/(std of the scores of the {estimator.advantage_std} + 1e-5)",  # type: ignore[union-attr]
            comparison.scale,
            "0 if all these scores are equal",
            _PARTS,
        ),
    ]  # fmt: skip


def token_terms(
    record: TurnRecord | None,
    settings: Settings,
    turn: Turn,
    token: int | None,
    *,
    recomputed: np.ndarray | None,
) -> list[Term]:
    """What the step recorded of a token; without one, means over a turn's trained tokens, and sums."""
    algorithm = settings.algorithm
    own = None if record is None or record.untrained is not None else record
    terms = [_advantage_term(own, algorithm, token, recomputed)]
    if own is None:
        return terms
    values = own.values
    trained = [state == "trained" for state in own.states]
    if token is not None:
        state = own.states[token] or "recorded by no rank"
        formula = "trained, stale, rejected or dropped"
        terms.insert(0, _term("state", formula, state, _STATES.get(state, ""), _TERMS))

    def value(name: str) -> float | None:
        return _of(values[name], token, trained)

    terms.append(_behavior_term(turn.completion, token, trained, own.version))
    for name, title, text in (
        ("proximal", "proximal logprob", "log π_prox, under the weights when the batch began"),
        ("current", "current logprob", f"log π_θ, in the pass of minibatch {own.minibatch}"),
        ("reference", "reference logprob", "log π_ref, under the frozen reference policy"),
        ("value", "value", "V, the critic's estimate of the return before the token"),
    ):
        if (known := value(name)) is not None:
            terms.append(_term(title, text, known, "", _TERMS if name != "value" else _PARTS))
    if (weight := value("weight")) is not None:
        terms.append(_weight_term(weight, settings))
    if (ratio := value("ratio")) is not None:
        terms.append(_ratio_term(ratio, algorithm))
    terms.append(_clip_term(own, algorithm, token))
    coefficient, loss = value("loss_weight"), values["loss"]
    share = float(np.nansum(loss)) if token is None else _of(loss, token, trained)
    terms.append(
        _term(
            "loss weight", f"c, loss_normalization: {algorithm.loss_normalization.kind}", coefficient,
            "the coefficients of a minibatch do not depend on how it was cut", _PARTS,
        )
    )  # fmt: skip
    terms.append(
        _term("loss share", f"c · (w · ℓ{_added(algorithm)})", share, f"ℓ = {_loss(algorithm)}", _PARTS)
    )
    slope = _gradient(own, algorithm, token)
    if slope is not None:
        direction = "more likely" if slope > 0 else "less likely" if slope < 0 else "as likely as before"
        what = "this token" if token is not None else "the tokens of this turn, on balance,"
        terms.append(
            _term(
                "gradient", "−∂(c · w · ℓ)/∂ log π_θ" + ("" if token is not None else ", summed"), slope,
                f"it makes {what} {direction}", _PARTS,
            )
        )  # fmt: skip
    return terms


_STATES = {
    "trained": "it carried a gradient",
    "stale": "it is older than rollout.max_staleness allows, so it carried no gradient",
    "rejected": "the off-policy correction rejected it (weight 0); it stays in the denominator of the loss",
    "dropped": "the trust region left it out, and it stays in the denominator of the loss",
}


def _advantage_term(
    record: TurnRecord | None, algorithm: AlgorithmConfig, token: int | None, recomputed: np.ndarray | None
) -> Term:
    own = None if record is None else record.values["advantage"]
    used = None if own is None else _of(own, token, None)
    again = None if recomputed is None else _of(recomputed, token, None)
    agrees = None
    if own is not None and recomputed is not None:
        a, b = (own, recomputed) if token is None else (own[token : token + 1], recomputed[token : token + 1])
        agrees = bool(np.allclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True))
    said = {
        True: "computed again from the store: the same",
        False: f"DIFFERS from {_number(again)}, computed again from the store and config.yaml",
        None: "computed again from the store" if own is None else "as the step recorded it",
    }[agrees]
    return _term(
        "advantage", _advantage_formula(algorithm), used if own is not None else again, said,
        _PARTS, recorded=used, recomputed=again, agrees=agrees,
    )  # fmt: skip


def _advantage_formula(algorithm: AlgorithmConfig) -> str:
    estimator = algorithm.estimator
    match estimator.kind:
        case "group":
            kind = estimator.credit.kind
            if kind == "step_normalized":
                return "Σ of the normalised rewards of the steps that end at this turn or later"
            if kind == "turn_groups":
                return "A^E + ω · A^S, of its episode and among turns in the same situation"
            if algorithm.needs_token_credit:
                return "(return − penalties to go − baseline) · scale"
            return "(return − baseline) · scale"
        case "maxrl":
            return "(score − mean)/mean over the group"
        case "gdpo":
            return "Σ over reward names of w (r − mean)/(std + 1e-5), normalised over the batch"
        case "gae":
            return "GAE: δ_i + γλ A_{i+1} with δ_i = r_i + γ V_{i+1} − V_i, normalised"
    return {"sft": "1 for each token that SFT learns", "dpo": "± β σ(−margin)/pairs of DPO"}.get(
        algorithm.policy_loss.kind, "1: distillation uses no advantage"
    )


def _weight_term(weight: float, settings: Settings) -> Term:
    correction = settings.algorithm.correction
    level = correction.correction_level  # type: ignore[union-attr]
    unit = {"token": "the token", "turn": "its turn", "turn_geometric": "its turn (geometric mean)"}.get(
        level, "its sequence" + (" (geometric mean)" if level == "geometric" else "")
    )
    bound = f"at most {correction.weight_cap:g}"  # type: ignore[union-attr]
    if correction.kind == "mask":
        bound = f"0 outside {correction.weight_floor:g} to {correction.weight_cap:g}"
    return _term(
        "correction", f"w = π_prox/μ of {unit}, {bound}", weight, "corrects for the age of the token", _TERMS
    )


def _ratio_term(ratio: float, algorithm: AlgorithmConfig) -> Term:
    level = algorithm.policy_loss.ratio_level
    of = "" if level == "token" else f", the geometric mean over its {level}"
    note = "1: the weights had not moved since the batch began" if ratio == 1 else ""
    return _term("ratio", f"u = π_θ/π_prox{of}", ratio, note, _TERMS)


def _clip_term(record: TurnRecord, algorithm: AlgorithmConfig, token: int | None) -> Term:
    loss = algorithm.policy_loss
    low, high = getattr(loss, "clip_low", None), getattr(loss, "clip_high", None)
    formula = f"policy_loss: {loss.kind} has no clip"
    if low is not None and high is not None:
        formula = f"u is clipped to {1 - low:g} … {1 + high:g}"
    elif loss.kind == "dppo":
        formula = "masked where the policy has moved too far"
    if token is not None:
        bound = record.clipped[token]
        return _term("clip", formula, bound, _CLIPPED.get(bound or "", ""), _PARTS)
    count = sum(bound not in (None, "no") for bound in record.clipped)
    return _term("clip", formula, count, f"of {record.tokens} tokens", _PARTS)


_CLIPPED = {
    "no": "no bound took effect",
    "low": "the lower bound took effect",
    "high": "the upper bound took effect",
    "dual": "the dual clip bounded the loss",
}


def _loss(algorithm: AlgorithmConfig) -> str:
    match algorithm.policy_loss.kind:
        case "ppo" | "gspo":
            return "−min(u A, clip(u) A)"
        case "cispo":
            return "−sg(clip(u)) A log π_θ"
        case "sapo":
            return "−(4/τ) σ(τ(u − 1)) A"
        case "dppo":
            return "−M u A"
        case "unclipped":
            return "−u A"
        case "distillation":
            return "KL(π_θ, teacher) at this position"
    return "−A log π_θ"


def _added(algorithm: AlgorithmConfig) -> str:
    """The terms of the loss that w does not multiply."""
    added = ""
    if algorithm.policy_loss.kind == "dppo" and algorithm.policy_loss.dppo_kl_coefficient:
        added += f" + {algorithm.policy_loss.dppo_kl_coefficient:g} (log π_θ − log μ)²"
    if algorithm.kl_in.kind == "loss":
        added += f" + {algorithm.kl_in.kl_coefficient:g} KL"
    if algorithm.entropy_coefficient:
        added += f" − {algorithm.entropy_coefficient:g} H"
    return added


def _gradient(record: TurnRecord, algorithm: AlgorithmConfig, token: int | None) -> float | None:
    """−∂(c · w · ℓ)/∂ log π_θ of a token, or its sum over a turn; None for a loss without such a factor."""
    loss, values = algorithm.policy_loss, record.values
    states = np.array([state == "trained" for state in record.states])
    acts = states & np.isin(np.array([bound or "no" for bound in record.clipped]), ["no"])
    weight = np.nan_to_num(values["weight"], nan=1.0)
    factor = values["loss_weight"] * weight * values["advantage"]
    ratio = values["ratio"]
    match loss.kind:
        case "ppo" | "gspo" | "dppo" | "unclipped":
            slope = np.where(acts, factor * ratio, 0.0)
        case "cispo":
            slope = np.where(states, factor * np.clip(ratio, 1 - loss.clip_low, 1 + loss.clip_high), 0.0)
        case "sapo":
            tau = np.where(values["advantage"] > 0, loss.sapo_tau_positive, loss.sapo_tau_negative)
            gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
            slope = np.where(states, 4 * gate * (1 - gate) * factor * ratio, 0.0)
        case "sft" | "dpo":
            slope = np.where(states, factor, 0.0)
        case _:
            return None
    found = float(np.nansum(slope)) if token is None else float(slope[token])
    return found if math.isfinite(found) else None


def _behavior_term(
    completion: Completion, token: int | None, trained: Sequence[bool], trainer_version: int
) -> Term:
    """The logprob under the policy that sampled the tokens, which imported ones do not have."""
    if completion.logprobs is None:
        return _term("behavior logprob", "imported: no policy sampled it", None, "", _TERMS)
    versions = completion.versions
    sampled_by = int(versions[token]) if token is not None else _range(versions.tolist())
    return _term(
        "behavior logprob", "log μ, under the policy that sampled it",
        _of(completion.logprobs, token, trained),
        f"version {sampled_by}; the trainer was at version {trainer_version}", _TERMS, versions=sampled_by,
    )  # fmt: skip


def _of(values: np.ndarray, token: int | None, trained: Sequence[bool] | None) -> float | None:
    """The value of a token, or the mean over the trained tokens that have one."""
    if token is not None:
        found = float(values[token])
    else:
        chosen = values if trained is None else values[np.array(trained, bool)]
        known = chosen[~np.isnan(chosen)]
        found = float(known.mean(dtype=np.float64)) if len(known) else math.nan
    return found if math.isfinite(found) else None


def _range(versions: Sequence[int]) -> str:
    return f"{min(versions)}" if min(versions) == max(versions) else f"{min(versions)}–{max(versions)}"


def _std(values: np.ndarray, ddof: int) -> float | None:
    return float(values.std(ddof=ddof)) if len(values) > ddof else None


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _term(name: str, formula: str, value: Any, text: str, doc: str, **more: Any) -> Term:
    return {"name": name, "formula": formula, "value": value, "text": text, "doc": doc, **more}
