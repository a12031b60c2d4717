"""The configuration of a run: one frozen tree, composed of the settings that each package defines.

A rule that concerns the settings of one package alone is checked where the settings are defined; the rules
between packages are checked here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.estimators import GdpoEstimator, GroupEstimator, MaxRlEstimator
from areal_agents.algorithms.losses.correction import NoCorrection
from areal_agents.algorithms.losses.dpo import DpoLoss
from areal_agents.algorithms.replay import NoReplay
from areal_agents.cluster.config import ClusterConfig
from areal_agents.config.environment import with_environment
from areal_agents.config.profiles import with_profile
from areal_agents.core.settings import Settings
from areal_agents.environments.config import EnvironmentConfig
from areal_agents.environments.line import EnvironmentLine
from areal_agents.environments.schemes import scheme_of
from areal_agents.errors import AgentError, TaskEnvironmentError
from areal_agents.inference.config import SERVERS, EngineConfig
from areal_agents.inference.expert_routing import expert_layout
from areal_agents.model_folder import folder_fault, read_object
from areal_agents.proxy.config import ProxyConfig
from areal_agents.rollout.agents.cli.config import CliAgentConfig
from areal_agents.rollout.config import (
    CanaryConfig,
    CommandAgentConfig,
    DataConfig,
    EvalConfig,
    MixedEnvironmentConfig,
    RewardConfig,
    RolloutConfig,
    job_of_agent,
)
from areal_agents.store.config import StoreConfig
from areal_agents.telemetry.config import TelemetryConfig
from areal_agents.training.config import TrainerConfig
from areal_agents.user_functions import names_a_function

# The rollout.max_staleness that each loop sets; with "async" the user sets it.
LOOP_STALENESS = {"sync": 0, "one_step_off": 1}
_VLLM_TRANSPORTS = ("disk", "broadcast", "lora", "object_storage")
_FIRST_CALL_S = 60.0  # the time left for the first call of a job that starts at the end of wait_s
_WRONG_AGENT = "must be module:function, file.py:function, {command: …} or {cli: …}, got "


def _form_of_agent(agent: Any) -> str:
    if isinstance(agent, str):
        return "name"
    is_command = isinstance(agent, CommandAgentConfig) or "command" in agent
    return "program" if is_command else "other"


class Config(Settings):
    """All settings of one run."""

    name: str = Field(
        default="",
        description="Name of the run; empty: the config file's name, or its folder's for config.yaml.",
    )
    profile: Literal["", "24gb", "80gb", "node"] = Field(
        default="",
        description="Settings for a kind of machine, below all others: one GPU of 24 GB (adapters, up to "
        "1.7B), one of 80 GB, or eight of them; docs/gpus.md. --dry-run shows them.",
    )
    seed: int = Field(
        default=0, ge=0, le=2**63 - 1, description="Seed of the data order, of sampling and of training."
    )
    run_dir: str = Field(default="", description="Folder of the run; empty: runs/<name>-seed<seed>.")
    model: str = Field(
        description="The initial weights: a Hugging Face folder; the id of a model of the Hub, such as "
        "Qwen/Qwen3-0.6B, which is downloaded; or quickstart, a small model for a first run on a laptop."
    )
    agent: Annotated[
        Annotated[str, Tag("name")]
        | Annotated[CommandAgentConfig, Tag("program")]
        | Annotated[dict[str, Any], Tag("other")],
        Discriminator(_form_of_agent),
    ] = Field(
        default="",
        description="module:function, file.py:function, {command: ...}, or a command-line agent such as "
        "{cli: codex} (docs/agents.md); not needed with data.episodes.",
    )
    environment: EnvironmentConfig | None = Field(
        default=None,
        description="An environment in place of agent, data and eval.data, such as "
        "reasoning-gym:countdown?size=500, or a mapping; docs/environments.md. For tools, openenv, "
        "nemo-gym and mcp, data.path may name the tasks.",
    )
    environments: tuple[MixedEnvironmentConfig, ...] = Field(
        default=(),
        description="Several environments in place of one, each with its share of the groups: lines, or "
        "mappings with use, name, weight, sampler.",
    )
    ablation: str | None = Field(
        default=None, description="The same agent with its tools switched off; --ablate-tool evaluates it."
    )
    trial: bool = Field(
        default=True,
        description="Before engine and trainer start, play one episode of the agent with a scripted model, "
        "and end the run with the reason if the agent cannot be trained.",
    )
    reward: RewardConfig | None = Field(
        default=None,
        description="A reward function apart from the agent: module:function or file.py:function of a "
        "finished episode, or a mapping; absent: the agent gives its rewards. What it returns is added to "
        "rewards that the agent gives, and replaces those of the same name.",
    )
    loop: Literal["sync", "one_step_off", "async"] = Field(
        default="async",
        description="sync: a batch is generated, then trained (max_staleness 0). one_step_off: the next one "
        "is generated during training, and weights are swapped between batches (max_staleness 1). async: "
        "neither waits for the other (rollout.max_staleness).",
    )
    data: DataConfig = Field(description="Training tasks.")
    eval: EvalConfig | None = Field(default=None, description="Held-out evaluation; absent: no evaluation.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    proxy: ProxyConfig = Field(default_factory=ProxyConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if "/" in name or name in (".", ".."):
            raise ValueError(f"must be the name of a folder in runs/, got {name!r}; run_dir takes a path")
        return name

    @field_validator("agent", mode="before")
    @classmethod
    def _check_agent(cls, agent: Any) -> Any:
        if isinstance(agent, Mapping) and "cli" in agent:
            try:
                CliAgentConfig.read(agent)
            except AgentError as error:
                raise ValueError(str(error).removeprefix("agent: ")) from None
            return agent
        if isinstance(agent, str | CommandAgentConfig):
            return agent
        if isinstance(agent, Mapping) and "environments" in agent:
            return agent  # which `with_environment` makes from the key of this name
        is_command = isinstance(agent, Mapping) and isinstance(agent.get("command"), str)
        is_other = isinstance(agent, Mapping) and all(isinstance(value, str) for value in agent.values())
        if isinstance(agent, Mapping) and "job" in agent and not is_command:
            raise ValueError("job: a job runs a command, and agent.command is missing or no string")
        if not is_command and not is_other:
            raise ValueError(_WRONG_AGENT + json.dumps(agent, ensure_ascii=False, default=str))
        return agent

    @model_validator(mode="before")
    @classmethod
    def _fill_profile(cls, given: Any) -> Any:
        """Add the settings of the profile that are not given."""
        return with_profile(given) if isinstance(given, Mapping) else given

    @model_validator(mode="before")
    @classmethod
    def _fill_environment(cls, given: Any) -> Any:
        """Let an environment be the agent and, where no other data is given, the tasks."""
        return with_environment(given) if isinstance(given, Mapping) else given

    @model_validator(mode="before")
    @classmethod
    def _fill_staleness(cls, given: Any) -> Any:
        """Set the bound on staleness of the loop or of `rollout.lag` if `rollout` has none."""
        rollout = given.get("rollout", {}) if isinstance(given, Mapping) else None
        if not isinstance(rollout, Mapping) or "max_staleness" in rollout:
            return given
        bound = LOOP_STALENESS.get(given.get("loop"), rollout.get("lag"))
        return given if bound is None else {**given, "rollout": {**rollout, "max_staleness": bound}}

    @model_validator(mode="after")
    def _check(self) -> Config:
        if fault := folder_fault(self.model):
            raise ValueError(f"model: {fault}; give the path of a downloaded model")
        if faults := [*faults_between_parts(self)]:
            raise ValueError("\n  ".join(faults))
        return self


def faults_between_parts(config: Config) -> Iterator[str]:
    """Yield every fault between the settings of several packages, with what to do about it."""
    yield from _episode_faults(config)
    yield from _model_faults(config)
    yield from _algorithm_faults(config)
    yield from _routing_faults(config)
    yield from _publish_faults(config)
    yield from _loop_faults(config)
    yield from _traffic_faults(config)


def _episode_faults(config: Config) -> Iterator[str]:
    """Yield the faults of the source of episodes."""
    recorded = config.data.episodes
    if (
        isinstance(config.agent, str)
        and " " in config.agent.strip()
        and config.agent[0] != "{"
        and not names_a_function(config.agent)
    ):
        command = f"agent: {{command: {json.dumps(config.agent)}}}"
        yield f"agent: {config.agent!r} does not name a function; if it is a command, write {command}"
    is_environment = isinstance(config.agent, dict) and bool(
        {"environment", "environments"} & {*config.agent}
    )
    if (config.environment is not None or config.environments) and not is_environment:
        yield "environment: it takes the place of the agent; leave agent out"
    if config.environment is not None and config.environments:
        yield "environments: give them, or one environment"
    for environment in (config.environment, *config.environments):
        if environment is not None:
            yield from _environment_faults(config, environment)
    if config.environments:
        names = [environment.name for environment in config.environments]
        sources = [*config.data.sources, *(config.eval.data.sources if config.eval is not None else ())]
        if unknown := sorted({source.name for source in sources} - {*names}):
            yield f"data.sources: there is no environment {unknown[0]!r}; there are {', '.join(names)}"
        elif not config.data.sources:
            yield f"data: with environments, tasks are in data.sources, by the names {', '.join(names)}"
    if isinstance(config.agent, dict) and not is_environment and "cli" not in config.agent:
        yield f"agent: {_WRONG_AGENT}{json.dumps(config.agent, ensure_ascii=False)}"
    job = job_of_agent(config.agent)
    if job is not None and job.wait_s + _FIRST_CALL_S > config.proxy.idle_timeout_s:
        yield (
            f"agent.job.wait_s: {job.wait_s:g} s, but an episode without a call fails after "
            f"proxy.idle_timeout_s ({config.proxy.idle_timeout_s:g} s), and a job that starts last needs "
            f"{_FIRST_CALL_S:g} s for its first call; raise that, or wait less"
        )
    if config.reward is not None and config.reward.group and config.rollout.over_sample:
        yield (
            "rollout.over_sample: a reward function of a group needs all its episodes, so none may be "
            "surplus; leave over_sample out"
        )
    if config.reward is not None and recorded:
        yield "reward: recorded episodes have their rewards; leave reward out, or reward them over HTTP"
    if not recorded and not config.data.traffic and not config.agent:
        yield "'agent' is required, unless data.episodes names recorded episodes to train on"
    if config.eval is not None and (config.eval.data.episodes or config.eval.data.traffic):
        yield "eval.data: evaluation runs tasks and not recorded episodes; give the tasks in eval.data.path"
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
        yield f"data.episodes: {recorded} is a folder without a store.db; give a run's folder, or a store.db"


def _traffic_faults(config: Config) -> Iterator[str]:
    """Yield the faults of a run that trains on the conversations of users."""
    rollout, canary = config.rollout, config.rollout.canary
    if not config.data.traffic:
        if canary is not None:
            yield "rollout.canary: it compares users' conversations; set data.traffic: true, or leave it out"
        return
    for name, used, instead in (
        ("agent", bool(config.agent), "users call the model"),
        ("eval", config.eval is not None, "evaluate with areal-agents eval"),
        ("reward", config.reward is not None, "rewards come over HTTP, from users or from a judge"),
        ("loop", config.loop != "async", "serving does not wait for training"),
        ("rollout.lag", rollout.lag is not None, "users do not wait for training"),
        ("rollout.on_stale", rollout.on_stale == "wait", "users do not wait for training; use mask"),
        ("rollout.over_sample", bool(rollout.over_sample), "each conversation is alone"),
        ("engine.colocate", config.engine.colocate == "sleep", "engines that sleep serve no user; use split"),
    ):
        if used:
            yield f"{name}: with data.traffic, {instead}; leave {name} out"
    if rollout.group_size != 1:
        yield (
            f"rollout.group_size: with data.traffic a group is one conversation; got {rollout.group_size}, "
            "use 1"
        )
    if canary is not None:
        yield from _canary_faults(config, canary)


def _canary_faults(config: Config, canary: CanaryConfig) -> Iterator[str]:
    """Yield what a canary needs and the configuration does not provide."""
    if (len(config.engine.urls) or config.engine.replicas) < 2:
        yield "rollout.canary: it needs an engine of its own; set engine.replicas to at least 2"
    if config.engine.router:
        yield "engine.router: with rollout.canary, conversations stay on their side; leave the router out"
    if config.trainer.publish.transport != "lora":
        yield (
            "trainer.publish.transport: rollout.canary needs lora, with which an engine changes its version "
            f"without a pause; got {config.trainer.publish.transport}; set trainer.lora"
        )
    if config.trainer.keep_checkpoints < 2:
        yield "trainer.keep_checkpoints: rollout.canary needs those of both versions; use at least 2"
    bound, oldest = config.rollout.max_staleness, 2 * canary.steps + 1
    if bound is not None and bound < oldest:
        yield (
            f"rollout.max_staleness: {bound}: users go on with the stable version while a candidate is "
            f"trained, compared and rolled back, so tokens are up to {oldest} versions old; use at least "
            f"{oldest}, or inf"
        )


def _environment_faults(config: Config, environment: EnvironmentConfig) -> Iterator[str]:
    """Yield what an environment and the rest of the configuration do not give each other."""
    try:
        scheme = scheme_of(EnvironmentLine.read(environment.use))
    except TaskEnvironmentError as error:
        yield f"environment: {error}"
        return
    if not scheme.rewards and config.reward is None:
        yield f"reward: {environment.use!r} gives no reward; name a reward function"
    evaluated = config.eval.data.path if config.eval is not None else ""
    if (config.data.path or config.data.episodes or evaluated) and not scheme.takes_data:
        yield f"data: {environment.use!r} has tasks of its own; leave data (and eval.data) out"


def _loop_faults(config: Config) -> Iterator[str]:
    """Yield the faults of the loop and its bound on staleness."""
    rollout, bound = config.rollout, config.rollout.max_staleness
    wanted = LOOP_STALENESS.get(config.loop)
    if config.data.episodes:
        for name, used in (
            ("loop", config.loop != "async"),
            ("rollout.on_stale", rollout.on_stale != "mask"),
            ("algorithm.replay", not isinstance(config.algorithm.replay, NoReplay)),
        ):
            if used:
                yield f"{name}: training on data.episodes has no rollouts and no staleness; leave {name} out"
        return
    if wanted is not None and bound != wanted:
        yield (
            f"loop: {config.loop} means rollout.max_staleness: {wanted}, got "
            f"{'inf' if bound is None else bound}; leave one of them out"
        )
    if rollout.lag is not None:
        yield from _lag_faults(config)
    if bound == 0 and not isinstance(config.algorithm.replay, NoReplay):
        yield (
            "algorithm.replay: a replayed group is at least one version old, which "
            "rollout.max_staleness: 0 does not allow; set max_staleness to at least 1"
        )
    if bound is None and rollout.on_stale in ("wait", "drop"):
        yield (
            f"rollout.on_stale: {rollout.on_stale} does nothing with max_staleness: inf, which keeps all "
            "tokens; leave on_stale out, or give a finite max_staleness"
        )
    if rollout.on_stale == "downweight":
        if bound == 0:
            yield (
                "rollout.on_stale: downweight does nothing at max_staleness: 0, where every token has weight "
                "1; leave on_stale out, or set max_staleness to at least 1"
            )
        if config.algorithm.is_supervised:
            yield (
                f"rollout.on_stale: downweight has no meaning for {config.algorithm.policy_loss.kind}, whose "
                "loss does not depend on the policy that sampled a token; use mask, wait or drop"
            )
    held = "rollout.on_stale: wait" if rollout.on_stale == "wait" else f"loop: {config.loop}"
    holds = rollout.on_stale == "wait" or config.loop == "one_step_off"
    if holds and config.trainer.batch_timeout_s <= rollout.limits.time_s:
        yield (
            f"trainer.batch_timeout_s: {held} may hold the trainer for as long as an episode takes; got "
            f"{config.trainer.batch_timeout_s:g}, expected more than rollout.limits.time_s: "
            f"{rollout.limits.time_s:g}"
        )


def _lag_faults(config: Config) -> Iterator[str]:
    """Yield the faults of a run whose batches are exactly `rollout.lag` versions old."""
    rollout = config.rollout
    if rollout.max_staleness != rollout.lag:
        yield f"rollout.lag: {rollout.lag} means max_staleness: {rollout.lag}; set it so, or leave it out"
    for name, used in (
        ("loop", config.loop != "async"),
        ("rollout.on_stale", rollout.on_stale != "mask"),
        ("data.epochs", any(source.epochs is not None for source in (config.data, *config.data.sources))),
    ):
        if used:
            yield f"{name}: with rollout.lag, no token is older and the data has no end; leave {name} out"


def _model_faults(config: Config) -> Iterator[str]:
    """Yield the faults of the critic, the reference policy, the teacher and the best checkpoint."""
    trainer, algorithm = config.trainer, config.algorithm
    wanted = (
        ("critic_model", trainer.critic_model, algorithm.needs_critic, "trains no critic (estimator: gae)"),
        ("reference_model", trainer.reference_model, algorithm.needs_reference,
         "has no reference policy (kl_in: reward or loss, or dpo)"),
        ("teacher_model", trainer.teacher_model, algorithm.teacher == "model",
         "distils no model that the trainer holds (policy_loss: distillation, teacher: model)"),
    )  # fmt: skip
    for name, path, needed, without in wanted:
        if path and not needed:
            yield f"trainer.{name}: the algorithm {algorithm.preset} {without}; leave it out"
        elif path and (fault := folder_fault(path)):
            yield f"trainer.{name}: {fault}"
    if algorithm.teacher == "model" and not trainer.teacher_model:
        yield "trainer.teacher_model: distillation needs a teacher; give the Hugging Face folder of its model"
    if algorithm.teacher == "model" and _vocabularies_differ(Path(config.model), Path(trainer.teacher_model)):
        yield (
            f"trainer.teacher_model: {trainer.teacher_model} has another vocabulary than {config.model} "
            "(tokenizer.json); choose a teacher with the policy's tokenizer"
        )
    if algorithm.teacher == "engine" and not trainer.teacher_url:
        yield "trainer.teacher_url: distillation with teacher: engine needs the URL of an SGLang server"
    if trainer.teacher_url and algorithm.teacher != "engine":
        yield (
            "trainer.teacher_url: the algorithm has no engine as teacher; set algorithm.teacher: engine, or "
            "leave teacher_url out"
        )
    if trainer.best_metric == "heldout" and (config.eval is None or config.eval.every is None):
        yield "trainer.best_metric: heldout needs evaluations during training; give eval.every"
    if algorithm.needs_critic and trainer.lr > 0 and trainer.critic_lr == 0:
        yield f"trainer.critic_lr: {algorithm.preset} needs a critic that learns; use more than 0"
    if trainer.publishes_adapters and config.engine.kind != "embedded" and trainer.keep_weights > 6:
        server = SERVERS[config.engine.kind]
        yield (
            f"trainer.keep_weights: at most 6, because {server} holds 8 adapters; got {trainer.keep_weights}"
        )


def _algorithm_faults(config: Config) -> Iterator[str]:
    """Yield what the algorithm requires of ranks and groups and the configuration does not provide."""
    trainer, algorithm = config.trainer, config.algorithm
    loss, estimator = algorithm.policy_loss, algorithm.estimator
    by_sequence = {f"policy_loss: {loss.kind}": loss.ratio_level != "token"}
    if not isinstance(algorithm.correction, NoCorrection):
        level, veto = algorithm.correction.correction_level, algorithm.correction.veto
        by_sequence |= {f"correction_level: {level}": level != "token", f"veto: {veto}": veto is not None}
    if trainer.context_parallel > 1:
        for part, needs_sequences in by_sequence.items():
            if needs_sequences:
                yield (
                    f"trainer.context_parallel: {trainer.context_parallel} spreads a sequence over ranks, "
                    f"and algorithm.{part} needs whole sequences; use 1, or a setting that works by token"
                )
    if config.data.episodes or config.rollout.group_size > 1:
        return
    alone = "rollout.group_size: 1 leaves an episode without others to be compared with, "
    if isinstance(loss, DpoLoss):
        yield alone + "and dpo needs pairs; use at least 2"
    elif algorithm.teacher == "self":
        yield alone + "and self-distillation learns from the best of a group; use at least 2"
    elif isinstance(estimator, MaxRlEstimator | GdpoEstimator):
        yield f"{alone}and with algorithm.estimator: {estimator.kind} nothing is ever trained; use at least 2"
    elif isinstance(estimator, GroupEstimator):
        parts = {
            "advantage_mean: group": estimator.advantage_mean == "group",
            "advantage_std: group": estimator.advantage_std == "group",
        }
        for part in (name for name, used in parts.items() if used):
            yield f"{alone}which algorithm.{part} needs; use at least 2, or {part.split(':')[0]}: batch"


def _vllm_publish_faults(config: Config) -> Iterator[str]:
    """Yield why new weights cannot reach vLLM by the chosen transport."""
    publish, engine = config.trainer.publish, config.engine
    if publish.transport not in _VLLM_TRANSPORTS:
        yield (
            f"trainer.publish.transport: {publish.transport} is not supported with engine.kind: vllm; use "
            "disk, broadcast, object_storage, or lora (trainer.lora), or kind: sglang"
        )
    if publish.pause == "in_place":
        yield "trainer.publish.pause: in_place is not supported with engine.kind: vllm; use retract or abort"
    if publish.transport == "broadcast" and engine.colocate != "none" and publish.backend != "gloo":
        yield (
            "trainer.publish.transport: broadcast: engine.colocate: split puts a rank of the trainer and one "
            "of the engine on one GPU, which NCCL refuses; use transport: disk"
        )
    if engine.quantization and publish.verify != "off":
        yield (
            f"trainer.publish.verify: {publish.verify}: weights that --quantization {engine.quantization} "
            "changes cannot be compared with the model's; use verify: off"
        )


def _publish_faults(config: Config) -> Iterator[str]:
    """Yield why new weights cannot reach the engines by the chosen transport."""
    publish, engine, trainer = config.trainer.publish, config.engine, config.trainer
    if publish.transport == "object_storage":
        yield from _object_storage_faults(config)
    on_gpus = engine.device.startswith("cuda") or (engine.kind != "embedded" and engine.device == "auto")
    if engine.kind == "vllm":
        yield from _vllm_publish_faults(config)
        return
    if publish.transport == "delta" and engine.kind == "sglang" and not engine.urls:
        yield (
            "trainer.publish.transport: delta needs the embedded engine, because SGLang 0.5.21 takes no "
            "changes of weights; use broadcast, or ipc with engine.colocate"
        )
    shares_gpus = on_gpus and engine.colocate != "none" and trainer.device != "cpu"
    if publish.transport == "broadcast" and publish.backend != "gloo" and shares_gpus:
        yield (
            f"trainer.publish.transport: broadcast: engine.colocate: {engine.colocate} puts a rank of the "
            "trainer and one of the engine on one GPU, which NCCL refuses; use transport: ipc"
        )
    if publish.transport == "ipc" and on_gpus and engine.colocate == "none":
        yield (
            "trainer.publish.transport: ipc hands over memory of GPUs that trainer and engine share; set "
            "engine.colocate: split or sleep, or use broadcast"
        )
    last = int(engine.device.partition(":")[2] or 0) + engine.replicas * engine.tensor_parallel - 1
    ranks_here = trainer.ranks // max(1, trainer.nodes)
    if publish.transport == "ipc" and shares_gpus and not engine.urls and last >= ranks_here:
        yield (
            "trainer.publish.transport: ipc needs a rank of the trainer on each engine's GPU: the engines "
            f"use GPUs up to {last}, and the trainer has {ranks_here} on this machine, from GPU 0 on; use "
            "as many trainer.ranks, fewer engines, or transport: disk"
        )
    if publish.transport == "ipc" and not on_gpus and trainer.device == "cuda":
        yield (
            f"trainer.publish.transport: ipc: an engine with device: {engine.device} cannot read a GPU's "
            "memory; use disk or tensor"
        )
    if engine.quantization and not trainer.publishes_adapters:
        yield (
            f"engine.arguments: --quantization {engine.quantization}: SGLang 0.5.21 quantises weights as it "
            "starts, and cannot load new ones over them; leave it out, or train an adapter (trainer.lora), "
            "which leaves the quantised weights as they are"
        )
    elif engine.quantization and publish.verify != "off":
        yield (
            f"trainer.publish.verify: {publish.verify}: weights that --quantization {engine.quantization} "
            "changes cannot be compared with the model's; use verify: off"
        )


def _object_storage_faults(config: Config) -> Iterator[str]:
    """Yield why engines cannot read versions from an object storage."""
    if config.engine.urls:
        yield (
            "engine.urls: with trainer.publish.transport: object_storage each engine's process reads "
            "the versions, so the run has to start the engines; leave engine.urls out, or use disk or "
            "broadcast"
        )
    if config.engine.colocate != "none":
        yield (
            "trainer.publish.transport: object_storage is for engines elsewhere, and engine.colocate: "
            f"{config.engine.colocate} puts them on the trainer's GPUs; use disk or ipc"
        )


def _routing_faults(config: Config) -> Iterator[str]:
    """Yield why the engine's choice of experts cannot be recorded or replayed."""
    if not config.engine.routed_experts:
        return
    if expert_layout(read_object(Path(config.model) / "config.json")) is None:
        yield f"engine.routed_experts: {config.model} has no experts (num_experts_per_tok); leave it out"
    if config.trainer.context_parallel > 1:
        yield (
            f"engine.routed_experts: trainer.context_parallel: {config.trainer.context_parallel} spreads a "
            "sequence over ranks, which recorded routing does not support; use context_parallel: 1"
        )


def _vocabularies_differ(model: Path, teacher: Path) -> bool:
    """Whether two tokenizers differ in their token ids; False if a folder has no tokenizer.json."""
    files = [folder / "tokenizer.json" for folder in (model, teacher)]
    if not all(file.is_file() for file in files):
        return False
    ours, theirs = (read_object(file).get("model", {}).get("vocab") for file in files)
    return bool(ours != theirs)
