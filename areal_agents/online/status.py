"""The state of a run that trains on its traffic: the versions served, the comparison, and past verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from areal_agents.config import Config, load_config
from areal_agents.errors import ConfigError
from areal_agents.launch.canary_rules import canary_rules
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store import Store, VersionRow
from areal_agents.training.canary.judging import CanaryRules, Judgement, judge


@dataclass(frozen=True, slots=True)
class OnlineStatus:
    """What is served and known now.

    Attributes:
        stable: the version of all engines, or of those beside the canary; None before the first.
        candidate, judgement: the version that is compared, and what is known of it; None without one.
        decided: the versions that were candidates, oldest first.
        groups: how many conversations are in each state, see `Store.group_counts`.
    """

    stable: VersionRow | None
    candidate: VersionRow | None
    judgement: Judgement | None
    decided: tuple[VersionRow, ...]
    groups: dict[str, int]
    is_frozen: bool

    def as_dict(self, rules: CanaryRules | None) -> dict[str, Any]:
        """Return it in a form for JSON."""
        facts = None if self.judgement is None or rules is None else self.judgement.facts(rules)
        return {
            "stable": None if self.stable is None else asdict(self.stable),
            "candidate": None if self.candidate is None else asdict(self.candidate),
            "comparison": facts,
            "decided": [asdict(row) for row in self.decided],
            "conversations": self.groups,
            "frozen": self.is_frozen,
        }

    def lines(self, rules: CanaryRules | None) -> Iterator[str]:
        """Return it in lines for people."""
        if self.stable is None:
            yield "no version is served yet: the trainer has not started"
            return
        yield f"stable: version {self.stable.version}, since {_time(self.stable.published_at)}"
        if self.candidate is None:
            yield "candidate: none" + ("" if rules is None else ", the next one is being trained")
        elif self.judgement is not None and rules is not None:
            seen = self.judgement.comparison
            yield (
                f"candidate: version {self.candidate.version}, for {rules.share:.0%} of the conversations, "
                f"since {_time(self.candidate.published_at)}"
            )
            yield (
                f"  mean score {_mean(seen.candidate_mean)} of {seen.candidate} conversations; stable: "
                f"{_mean(seen.stable_mean)} of {seen.stable}"
            )
            yield (
                f"  difference from {seen.least:.3f} to {seen.most:.3f} (error rate {rules.alpha:g}): "
                f"{self.judgement.reason}"
            )
        for row in self.decided:
            verdict = row.verdict or {}
            yield f"version {row.version} was {_WORDS[str(row.canary)]}: {verdict.get('reason', '')}"
        counts = ", ".join(f"{count} {state}" for state, count in self.groups.items() if count)
        yield f"conversations: {counts or 'none'}"
        if self.is_frozen:
            yield "frozen: nothing is trained, published or decided"


_WORDS = {"promoted": "promoted", "rolled_back": "rolled back"}


def read_status(store: Store, rules: CanaryRules | None) -> OnlineStatus:
    """Return the state of a run."""
    served = store.served_versions()
    candidate = None if served is None else served.candidate
    return OnlineStatus(
        stable=None if served is None else served.stable,
        candidate=candidate,
        judgement=None if candidate is None or rules is None else judge(store, candidate, rules),
        decided=tuple(row for row in store.published_versions() if row.canary in _WORDS),
        groups=store.group_counts(),
        is_frozen=store.is_frozen(),
    )


def rules_of(folder: RunFolder) -> tuple[Config, CanaryRules | None]:
    """Return the configuration of a run, and the rules of its canary.

    Raises ConfigError if the run does not train on its traffic.
    """
    if not folder.config.exists():
        raise ConfigError(f"{folder.root} is not a run folder: it has no config.yaml")
    config = load_config(folder.config)
    if not config.data.traffic:
        raise ConfigError(f"{folder.root} does not train on its traffic (data.traffic)")
    return config, canary_rules(config.rollout.canary)


def _mean(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.3f}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
