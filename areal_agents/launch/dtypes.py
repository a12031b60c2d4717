"""Checks that engine and trainer compute in the same type; otherwise their logprobs differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from areal_agents.config import Config
from areal_agents.errors import ConfigError
from areal_agents.inference.sglang.server import GpuPlacement, serving_dtype
from areal_agents.launch.engine_memory import starts_engines


def with_trainer_dtype(config: Config) -> Config:
    """Return the configuration with the type of the engines, if it is known, for `trainer.dtype: auto`.

    An embedded engine on a CPU computes in float32, also beside a trainer on a GPU.
    """
    trainer, engine = config.trainer, config.engine
    if trainer.dtype != "auto" or not starts_engines(config):
        return config
    chosen = engine.dtype
    if chosen == "auto" and engine.kind == "embedded" and not engine.device.startswith("cuda"):
        chosen = "float32"
    return config.model_copy(update={"trainer": trainer.model_copy(update={"dtype": chosen})})


def check_dtypes(config: Config, placements: Sequence[GpuPlacement]) -> None:
    """Refuse engines that compute in another type than the trainer, unless both types are given.

    Raises:
        ConfigError: they would; the message names both keys.
    """
    trainer, engine = with_trainer_dtype(config).trainer, config.engine
    if not placements or "auto" not in (config.trainer.dtype, engine.dtype):
        return
    on_gpu = bool(placements[0].gpus)
    served: str = engine.dtype
    if engine.kind != "embedded":
        served = serving_dtype(engine, Path(config.model), placements[0])
    elif served == "auto":
        served = "bfloat16" if on_gpu else "float32"
    trained: str = trainer.dtype
    if trained == "auto":  # where the engines find GPUs, so does the trainer
        trained = (
            "bfloat16" if trainer.device == "cuda" or (trainer.device == "auto" and on_gpu) else "float32"
        )
    if "auto" not in (served, trained) and served != trained:
        raise ConfigError(
            f"engine.dtype: {engine.dtype} is {served} for this model and device, and trainer.dtype: "
            f"{config.trainer.dtype} is {trained}, so their logprobs would differ; set both to the same "
            "type, or set both to these types if that is intended"
        )
