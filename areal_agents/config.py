"""The configuration of a run: one frozen tree, composed of the configs that the rooms define.

A file is YAML; `key=value` arguments override it, dots reach inside. A relative path in a file is
relative to that file, one given on the command line to the working directory; either way the loaded
tree holds absolute paths. Anything unknown is refused with the nearest known name.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.errors import ConfigError
from areal_agents.inference.config import EngineConfig
from areal_agents.inference.routing import expert_layout
from areal_agents.proxy.config import ProxyConfig
from areal_agents.rollout.config import DataConfig, EvalConfig, RolloutConfig
from areal_agents.store.config import StoreConfig
from areal_agents.training.config import TrainerConfig

Model = TypeVar("Model", bound=BaseModel)

# The staleness that a loop is made of; that of "async" is the user's.
LOOP_STALENESS = {"sync": 0, "one_step_off": 1}


class Config(BaseModel):
    """Everything that one run needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="", description="Name of the run; empty: the config file's folder.")
    seed: int = Field(default=0, ge=0, description="Seed of data order, sampling and training.")
    run_dir: str = Field(default="", description="Folder of the run; empty: runs/<name>-seed<seed>.")
    model: str = Field(description="Hugging Face folder of the initial weights.")
    agent: str | dict[str, str] = Field(
        default="",
        description="module:function, file.py:function, or {command: ...}; not needed with data.episodes.",
    )
    ablation: str | None = Field(
        default=None, description="The same agent with its tools switched off; run by --ablate-tool."
    )
    loop: Literal["sync", "one_step_off", "async"] = Field(
        default="async",
        description="sync: a batch is generated, then trained (max_staleness 0). one_step_off: the next one "
        "is generated meanwhile, weights swap in between (1). async: neither waits (rollout.max_staleness).",
    )
    data: DataConfig = Field(description="Training tasks.")
    eval: EvalConfig | None = Field(default=None, description="Held-out evaluation; absent: none.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    proxy: ProxyConfig = Field(default_factory=ProxyConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)

    @model_validator(mode="before")
    @classmethod
    def _fill_staleness(cls, given: Any) -> Any:
        """The loop's bound, where `rollout` has none."""
        if not isinstance(given, Mapping) or given.get("loop") not in tuple(LOOP_STALENESS):
            return given
        rollout = given.get("rollout", {})
        if not isinstance(rollout, Mapping) or "max_staleness" in rollout:
            return given
        return {**given, "rollout": {**rollout, "max_staleness": LOOP_STALENESS[given["loop"]]}}

    @model_validator(mode="after")
    def _check(self) -> Config:
        if not (Path(self.model) / "config.json").is_file():
            raise ValueError(
                f"model: {self.model} is not a Hugging Face model folder (no config.json in it); "
                "give the path of a downloaded model"
            )
        faults = [
            *_episode_faults(self),
            *_model_faults(self),
            *_algorithm_faults(self),
            *_routing_faults(self),
            *_loop_faults(self),
        ]
        if faults:
            raise ValueError("\n  ".join(faults))
        return self


def _episode_faults(config: Config) -> Iterator[str]:
    """What is wrong about where episodes come from."""
    recorded = config.data.episodes
    if not recorded and not config.agent:
        yield "'agent' is required, unless data.episodes names recorded episodes to train on"
    if config.eval is not None and not config.eval.data.path:
        yield "eval.data: evaluation runs tasks (path), not recorded episodes"
    if not recorded:
        return
    if config.eval is not None:
        yield (
            "eval: training on data.episodes starts no engine to evaluate with; leave eval out (eval=null), "
            "and evaluate the result with areal-agents eval CONFIG --model RUN/final"
        )
    if config.data.epochs is not None:
        yield "data.epochs: training on data.episodes lasts for trainer.steps; leave data.epochs out"
    if "://" not in recorded and not Path(recorded).exists():
        yield f"data.episodes: there is no store {recorded}; give a store.db, a run's folder, or a URL"
    elif Path(recorded).is_dir() and not (Path(recorded) / "store.db").is_file():
        yield f"data.episodes: {recorded} is a folder without a store.db"


def _loop_faults(config: Config) -> Iterator[str]:
    """What is wrong about the loop and its bound on staleness."""
    rollout, bound = config.rollout, config.rollout.max_staleness
    wanted = LOOP_STALENESS.get(config.loop)
    if config.data.episodes:
        for name, used in (
            ("loop", config.loop != "async"),
            ("rollout.on_stale", rollout.on_stale != "mask"),
        ):
            if used:
                yield f"{name}: training on data.episodes has no rollouts and no staleness; leave it out"
        return
    if wanted is not None and bound != wanted:
        yield (
            f"loop: {config.loop} means rollout.max_staleness: {wanted}, got "
            f"{'inf' if bound is None else bound}; leave one of them out"
        )
    if bound is None and rollout.on_stale in ("wait", "drop"):
        yield f"rollout.on_stale: {rollout.on_stale} does nothing where max_staleness: inf keeps all tokens"
    if rollout.on_stale == "downweight":
        if bound == 0:
            yield "rollout.on_stale: downweight does nothing at max_staleness: 0, where every token counts 1"
        if config.algorithm.is_supervised:
            yield (
                f"rollout.on_stale: downweight has no meaning for {config.algorithm.policy_loss}, which does "
                "not ask which policy sampled a token; use mask, wait or drop"
            )
    held = "rollout.on_stale: wait" if rollout.on_stale == "wait" else f"loop: {config.loop}"
    holds = rollout.on_stale == "wait" or config.loop == "one_step_off"
    if holds and config.trainer.batch_timeout_s <= rollout.limits.time_s:
        yield (
            f"trainer.batch_timeout_s: {held} may hold the trainer for as long as an episode takes, which is "
            f"rollout.limits.time_s: {rollout.limits.time_s:g}; give it more than that"
        )


def _model_faults(config: Config) -> Iterator[str]:
    """What is wrong about the critic, the reference policy, and how checkpoints are judged."""
    trainer, algorithm = config.trainer, config.algorithm
    wanted = (
        ("critic_model", trainer.critic_model, algorithm.needs_critic, "trains no critic (estimator: gae)"),
        ("reference_model", trainer.reference_model, algorithm.needs_reference,
         "has no reference policy (kl_in: reward or loss, or dpo)"),
    )  # fmt: skip
    for name, path, needed, without in wanted:
        if path and not needed:
            yield f"trainer.{name}: the algorithm {algorithm.preset} {without}; leave it out"
        elif path and not (Path(path) / "config.json").is_file():
            yield f"trainer.{name}: {path} is not a Hugging Face model folder (no config.json in it)"
    if trainer.best_metric == "heldout" and (config.eval is None or config.eval.every is None):
        yield "trainer.best_metric: heldout needs evaluations beside training; give eval.every"
    if algorithm.needs_critic and trainer.lr > 0 and trainer.critic_lr == 0:
        yield f"trainer.critic_lr: {algorithm.preset} learns from its critic, which would never learn at 0"
    if trainer.publish.transport == "lora" and config.engine.kind == "sglang" and trainer.keep_weights > 6:
        yield f"trainer.keep_weights: at most 6 adapters, for SGLang holds 8, got {trainer.keep_weights}"


def _algorithm_faults(config: Config) -> Iterator[str]:
    """What the algorithm asks of the ranks and of the groups that the config does not give it."""
    trainer, algorithm = config.trainer, config.algorithm
    by_sequence = {
        f"policy_loss: {algorithm.policy_loss}": algorithm.policy_loss == "gspo",
        f"correction_level: {algorithm.correction_level}": algorithm.correction_level != "token",
        f"veto: {algorithm.veto}": algorithm.veto is not None,
    }
    if trainer.context_parallel > 1:
        for part, needs_sequences in by_sequence.items():
            if needs_sequences:
                yield (
                    f"trainer.context_parallel: {trainer.context_parallel} spreads a sequence over ranks, "
                    f"and algorithm.{part} needs whole ones; use 1, or a part that looks at single tokens"
                )
    if config.data.episodes or config.rollout.group_size > 1:
        return
    alone = "rollout.group_size: 1 leaves an episode without others to be compared with, "
    if algorithm.policy_loss == "dpo":
        yield alone + "and dpo needs pairs; use at least 2"
    elif algorithm.estimator == "group":
        parts = {
            "advantage_mean: group": algorithm.advantage_mean == "group",
            "advantage_std: group": algorithm.advantage_std == "group",
            "leave_one_out": algorithm.leave_one_out,
            "drop_equal_groups": algorithm.drop_equal_groups,
        }
        for part in (name for name, used in parts.items() if used):
            yield alone + f"and with algorithm.{part} nothing is ever trained; use at least 2"


def _routing_faults(config: Config) -> Iterator[str]:
    """Why the experts that the engine chose cannot be recorded, or not be replayed."""
    if not config.engine.routed_experts:
        return
    if expert_layout(_json_of(Path(config.model) / "config.json")) is None:
        yield f"engine.routed_experts: {config.model} has no experts (num_experts_per_tok); leave it out"
    if config.trainer.context_parallel > 1:
        yield (
            f"engine.routed_experts: trainer.context_parallel: {config.trainer.context_parallel} spreads a "
            "sequence over ranks, which recorded routing does not follow; use 1"
        )


def _json_of(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError:
        return {}
    return found if isinstance(found, Mapping) else {}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `key=value` overrides, and validate.

    Raises:
        ConfigError: the file is missing or malformed, a key is unknown (the nearest known one is
            named), or a value is not allowed.
    """
    path = Path(path)
    try:
        tree = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a config file: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values")
    tree = _with_absolute_paths(tree, path.resolve().parent)
    for override in overrides:
        key, value = _parse_override(override)
        _set(tree, key, _with_absolute_paths(_nest(key, value), Path.cwd()))
    if not tree.get("name"):
        tree["name"] = path.resolve().parent.name if path.stem == "config" else path.stem
    config = validate_config(tree, source=str(path))
    if not config.run_dir:
        run_dir = Path.cwd() / "runs" / f"{config.name}-seed{config.seed}"
        config = config.model_copy(update={"run_dir": str(run_dir)})
    if _records_itself(config):
        raise ConfigError(
            f"{path}:\n  data.episodes: {config.data.episodes} is this run's own; training on it would go on "
            "with that run and write to its store; choose another folder with run_dir=..."
        )
    return config


def _records_itself(config: Config) -> bool:
    """Whether the recorded episodes to train on are those of the run folder that is written to."""
    recorded, own = config.data.episodes, Path(config.run_dir).resolve()
    if not recorded:
        return False
    return recorded == config.store.url or Path(recorded).resolve() in (own, own / "store.db")


def validate_config(tree: Mapping[str, Any], *, source: str) -> Config:
    """Validate a plain tree. ConfigError names every fault and, for unknown keys, the nearest name."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(fault, Config) for fault in error.errors()]
        raise ConfigError(f"{source}:\n  " + "\n  ".join(lines)) from None


def proxy_config(overrides: Sequence[str], **given: Any) -> ProxyConfig:
    """The settings of a proxy that is served by itself: `given`, and `key=value` overrides over it.

    ConfigError for an unknown key or a value that is not allowed, as in `load_config`.
    """
    return with_overrides(ProxyConfig, given, overrides)


def with_overrides(model: type[Model], given: Mapping[str, Any], overrides: Iterable[str]) -> Model:
    """`given` settings of one component, with `key=value` overrides over them. ConfigError as above."""
    tree = copy.deepcopy(dict(given))
    for override in overrides:
        key, value = _parse_override(override)
        _set(tree, key, _nest(key, value))
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(fault, model) for fault in error.errors()]
        raise ConfigError("; ".join(lines)) from None


def save_config(config: Config, path: Path) -> None:
    """Write the resolved tree, so that every process of a run reads the same one.

    Only the owner can read it: it may hold keys.
    """
    temporary = path.with_suffix(".tmp")
    temporary.touch(mode=0o600)
    temporary.chmod(0o600)
    temporary.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    temporary.replace(path)


def _parse_override(override: str) -> tuple[list[str], Any]:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"expected key=value, got {override!r}, for example trainer.steps=10")
    try:
        return key.split("."), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of {key} is not valid YAML: {error}") from None


def _nest(key: Sequence[str], value: Any) -> dict[str, Any]:
    for part in reversed(key):
        value = {part: value}
    return value


def _set(tree: dict[str, Any], key: Sequence[str], nested: Mapping[str, Any]) -> None:
    for part in key[:-1]:
        nested = nested[part]
        if part == "algorithm" and isinstance(tree.get(part), str):  # a preset's name is short for this
            tree[part] = {"preset": tree[part]}
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[key[-1]] = nested[key[-1]]


_PATH_KEYS = (
    ("model",), ("agent",), ("ablation",), ("run_dir",), ("data", "path"), ("data", "episodes"),
    ("eval", "data", "path"), ("trainer", "critic_model"), ("trainer", "reference_model"),
    ("engine", "python"), ("store", "retain", "export"), ("trainer", "publish", "folder"),
)  # fmt: skip
_ALWAYS_PATHS = ("model", "run_dir", "critic_model", "reference_model", "export", "folder")


def _with_absolute_paths(tree: Mapping[str, Any], base: Path) -> dict[str, Any]:
    out: dict[str, Any] = copy.deepcopy(dict(tree))
    for *parents, leaf in _PATH_KEYS:
        node: Any = out
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(node.get(leaf), str):
            node[leaf] = _absolute(node[leaf], base, always=leaf in _ALWAYS_PATHS)
    return out


def _absolute(value: str, base: Path, *, always: bool) -> str:
    """`value` resolved against `base` if it names a file there (a function may follow a colon)."""
    file, colon, function = value.partition(":") if ".py:" in value else (value, "", "")
    candidate = Path(os.path.normpath(base / file))  # links stay: the Python of an environment is one
    if value and (always or candidate.exists()):
        return f"{candidate}{colon}{function}"
    return value


def _explain(fault: Mapping[str, Any], root: type[BaseModel]) -> str:
    location = [str(part) for part in fault["loc"]]
    key = ".".join(location)
    if fault["type"] == "extra_forbidden":
        known = _known_keys(root, location[:-1])
        nearest = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = (
            f"; did you mean {'.'.join([*location[:-1], nearest[0]])!r}?"
            if nearest
            else f"; known keys here: {', '.join(sorted(known))}"
        )
        return f"unknown key {key!r}{hint}"
    if fault["type"] == "missing":
        return f"{key!r} is required"
    if fault["type"] == "value_error":
        return (f"{key}: " if key else "") + str(fault["ctx"]["error"])
    return f"{key}: {fault['msg']} (got {fault['input']!r})"


def _known_keys(model: type[BaseModel], location: Iterable[str]) -> list[str]:
    for part in location:
        if part.isdigit():  # a place in a list of what the part before it names
            continue
        field = model.model_fields.get(part)
        inner = _model_in(field.annotation) if field else None
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_in(argument)
        if found:
            return found
    return None
