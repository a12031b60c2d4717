"""Checks before a delivery which engines answer, and whether they serve the model that is trained.

If no engine answers, the version waits until the process that started the engines has restarted one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import AutoConfig, PretrainedConfig

from areal_agents.errors import EngineError, EngineUnavailable
from areal_agents.inference.engine import Engine, ModelInfo
from areal_agents.training.publish.fleet import Fleet

log = logging.getLogger(__name__)

_LOOK_S = 0.5

# What the weights' shapes do not show, or show only when it is too late, and what is computed follows from.
_DECISIVE = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "layer_norm_eps", "rope_parameters",
    "partial_rotary_factor", "sliding_window", "layer_types", "attention_bias", "tie_word_embeddings",
    "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
    "norm_topk_prob",
)  # fmt: skip


class Patience:
    """The time that one version has for engines to come back; all of its waits count together.

    Args:
        limit_s: from the first loss.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._deadline: float | None = None

    @property
    def is_used(self) -> bool:
        """Whether engines were lost."""
        return self._deadline is not None

    async def wait(self, pause_s: float, lost: Exception) -> None:
        """Wait before the engines are tried again. Raises `lost` if their time is over."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._limit_s
            if self._limit_s:
                log.warning("a version waits up to %g s for an engine: %s", self._limit_s, lost)
        if now >= self._deadline:
            raise lost
        await asyncio.sleep(min(pause_s, self._deadline - now))


@dataclass(frozen=True, slots=True)
class Reachable:
    """The engines that answer.

    Attributes:
        workers: the tensor-parallel processes of each.
        were_lost: whether the version had to wait for them: others may have brought them to it meanwhile.
    """

    workers: Mapping[Engine, int] = field(default_factory=dict)
    were_lost: bool = False


async def check_engines(fleet: Fleet, trained: PretrainedConfig, patience: Patience) -> Reachable:
    """Check all engines of `fleet`, and leave out those that do not answer or serve another model.

    Raises:
        EngineUnavailable: none was there in time.
        EngineError: every one that is there serves another model than `trained`.
    """

    async def one(engine: Engine) -> int:
        info = await engine.model_info()
        if fault := _other_model(info, trained):
            raise EngineError(f"{engine.base_url} does not serve the model that is trained: {fault}")
        return info.workers

    while True:
        try:
            workers = await fleet.each(one)
        except EngineUnavailable as error:
            await patience.wait(_LOOK_S, error)
        else:
            return Reachable(dict(zip(fleet.engines, workers, strict=True)), patience.is_used)


def _other_model(info: ModelInfo, trained: PretrainedConfig) -> str | None:
    """What shows that an engine serves another model; None if nothing does. A real server would end itself
    over weights of other shapes, and compute something else from these with another rope or norm."""
    trained = trained.get_text_config()
    if info.vocab_size != trained.vocab_size:
        return f"a vocabulary of {info.vocab_size}, not {trained.vocab_size}"
    try:
        served = AutoConfig.from_pretrained(info.model_path, local_files_only=True).get_text_config()
    except (OSError, ValueError, KeyError):  # on another machine, or of no kind that is known here
        return None
    for name in _DECISIVE:
        have, want = getattr(served, name, None), getattr(trained, name, None)
        if have is not None and want is not None and have != want:
            return f"{name} {have}, not {want}"
    return None
