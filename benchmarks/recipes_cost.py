"""`python -m benchmarks recipes`: what the GPU configurations of examples/ take, computed and not run.

The batch, the steps and the evaluations come from a recipe's configuration; what an episode consists of is
assumed, in `RECIPES`; the speed of a GPU comes from `areal_agents.simulate.hardware`. The rest is arithmetic,
in `estimate`. docs/recipes.md has what this prints, and each README of a recipe has its `line`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agents.algorithms.presets import preset_values
from areal_agents.config.files import read_file
from areal_agents.config.profiles import with_profile
from areal_agents.inference.config import EngineConfig
from areal_agents.rollout.config import RolloutConfig
from areal_agents.simulate.hardware import (
    H100,
    MODELS,
    RTX_4090,
    Gpu,
    Model,
    decode_step_s,
    most_running,
    prefill_s,
    train_s,
)

EXAMPLES = Path(__file__).parents[1] / "examples"
START_S = 900.0  # a run's start and end: loading, CUDA graphs, exporting
SWITCH_S = {
    "node": 5.0,
    "24gb": 15.0,
}  # of each step: publishing; with one GPU also the engine's sleep and waking
ENGINE_MEMORY = {"node": 0.85, "24gb": 0.6}  # of the GPU of an engine
# The share of groups whose episodes all score the same. algorithm.refill_equal_groups plays others in their
# place; without it they count as trained here.
EQUAL_GROUPS = 0.4
HOUR = 3600.0
PAGE = "../../docs/recipes.md#time-and-cost-on-gpus-estimated-not-run"  # from a README


@dataclass(frozen=True, slots=True)
class Episode:
    """What an episode consists of, on average over a run. All of it is assumed.

    Attributes:
        calls: of the model. prompt: tokens of the first one. sampled: tokens of each reply.
        between, wait_s: tokens that come between two calls, and the seconds until they do.
    """

    calls: float
    prompt: float
    sampled: float
    between: float = 0.0
    wait_s: float = 0.0

    @property
    def replies(self) -> float:
        """Sampled tokens."""
        return self.calls * self.sampled

    @property
    def read(self) -> float:
        """Tokens that the engine reads and did not sample."""
        return self.prompt + (self.calls - 1) * self.between

    @property
    def tokens(self) -> float:
        """Tokens of the whole sequence, which the trainer computes."""
        return self.read + self.replies

    @property
    def context(self) -> float:
        """Tokens that a running request has, on average."""
        return (self.prompt + self.tokens) / 2


@dataclass(frozen=True, slots=True)
class Recipe:
    """A configuration, and what is assumed about its episodes.

    Attributes:
        further_gpus: GPUs of the same kind besides those that run it, for `serves`.
    """

    path: str
    episode: Episode
    further_gpus: int = 0
    serves: str = ""

    @property
    def folder(self) -> str:
        """Its folder in examples/."""
        return self.path.partition("/")[0]

    @property
    def file(self) -> str:
        """Its file there."""
        return self.path.partition("/")[2]


_GSM8K = Episode(1, prompt=120, sampled=300)
_SEARCH = Episode(3.2, prompt=200, sampled=30, between=120)
RECIPES = (
    Recipe("math/config.24gb.yaml", _GSM8K),
    Recipe("math/config.node.yaml", _GSM8K),
    Recipe("math/ppo.24gb.yaml", _GSM8K),
    Recipe("math/ppo.node.yaml", _GSM8K),
    Recipe("math/zero.node.yaml", Episode(1, prompt=170, sampled=400)),
    Recipe("math/stages.node.yaml", Episode(1, prompt=150, sampled=4_000)),
    Recipe("multi_turn_math/config.24gb.yaml", Episode(1.3, prompt=120, sampled=300, between=30)),
    Recipe("multi_turn_math/config.node.yaml", Episode(1.3, prompt=120, sampled=300, between=30)),
    Recipe("tool_math/config.24gb.yaml", Episode(2, prompt=300, sampled=200, between=40, wait_s=0.2)),
    Recipe("tool_math/config.node.yaml", Episode(3, prompt=350, sampled=700, between=80, wait_s=0.5)),
    Recipe("code/config.24gb.yaml", Episode(2.2, prompt=700, sampled=600, between=150, wait_s=1)),
    Recipe("code/config.node.yaml", Episode(1.8, prompt=700, sampled=7_000, between=200, wait_s=1)),
    Recipe("repair_tasks/config.24gb.yaml", Episode(7, prompt=1_000, sampled=120, between=150, wait_s=0.5)),
    Recipe("repair_tasks/config.node.yaml", Episode(7, prompt=1_000, sampled=600, between=150, wait_s=0.5)),
    Recipe("deep_search/config.24gb.yaml", Episode(6, prompt=500, sampled=350, between=600, wait_s=0.3)),
    Recipe("deep_search/config.node.yaml", Episode(16, prompt=500, sampled=500, between=900, wait_s=0.5)),
    Recipe("conversation/config.24gb.yaml", Episode(10, prompt=1_400, sampled=60, between=100)),
    Recipe(
        "conversation/config.node.yaml",
        Episode(10, prompt=1_400, sampled=500, between=100, wait_s=2),
        further_gpus=2,
        serves="the customer, Qwen3-32B",
    ),
    Recipe("games/config.24gb.yaml", Episode(3, prompt=400, sampled=300, between=100)),
    Recipe("games/config.node.yaml", Episode(4, prompt=500, sampled=2_500, between=150)),
    Recipe("distill/config.24gb.yaml", _SEARCH),
    Recipe("distill/config.node.yaml", _SEARCH),
    Recipe("distill/sft.24gb.yaml", _SEARCH),
    Recipe("distill/sft.node.yaml", _SEARCH),
    Recipe("distill/on_policy.24gb.yaml", _SEARCH, further_gpus=1, serves="the teacher, Qwen3-8B"),
    Recipe("distill/on_policy.node.yaml", _SEARCH),
    Recipe("distill/dpo.24gb.yaml", _SEARCH),
    Recipe("distill/dpo.node.yaml", _SEARCH),
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time and the cost of a run; seconds are those of one step."""

    recipe: Recipe
    model: str
    gpu: Gpu
    gpus: int
    batch: int
    steps: int
    generation_s: float
    training_s: float
    step_s: float
    evaluations_s: float  # of the whole run

    @property
    def hours(self) -> float:
        """Of the whole run."""
        return (START_S + self.steps * self.step_s + self.evaluations_s) / HOUR

    @property
    def gpu_hours(self) -> float:
        """Of all GPUs, of those too that serve something else for it."""
        return self.hours * self.gpus

    @property
    def dollars(self) -> float:
        """The rent of these."""
        return self.gpu_hours * self.gpu.dollars

    def said(self) -> str:
        """Time and cost in words."""
        time, cost = _rounded(self.hours), _rounded(self.dollars)
        return f"about {time} hours and {cost} dollars for `{self.recipe.file}`"


def estimate(recipe: Recipe) -> Estimate:
    """Compute one configuration."""
    given = with_profile(read_file(EXAMPLES / recipe.path))
    kind, episode = given["profile"], recipe.episode
    gpu = RTX_4090 if kind == "24gb" else H100
    rollout, trainer = RolloutConfig(**given["rollout"]), given["trainer"]
    engine, algorithm = EngineConfig(**given["engine"]), _algorithm(given)
    model, ranks = MODELS[given["model"]], trainer["ranks"]
    recorded = "episodes" in given.get("data", {})
    batch = rollout.groups * (
        rollout.group_size if not recorded else 2 if algorithm["preset"] == "dpo" else 1
    )
    passes = _train_passes(given, algorithm, model)
    training_s = train_s(model, gpu, batch * episode.tokens, passes=passes) / ranks
    rate = generation_s = 0.0  # without recorded episodes: episodes per second
    if not recorded:
        in_flight = rollout.concurrency or engine.sequences
        if rollout.max_staleness is not None:
            in_flight = min(in_flight, (rollout.max_staleness + 1) * batch)
        rate = _episodes_per_s(
            model, gpu, episode, in_flight=in_flight, engines=engine.replicas, share=ENGINE_MEMORY[kind]
        )
        played = batch / (1 - EQUAL_GROUPS) if algorithm.get("refill_equal_groups") else batch
        # After a swap the engines read again what their running requests have.
        again = prefill_s(model, gpu, in_flight * episode.context) / engine.replicas
        generation_s = played / rate + again
    together = generation_s + training_s if kind == "24gb" else max(generation_s, training_s)
    evaluations_s = _evaluated(given) / rate if rate else 0.0
    return Estimate(
        recipe,
        model=given["model"],
        gpu=gpu,
        gpus=(1 if kind == "24gb" else 8) + recipe.further_gpus,
        batch=batch,
        steps=trainer["steps"],
        generation_s=generation_s,
        training_s=training_s,
        step_s=together + SWITCH_S[kind],
        evaluations_s=evaluations_s,
    )


def _algorithm(given: Mapping[str, Any]) -> Mapping[str, Any]:
    named = given.get("algorithm", {})
    named = {"preset": named} if isinstance(named, str) else named
    preset = named.get("preset", "decoupled_ppo")
    return {**preset_values(preset), **named, "preset": preset}


def _train_passes(given: Mapping[str, Any], algorithm: Mapping[str, Any], model: Model) -> float:
    """FLOPs of a step for each token and parameter of the policy: other models count by their size."""
    if algorithm["preset"] == "sft":
        return 6.0
    passes = 8.0  # training, and the logprobs of the proximal policy, or of the reference policy of DPO
    if algorithm.get("kl_in", "none") != "none":
        passes += 2.0
    if algorithm.get("estimator") == "gae":
        critic = MODELS[given["trainer"].get("critic_model", given["model"])]
        passes += 8.0 * critic.parameters / model.parameters  # its values, and its training
    if "teacher_model" in given["trainer"]:
        passes += 2.0 * MODELS[given["trainer"]["teacher_model"]].parameters / model.parameters
    return passes


def _episodes_per_s(
    model: Model, gpu: Gpu, episode: Episode, *, in_flight: int, engines: int, share: float
) -> float:
    """Episodes that all engines together complete in a second.

    Args:
        in_flight: episodes at a time, some of which wait for what comes between two calls.
    """
    room = most_running(model, gpu, context=episode.context, share=share)
    waiting_s = (episode.calls - 1) * episode.wait_s
    running = min(in_flight / engines, room)
    for _ in range(100):  # an episode takes longer the more of them run; this converges
        step_s = decode_step_s(model, gpu, running=running, context=episode.context)
        sampling_s = episode.replies * step_s
        busy = sampling_s / (sampling_s + waiting_s)
        running = (running + min(in_flight / engines * busy, room)) / 2
    return engines / (episode.replies * step_s / running + prefill_s(model, gpu, episode.read))


def _evaluated(given: Mapping[str, Any]) -> int:
    """Episodes of all evaluations: before, during and after training."""
    if "eval" not in given:
        return 0
    evaluation = given["eval"]
    during = (given["trainer"]["steps"] - 1) // evaluation["every"]
    return (during + 2) * evaluation["episodes"] * evaluation.get("attempts", 1)


def tables() -> Iterator[str]:
    """The lines of docs/recipes.md: the assumed episodes, and the estimates."""
    yield "| configuration | calls | first prompt | a reply | between two calls | tokens in all |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for recipe in RECIPES:
        episode = recipe.episode
        between = "" if episode.calls == 1 else f"{episode.between:,.0f}"
        if episode.wait_s:
            between += f", {episode.wait_s:g} s"
        yield (
            f"| {recipe.path.removesuffix('.yaml')} | {episode.calls:g} | {episode.prompt:,.0f} | "
            f"{episode.sampled:,.0f} | {between} | {episode.tokens:,.0f} |"
        )
    yield ""
    yield (
        "| configuration | model, GPUs | episodes a step | generation, s | training, s | a step, s | steps | "
        "hours | GPU-hours | dollars |"
    )
    yield f"|{' --- |' * 10}"
    for recipe in RECIPES:
        found = estimate(recipe)
        machine = f"{found.gpus - recipe.further_gpus} × {found.gpu.name}"
        if recipe.further_gpus:
            machine += f", {recipe.further_gpus} for {recipe.serves}"
        generation = _rounded(found.generation_s) if found.generation_s else ""
        cells = (
            recipe.path.removesuffix(".yaml"),
            f"{found.model.rpartition('/')[2]}, {machine}",
            f"{found.batch:,}",
            generation,
            _rounded(found.training_s),
            _rounded(found.step_s),
            f"{found.steps:,}",
            *map(_rounded, (found.hours, found.gpu_hours, found.dollars)),
        )
        yield f"| {' | '.join(cells)} |"


def line(folder: str) -> str:
    """The line of a recipe's README, with its two main configurations."""
    found = [estimate(recipe) for recipe in RECIPES if recipe.folder == folder]
    said = " and ".join(one.said() for one in found if one.recipe.file.startswith("config."))
    return f"Time and cost on GPUs: {said}: [estimated, not run]({PAGE})."


def _rounded(value: float) -> str:
    """Two digits are more than an estimate has."""
    return f"{float(f'{value:.2g}'):,g}"


def run() -> None:
    """Print the tables, and the line of each README."""
    print(*tables(), sep="\n")
    for folder in dict.fromkeys(recipe.folder for recipe in RECIPES):
        print(f"\nexamples/{folder}/README.md: {line(folder)}")
