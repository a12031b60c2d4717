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

logger = logging.getLogger(__name__)

_POLL_S = 0.5

# Settings that affect the computation and that the weights' shapes do not show, or show only too late.
_DECISIVE = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "layer_norm_eps", "rope_parameters",
    "partial_rotary_factor", "sliding_window", "layer_types", "attention_bias", "tie_word_embeddings",
    "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
    "norm_topk_prob",
)  # fmt: skip


class WaitLimit:
    """Limits how long one version waits for engines to come back, over all of its waits.

    Args:
        limit_s: time limit, counted from the first loss.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._deadline: float | None = None

    @property
    def is_used(self) -> bool:
        """Whether engines were lost."""
        return self._deadline is not None

    async def wait(self, pause_s: float, lost: Exception) -> None:
        """Wait before the engines are tried again. Raise `lost` if the time limit has passed."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._limit_s
            if self._limit_s:
                logger.warning("a version waits up to %g s for an engine: %s", self._limit_s, lost)
        if now >= self._deadline:
            raise lost
        await asyncio.sleep(min(pause_s, self._deadline - now))


@dataclass(frozen=True, slots=True)
class Reachable:
    """The engines that answer.

    Attributes:
        infos: what each engine serves.
        were_lost: whether the version had to wait for engines; another process may meanwhile have updated
            them to it.
    """

    infos: Mapping[Engine, ModelInfo] = field(default_factory=dict)
    were_lost: bool = False


async def check_engines(fleet: Fleet, trained: PretrainedConfig, wait_limit: WaitLimit) -> Reachable:
    """Check all engines of `fleet`, and remove those that do not answer or that serve another model.

    Raises:
        EngineUnavailable: no engine answered in time.
        EngineError: every engine that answers serves a model other than `trained`.
    """

    async def one(engine: Engine) -> ModelInfo:
        info = await engine.model_info()
        if fault := _other_model(info, trained):
            raise EngineError(f"{engine.base_url} does not serve the model that is trained: {fault}")
        return info

    while True:
        try:
            infos = await fleet.each(one)
        except EngineUnavailable as error:
            await wait_limit.wait(_POLL_S, error)
        else:
            return Reachable(dict(zip(fleet.engines, infos, strict=True)), wait_limit.is_used)


def _other_model(info: ModelInfo, trained: PretrainedConfig) -> str | None:
    """Describe how the model that an engine serves differs from the trained one; None if no difference is
    found. A real server would exit on weights of other shapes, and would compute different results with
    another rope or norm."""
    trained = trained.get_text_config()
    if info.vocab_size != trained.vocab_size:
        return f"a vocabulary of {info.vocab_size}, not {trained.vocab_size}"
    try:
        served = AutoConfig.from_pretrained(info.model_path, local_files_only=True).get_text_config()
    except (OSError, ValueError, KeyError):
        # the folder is on another machine, or its config is of an unknown kind
        return None
    for name in _DECISIVE:
        have, want = getattr(served, name, None), getattr(trained, name, None)
        if have is not None and want is not None and have != want:
            return f"{name} {have}, not {want}"
    return None
