"""How long the sequences of a run may become: what its engines take, and what its rollout allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_agents.config import Config
from areal_agents.inference.config import DEFAULT_MAX_CONTEXT
from areal_agents.model_folder import text_config
from areal_agents.rollout.config import AgentSpec

POSITIONS = "max_position_embeddings of the model"
_LONGEST_CONTEXT = 262_144  # of a model that does not say it


@dataclass(frozen=True, slots=True)
class Longest:
    """The most tokens of a prompt with its completion; `key` is the setting that says so."""

    tokens: int
    key: str

    @property
    def wanted(self) -> int:
        """The tokens that a micro-batch should hold; 0 if only the model bounds a sequence.

        Models take far longer sequences than most runs sample.
        """
        return 0 if self.key == POSITIONS else self.tokens


def engine_context(config: Config, model: Path) -> int:
    """Return the most tokens of a prompt with its completion that the run's engines take.

    Raises:
        ConfigError: config.json is damaged.
    """
    return _engine_bound(config, _positions(model)).tokens


def longest_sequence(config: Config) -> Longest | None:
    """Return the bound on the training samples of a run; None with recorded episodes, which are only read.

    Raises:
        ConfigError: config.json is damaged.
    """
    if config.data.episodes:
        return None
    stages, limit = config.rollout.context_stages, config.rollout.limits.context_tokens
    bounds = [] if limit is None else [Longest(limit, "rollout.limits.context_tokens")]
    if stages and stages[-1].until_step is None:
        bounds.append(Longest(stages[-1].max_tokens, "rollout.context_stages"))
    bounds.append(_engine_bound(config, _positions(Path(config.model))))
    return min(bounds, key=lambda bound: bound.tokens)


def told_of_context(config: Config, agent: AgentSpec) -> AgentSpec:
    """Return the setting of an agent; a command-line agent that is told no context is told the run's.

    Raises:
        ConfigError: config.json is damaged.
    """
    longest = longest_sequence(config)
    if not isinstance(agent, Mapping) or "cli" not in agent or agent.get("context") or longest is None:
        return agent
    return {**agent, "context": longest.tokens}


def _engine_bound(config: Config, positions: int) -> Longest:
    engine, model = config.engine, Longest(positions, POSITIONS)
    if engine.urls or (engine.kind != "embedded" and not engine.max_context):
        return model
    chosen = engine.max_context or DEFAULT_MAX_CONTEXT
    return Longest(chosen, "engine.max_context") if chosen <= positions else model


def _positions(model: Path) -> int:
    return int(text_config(model).get("max_position_embeddings") or _LONGEST_CONTEXT)
