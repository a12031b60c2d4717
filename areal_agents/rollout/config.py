"""Settings of tasks, training episodes and evaluations."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from areal_agents.core.rollout import LARGEST_GROUP, OnStale
from areal_agents.core.settings import Settings
from areal_agents.environments.config import EnvironmentConfig
from areal_agents.rollout.agents.jobs.config import JobConfig
from areal_agents.sandbox.config import SandboxConfig

_DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")


def is_data_file(path: str) -> bool:
    """Whether tasks are read from a file of this name, which may not exist, and not from elsewhere."""
    return path.endswith(_DATA_FILES)


class CommandAgentConfig(SandboxConfig):
    """An agent that is a program in any language."""

    command: str = Field(
        description="The program and its arguments, which are run for each episode; docs/agents.md."
    )
    job: JobConfig | None = Field(
        default=None,
        description="The command of each episode runs as a job of a cluster; null: it runs in a process.",
    )

    @field_validator("command")
    @classmethod
    def _has_words(cls, command: str) -> str:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"{command!r} cannot be read: {error}") from None
        if not words:
            raise ValueError(
                "an agent must be module:function, file.py:function, {command: …} or {cli: …}, got no command"
            )
        return command

    @model_validator(mode="after")
    def _job_fits(self) -> CommandAgentConfig:
        if self.job is not None and self.isolation != "none":
            raise ValueError(
                f"job and isolation: {self.isolation} exclude each other; isolate the command in the template"
            )
        if self.job is not None and self.job.kind == "kubernetes" and self.pass_environment:
            raise ValueError(
                "pass_environment has no effect on a Job of Kubernetes; set its variables in job.template"
            )
        return self


# How a configuration names an agent: "module:function" or "file.py:function", a command, a command-line agent
# or an environment.
AgentSpec = str | CommandAgentConfig | Mapping[str, Any]


def job_of_agent(agent: AgentSpec) -> JobConfig | None:
    """Return the settings of the jobs as which an agent's episodes run, or None."""
    return agent.job if isinstance(agent, CommandAgentConfig) else None


class LimitsConfig(Settings):
    """Limits of an episode; an episode that reaches one is truncated, not failed."""

    max_turns: int | None = Field(default=None, ge=1, description="Most model calls per episode.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Most sampled tokens per episode, over all its calls."
    )
    max_completion_tokens: int | None = Field(default=None, ge=1, description="Most sampled tokens per call.")
    context_tokens: int | None = Field(
        default=None, ge=2, description="Most tokens of a prompt plus its completion, in every call."
    )
    time_s: float = Field(default=600.0, gt=0, description="Wall-clock time of an episode, in seconds.")


class ContextStage(Settings):
    """A bound on the context of training episodes during a part of the run."""

    until_step: int | None = Field(
        default=None, ge=1, description="The stage ends when this step is published; absent: with the run."
    )
    max_tokens: int = Field(ge=2, description="Most tokens of a prompt plus its completion, in every call.")


class CanaryConfig(Settings):
    """How versions are compared before all engines serve them; docs/serve-and-train.md."""

    share: float = Field(
        default=0.1, gt=0, lt=1, description="Share of the new conversations that the candidate serves."
    )
    steps: int = Field(default=1, ge=1, description="Batches that are trained for each candidate.")
    alpha: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="For each candidate: the largest probability that scores promote one that is better than "
        "the stable version by no more than least_gain, and that they roll back one that is better by more, "
        "however often they are compared.",
    )
    scores: tuple[float, float] = Field(
        default=(0.0, 1.0),
        description="Lowest and highest score of a conversation; others count as the nearest of the two.",
    )
    least_gain: float = Field(
        default=0.0,
        allow_inf_nan=False,
        description="By how much the candidate's mean score must exceed that of the stable version. Below 0: "
        "the loss that is tolerated.",
    )
    most_conversations: int = Field(
        default=10_000,
        ge=1,
        description="Rewarded conversations of both sides together after which `undecided` applies.",
    )
    undecided: Literal["roll_back", "promote"] = Field(
        default="roll_back", description="What becomes of a candidate if they did not decide."
    )
    settle_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds after the end of a conversation in which rewards count for the comparison. A "
        "conversation is counted when they are over, so that quick rewards have no more weight than slow "
        "ones.",
    )

    @field_validator("scores")
    @classmethod
    def _has_range(cls, scores: tuple[float, float]) -> tuple[float, float]:
        if not -math.inf < scores[0] < scores[1] < math.inf:
            raise ValueError(f"the lowest score must be below the highest, got {list(scores)}")
        return scores


class RolloutConfig(Settings):
    """How training episodes are collected."""

    groups: int = Field(default=8, ge=1, description="Groups in a training batch.")
    group_size: int = Field(default=8, ge=1, le=LARGEST_GROUP, description="Episodes of one task in a group.")
    over_sample: int = Field(
        default=0,
        ge=0,
        description="Episodes of a group beyond group_size; aborting the slowest favours short ones.",
    )
    max_staleness: int | None = Field(
        default=1,
        ge=0,
        description="η: most versions that a token may be behind the trainer; 0: on-policy, inf: no bound.",
    )
    lag: int | None = Field(
        default=None,
        ge=0,
        description="For experiments: each batch, after the first ones, is exactly so many versions old. It "
        "sets max_staleness; rollout and training no longer overlap. docs/async.md.",
    )
    on_stale: OnStale = Field(
        default="mask",
        description="mask: tokens beyond max_staleness are masked. drop: their groups are dropped. wait: the "
        "trainer waits for old groups, so that no token exceeds the bound. downweight: as mask, and within "
        "the bound older tokens have less weight.",
    )
    concurrency: int = Field(
        default=0,
        ge=0,
        description="Training episodes that run at the same time. 0 or auto: as many as the engines sample "
        "sequences at the same time (engines × slots, as for proxy.workers).",
    )
    workers: int = Field(
        default=8,
        ge=1,
        description="Processes for a synchronous agent; each runs one episode at a time.",
    )
    retries: int = Field(default=2, ge=0, description="New attempts at an episode after a failed one.")
    on_failed: Literal["refill", "drop"] = Field(
        default="refill",
        description="When all retries have failed: complete the group with new episodes of its task, at most "
        "group_size of them (refill), or drop the group (drop).",
    )
    agent_error: Literal["retry", "score"] = Field(
        default="retry",
        description="An agent that raises after it has received a reply. retry: the episode has failed and "
        "is attempted again. score: the policy caused the error, for example with output that the agent "
        "cannot parse; the episode is truncated and trained on with agent_error_reward. Errors of the "
        "connection to the model are retried in both cases.",
    )
    agent_error_reward: float = Field(
        default=0.0,
        description="With agent_error: score, the reward of an episode whose agent raised; it is added to "
        "the rewards that the agent gave before.",
    )
    outside_rewards: bool = Field(
        default=False,
        description="Rewards of an agent function are posted over HTTP after it has ended; otherwise an "
        "episode to which it gave none fails at once. A command's reward may always be posted later.",
    )
    give_up_after: int = Field(
        default=128,
        ge=1,
        description="Failed attempts in a row, over all tasks, that end the run.",
    )
    give_up_s: float = Field(
        default=60.0,
        ge=0,
        description="Shortest time in seconds that such failures must last to end the run.",
    )
    canary: CanaryConfig | None = Field(
        default=None,
        description="With data.traffic: new versions serve a share of the conversations first, and are "
        "promoted or rolled back by their rewards; absent: all engines get each version at once.",
    )
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    context_stages: tuple[ContextStage, ...] = Field(
        default=(), description="Iterative context lengthening: stages with growing bounds on the context."
    )

    @field_validator("concurrency", mode="before")
    @classmethod
    def _automatic(cls, given: Any) -> Any:
        return 0 if given == "auto" else given

    @field_validator("max_staleness", mode="before")
    @classmethod
    def _unbounded(cls, given: Any) -> Any:
        return None if given in ("inf", math.inf) else given

    @field_serializer("max_staleness")
    def _named(self, bound: int | None) -> int | str:
        return "inf" if bound is None else bound

    @field_validator("context_stages")
    @classmethod
    def _stages_lengthen(cls, stages: tuple[ContextStage, ...]) -> tuple[ContextStage, ...]:
        if any(stage.until_step is None for stage in stages[:-1]):
            raise ValueError("every stage but the last needs until_step")
        ends = [stage.until_step for stage in stages if stage.until_step is not None]
        for name, numbers in (("until_step", ends), ("max_tokens", [s.max_tokens for s in stages])):
            if any(later <= earlier for earlier, later in pairwise(numbers)):
                raise ValueError(f"{name} must increase from stage to stage, got {numbers}")
        return stages

    def for_engines(self, sequences: int) -> RolloutConfig:
        """Return these settings with a concurrency; the engines together sample `sequences` at a time."""
        return self.model_copy(update={"concurrency": self.concurrency or sequences})

    @property
    def reward_of_agent_errors(self) -> float | None:
        """The reward of an episode whose agent raised after a reply; None: such an episode has failed."""
        return self.agent_error_reward if self.agent_error == "score" else None

    def limits_at(self, step: int) -> LimitsConfig:
        """Return the limits of a training episode that is opened while `step` is the published step.

        Both the stage's bound and `limits.context_tokens` apply. After the last stage's `until_step`, only
        the latter does.
        """
        for stage in self.context_stages:
            if stage.until_step is None or step < stage.until_step:
                bound = min(stage.max_tokens, self.limits.context_tokens or stage.max_tokens)
                return self.limits.model_copy(update={"context_tokens": bound})
        return self.limits


class RewardConfig(Settings):
    """A reward function apart from the agent; a string is short for `episode`."""

    episode: str = Field(
        default="",
        description="A function of a FinishedEpisode that returns its reward: module:function or "
        "file.py:function.",
    )
    group: str = Field(
        default="",
        description="A function of the list of finished episodes of a group that returns a list of their "
        "rewards. Truncated episodes of training are not in the list; they get proxy.truncated_reward.",
    )
    time_s: float = Field(default=120.0, gt=0, description="Time limit of one call, in seconds.")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {"episode": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _one_function(self) -> RewardConfig:
        if bool(self.episode) == bool(self.group):
            raise ValueError(
                "needs a function of an episode (episode) or one of a group (group), and not both"
            )
        return self


_MOST_WEIGHT = 1e9  # sums and products of weights are finite
_OF_ONE_SOURCE = ("path", "environment", "subset", "split", "id", "epochs")


class DifficultyConfig(Settings):
    """How `sampler: difficulty` chooses tasks, by what their latest groups have solved."""

    solved_score: float = Field(
        default=1.0,
        allow_inf_nan=False,
        description="The lowest score with which an episode has solved its task.",
    )
    target: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="The solve rate at which learnable tasks are sampled most often.",
    )
    new: float = Field(
        default=0.5,
        ge=0,
        le=_MOST_WEIGHT,
        description="Weight of the tasks that have no group yet, in the order of uniform.",
    )
    learnable: float = Field(
        default=0.35,
        ge=0,
        le=_MOST_WEIGHT,
        description="Weight of the tasks that some episodes of the latest group solved.",
    )
    unsolved: float = Field(
        default=0.1,
        ge=0,
        le=_MOST_WEIGHT,
        description="Weight of the tasks that no episode of the latest group solved.",
    )
    solved: float = Field(
        default=0.05,
        ge=0,
        le=_MOST_WEIGHT,
        description="Weight of the tasks that every episode of the latest group solved.",
    )

    @model_validator(mode="after")
    def _begins(self) -> DifficultyConfig:
        if self.new <= 0:
            raise ValueError(
                "new must be above 0: at first every task is new, so only the first one would ever be sampled"
            )
        return self


class TasksConfig(Settings):
    """Where tasks are loaded from, and in which order training takes them."""

    path: str = Field(
        default="",
        description="A .jsonl, .json, .parquet or .csv file, a data set of the Hugging Face Hub, or a "
        "function: module:function or file.py:function.",
    )
    environment: EnvironmentConfig | None = Field(
        default=None, description="An environment's own tasks; the key `environment` of the run sets it."
    )
    subset: str | None = Field(default=None, description="Configuration name of a data set of the Hub.")
    split: str | None = Field(
        default=None,
        description="Split, for a data set of the Hub (default: train), a function or an environment. With "
        "episodes: train (default) or eval; turns of eval are trained on if they were sampled from the "
        "unmodified policy.",
    )
    id: str = Field(default="id", description="Column with a unique id; without it, rows are numbered.")
    epochs: int | None = Field(
        default=None, ge=1, description="Passes over the tasks; default: as many as the run needs."
    )
    difficulty: DifficultyConfig = Field(
        default_factory=DifficultyConfig, description="How sampler: difficulty chooses tasks."
    )


class MixedEnvironmentConfig(EnvironmentConfig):
    """One of several environments."""

    name: str = Field(
        default="",
        pattern=r"^(\w[\w.-]*)?$",
        description="The name under which metrics show it; empty: taken from the line, such as countdown.",
    )
    weight: float = Field(
        default=1.0, gt=0, le=_MOST_WEIGHT, description="Its share of the groups, relative to the others."
    )
    sampler: Literal["uniform", "difficulty"] = Field(
        default="uniform", description="The order of its tasks, as for data."
    )
    difficulty: DifficultyConfig = Field(
        default_factory=DifficultyConfig, description="How sampler: difficulty chooses tasks."
    )


class SourceConfig(TasksConfig):
    """One of several sources of tasks."""

    name: str = Field(
        pattern=r"^\w[\w.-]*$",
        description="The name, which tasks have as `data_source` and under which metrics show the source.",
    )
    weight: float = Field(
        default=1.0, gt=0, le=_MOST_WEIGHT, description="Its share of the groups, relative to the others."
    )
    sampler: Literal["uniform", "difficulty"] = Field(
        default="uniform", description="The order of its tasks, as for data."
    )

    @model_validator(mode="after")
    def _one_source(self) -> SourceConfig:
        if bool(self.path) == (self.environment is not None):
            raise ValueError(f"the source {self.name} needs a path or an environment, and not both")
        _check_difficulty(self, self.sampler)
        return self


class DataConfig(TasksConfig):
    """The source of tasks, or of recorded episodes to train on instead."""

    episodes: str = Field(
        default="",
        description="A store of recorded episodes (a file, a run's folder or a URL) to train on instead of "
        "rollouts of tasks; no engine is started.",
    )
    traffic: bool = Field(
        default=False,
        description="Serve the model at proxy.port, and train on the conversations of its users as soon as "
        "they have ended and have a reward; no agent is run. docs/serve-and-train.md.",
    )
    sampler: Literal["uniform", "difficulty", "mixture"] = Field(
        default="uniform",
        description="The order in which training takes tasks. uniform: each once in an epoch, shuffled. "
        "difficulty: by what the policy solves at present. mixture: from several sources by their weights. "
        "docs/data.md.",
    )
    sources: tuple[SourceConfig, ...] = Field(
        default=(), description="The sources of sampler: mixture, in place of path."
    )
    seed: int | None = Field(
        default=None, description="Seed of the order; default: the seed of the run, and 0 for evaluation."
    )

    @model_validator(mode="before")
    @classmethod
    def _sources_are_a_mixture(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("sources") and "sampler" not in given:
            return {**given, "sampler": "mixture"}
        return given

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if self.sources and self.sampler != "mixture":
            raise ValueError(
                f"with sources, sampler: {self.sampler} is a setting of each source; leave data.sampler out"
            )
        if self.sampler == "mixture" and not self.sources:
            raise ValueError("sampler: mixture needs sources")
        tasks = bool(self.path or self.sources) or self.environment is not None
        if self.traffic and (tasks or self.episodes):
            raise ValueError("traffic takes the place of tasks and of recorded episodes; give one of them")
        if not tasks and not self.episodes and not self.traffic:
            raise ValueError(
                "path (of tasks), sources (several), episodes (a store of recorded ones) or traffic (the "
                "conversations of users) is required"
            )
        if self.traffic and (self.split is not None or self.sampler != "uniform" or self.epochs is not None):
            raise ValueError("traffic is taken as it comes; leave split, sampler and epochs out")
        if self.environment is not None and (self.path or self.episodes):
            raise ValueError("environment has tasks of its own; give it, or path, or episodes")
        if self.episodes and self.split not in (None, "train", "eval"):
            raise ValueError(f"split of recorded episodes must be train or eval, got {self.split!r}")
        if self.episodes and (self.sampler != "uniform" or self.sources):
            raise ValueError("recorded episodes are trained on in their order; leave sampler and sources out")
        _check_difficulty(self, self.sampler)
        if self.sources:
            self._check_sources()
        return self

    def _check_sources(self) -> None:
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"the names of sources must differ, got {', '.join(names)}")
        fields = {name: TasksConfig.model_fields[name].default for name in _OF_ONE_SOURCE}
        of_one = [name for name, default in fields.items() if getattr(self, name) != default]
        if of_one:
            raise ValueError(f"with sources, {of_one[0]} is a setting of each source")


def _check_difficulty(config: TasksConfig, sampler: str) -> None:
    if sampler != "difficulty" and config.difficulty != DifficultyConfig():
        raise ValueError("difficulty has no effect without sampler: difficulty")
    if sampler == "difficulty" and config.epochs is not None:
        raise ValueError("sampler: difficulty takes no task equally often, so it has no epochs")


class EvalConfig(Settings):
    """Evaluation on held-out tasks: before, during and after training."""

    data: DataConfig
    episodes: int = Field(
        default=128, ge=1, description="The number of tasks; at most as many as the data has."
    )
    attempts: int = Field(
        default=1,
        ge=1,
        description="Episodes of each task, for avg@k, pass@k, pass^k and maj@k; more than one needs a "
        "temperature above 0.",
    )
    pass_score: float = Field(
        default=1.0,
        allow_inf_nan=False,
        description="The least score with which an episode has passed, for pass@k and pass^k.",
    )
    answer: str = Field(
        default="",
        description="A function of a finished episode that returns its answer as a string, or None, for "
        "maj@k: module:function or file.py:function.",
    )
    every: int | None = Field(
        default=None, ge=1, description="Also evaluate during training, every this many steps."
    )
    concurrency: int = Field(
        default=16, ge=1, description="Evaluation episodes at the same time, during training."
    )
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature; 0 is greedy.")

    @property
    def most_episodes(self) -> int:
        """The most episodes of one evaluation; data with fewer tasks has fewer."""
        return self.episodes * self.attempts

    @model_validator(mode="after")
    def _tasks_are_the_same_each_time(self) -> EvalConfig:
        if "difficulty" in (self.data.sampler, *(source.sampler for source in self.data.sources)):
            raise ValueError(
                "sampler: difficulty has no effect in eval.data; every evaluation has the same tasks"
            )
        return self

    @model_validator(mode="after")
    def _attempts_differ(self) -> EvalConfig:
        if self.attempts > 1 and self.temperature == 0:
            raise ValueError(
                f"attempts is {self.attempts}, but at temperature 0 all attempts at a task are the same; set "
                "eval.temperature above 0, for example eval.temperature=1"
            )
        return self
