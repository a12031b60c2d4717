"""The costs of a model and of an episode on one GPU or engine, from the inputs by arithmetic.

Engines are limited by the memory's bandwidth when they decode and by FLOPs when they read prompts; the
trainer is limited by FLOPs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from areal_agents.simulate.parameters import Distribution
from areal_agents.simulate.scaling.inputs import ModelInputs, ScalingInputs

GIB = 2**30
BYTES = 2  # of a weight, key or value in bfloat16
_TRAINED_BYTES = 16  # of a trained weight: float32 weight, gradient and two moments
_PASSES = 4  # forward passes that training a token costs: one for the proximal logprobs, three for a step
_SHARD_BYTES = (
    8  # of a weight that a rank exchanges in a micro-batch: gathered twice in bfloat16, and its gradient
)
_CUDA_GIB, _CUDA_SHARE = 1.5, 0.03  # of a trainer's GPU, see docs/gpus.md
_ADAPTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Sizes and FLOPs of a model.

    Attributes:
        parameters: number of weights.
        weight_bytes: of the published weights.
        cache_bytes: keys and values of one token.
        adapter_bytes: a published adapter on every matrix of the layers.
        row_flops, pair_flops, prediction_flops: of a forward pass, for a token in the layers, for each token
            that it attends to, and for its logits.
    """

    parameters: float
    weight_bytes: float
    cache_bytes: float
    adapter_bytes: float
    row_flops: float
    pair_flops: float
    prediction_flops: float

    def forward_flops(self, *, rows: float, predictions: float) -> float:
        """FLOPs of a forward pass over one sequence of `rows` tokens, of which `predictions` have logits."""
        pairs = rows**2 / 2
        return self.row_flops * rows + self.pair_flops * pairs + self.prediction_flops * predictions


def model_costs(model: ModelInputs, *, lora_rank: int) -> ModelCosts:
    """Return the costs of a model."""
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    matrices = [
        (model.hidden, query), (model.hidden, key), (model.hidden, key), (query, model.hidden),
        (model.hidden, model.intermediate), (model.hidden, model.intermediate),
        (model.intermediate, model.hidden),
    ]  # fmt: skip
    in_layers = model.layers * sum(width * height for width, height in matrices)
    head = model.hidden * model.vocab
    parameters = in_layers + 2 * head
    return ModelCosts(
        parameters=parameters,
        weight_bytes=BYTES * parameters,
        cache_bytes=2 * BYTES * model.layers * key,
        adapter_bytes=_ADAPTER_BYTES
        * lora_rank
        * model.layers
        * sum(width + height for width, height in matrices),
        row_flops=2 * in_layers,
        pair_flops=4 * model.layers * query,
        prediction_flops=2 * head,
    )


@dataclass(frozen=True, slots=True)
class EpisodeCosts:
    """What one episode is.

    Attributes:
        sampled: sampled tokens of a call, on average.
        tool_s: seconds between two calls, on average.
        prompt: prompt of a call, on average over the calls.
        context: tokens whose keys and values a running call holds, on average.
        rows: tokens of the whole episode, which is one sample of the trainer.
        sampled_tokens: sampled tokens of the episode.
        new_prompt: prompt tokens that an engine has to read for each sampled token, with a cached prefix.
    """

    sampled: float
    tool_s: float
    prompt: float
    context: float
    rows: float
    sampled_tokens: float
    new_prompt: float


def episode_costs(inputs: ScalingInputs) -> EpisodeCosts:
    """Return what an episode costs on average."""
    sampled, turns = mean(inputs.tokens), inputs.turns
    prompt = inputs.first_prompt_tokens + (turns - 1) / 2 * (sampled + inputs.new_prompt_tokens)
    prompts = inputs.first_prompt_tokens + (turns - 1) * inputs.new_prompt_tokens
    return EpisodeCosts(
        sampled=sampled,
        tool_s=mean(inputs.tool_s),
        prompt=prompt,
        context=prompt + sampled / 2,
        rows=prompts + turns * sampled,
        sampled_tokens=turns * sampled,
        new_prompt=prompts / (turns * sampled),
    )


def mean(values: Distribution) -> float:
    """Return the mean of a distribution, with its cap."""
    if values.sigma == 0 or values.mean == 0:
        return values.mean if values.cap is None else min(values.mean, values.cap)
    if values.cap is None:
        return values.mean
    above = (math.log(values.cap / values.mean) + values.sigma**2 / 2) / values.sigma
    return values.mean * _normal(above - values.sigma) + values.cap * (1 - _normal(above))


def _normal(value: float) -> float:
    return (1 + math.erf(value / math.sqrt(2))) / 2


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """One engine.

    Attributes:
        slots: episodes whose keys and values fit.
        base_s, per_request_s: a decoding step takes base_s + per_request_s · running requests; the reading of
            new prompts is in per_request_s.
        refill_s: the time in which it reads the contexts of all its slots again, after a swap.
    """

    slots: int
    base_s: float
    per_request_s: float
    refill_s: float

    def running(self, episodes: float, episode: EpisodeCosts) -> float:
        """Return how many of its episodes are in a call, while the others are in a tool."""
        low, high = 0.0, episodes
        for _ in range(60):  # the share in calls falls as fewer run, because they are then faster
            middle = (low + high) / 2
            call_s = episode.sampled * (self.base_s + self.per_request_s * middle)
            if middle < episodes * call_s / (call_s + episode.tool_s):
                low = middle
            else:
                high = middle
        return low

    def tokens_per_s(self, episodes: float, episode: EpisodeCosts) -> float:
        """Return the sampled tokens per second with so many episodes at a time."""
        running = self.running(min(episodes, self.slots), episode)
        return running / (self.base_s + self.per_request_s * running)


def engine_costs(inputs: ScalingInputs, model: ModelCosts, episode: EpisodeCosts) -> EngineCosts:
    """Return the costs of an engine. Raises ValueError if the weights leave no room for an episode."""
    gpus = inputs.model.gpus_per_engine
    memory = gpus * inputs.gpu_gib * GIB * inputs.cache_share - model.weight_bytes
    slots = math.floor(memory / (episode.context * model.cache_bytes))
    if slots < 1:
        raise ValueError(
            f"model.gpus_per_engine: on {gpus} GPUs of {inputs.gpu_gib:g} GiB the weights leave no room for "
            f"an episode of {episode.context:,.0f} tokens; use more"
        )
    bandwidth = gpus * inputs.gpu_bandwidth * inputs.decode_share
    flops = gpus * inputs.gpu_flops * inputs.prefill_share
    # A new prompt attends to the whole context, a refilled one on average to half of it.
    new_s = episode.new_prompt * (model.row_flops + model.pair_flops * episode.context) / flops
    refilled = model.forward_flops(rows=episode.context, predictions=0)
    return EngineCosts(
        slots=slots,
        base_s=inputs.decode_s + model.weight_bytes / bandwidth,
        per_request_s=inputs.request_s + episode.context * model.cache_bytes / bandwidth + new_s,
        refill_s=slots * refilled / flops,
    )


@dataclass(frozen=True, slots=True)
class TrainerCosts:
    """The trainer on any number of GPUs.

    Attributes:
        gpu_s_per_episode: computation of one GPU.
        microbatch_s: computation of a micro-batch.
        least_gpus: the fewest GPUs whose memory is enough.
    """

    gpu_s_per_episode: float
    microbatch_s: float
    least_gpus: int
    _shard_bytes: float
    _within: tuple[int, float]  # GPUs of a node, and the bandwidth between them
    _between: float

    def exchange_s(self, gpus: int) -> float:
        """Return the seconds that the shards of a micro-batch travel, which computation may hide."""
        node, nvlink = self._within
        return 0.0 if gpus == 1 else self._shard_bytes / (nvlink if gpus <= node else self._between)

    def batch_s(self, gpus: int, episodes: float) -> float:
        """Return the seconds of a batch."""
        exposed = max(1.0, self.exchange_s(gpus) / self.microbatch_s)
        return exposed * episodes * self.gpu_s_per_episode / gpus


def trainer_costs(inputs: ScalingInputs, model: ModelCosts, episode: EpisodeCosts) -> TrainerCosts:
    """Return the costs of the trainer. Raises ValueError if no number of GPUs is enough."""
    forward = model.forward_flops(rows=episode.rows, predictions=episode.sampled_tokens)
    flops = inputs.gpu_flops * inputs.trainer_share
    step_flops_per_row = (_PASSES - 1) * forward / episode.rows
    room = inputs.gpu_gib * (1 - _CUDA_SHARE) - _CUDA_GIB - inputs.model.trainer_gib
    if room <= 0:
        raise ValueError(f"model.trainer_gib: {inputs.model.trainer_gib:g} GiB do not fit in a GPU")
    return TrainerCosts(
        gpu_s_per_episode=_PASSES * forward / flops,
        microbatch_s=inputs.microbatch_tokens * step_flops_per_row / flops,
        least_gpus=math.ceil(_TRAINED_BYTES * model.parameters / GIB / room),
        _shard_bytes=_SHARD_BYTES * model.parameters,
        _within=(inputs.gpus_per_node, inputs.nvlink * inputs.network_share),
        _between=inputs.network * inputs.network_share,
    )
