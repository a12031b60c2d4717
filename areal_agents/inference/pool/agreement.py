"""Checks that all replicas of a pool serve the same model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from areal_agents.errors import ConfigError, EngineError
from areal_agents.inference.engine import Engine, ModelInfo

logger = logging.getLogger(__name__)

_START_S = 5.0  # longest wait for a replica's answer before the proxy starts without it


def difference_of(model: tuple[str, ModelInfo], info: ModelInfo) -> str:
    """Describe how an engine's model differs from the expected (engine name, model info); "" if it does
    not."""
    where, expected = model
    for what, found, wanted in (
        ("a vocabulary of", info.vocab_size, expected.vocab_size),
        ("a context of", info.max_context, expected.max_context),
        ("a model of type", info.architecture, expected.architecture),
    ):
        if found and wanted and found != wanted:
            return f"it serves {what} {found}, and {where} {wanted}: all replicas must serve one model"
    return ""


async def other_weights(first: Engine, model: tuple[str, ModelInfo], engine: Engine, info: ModelInfo) -> str:
    """Describe how the weights of two engines with the same version but different model folders differ.

    The checksums are compared; the result is "" if they agree or one cannot be computed now.
    """
    where, expected = model
    if info.version != expected.version or Path(info.model_path).name == Path(expected.model_path).name:
        return ""
    try:
        ours, theirs = await asyncio.gather(first.checksum(), engine.checksum())
    except EngineError as error:
        logger.warning(
            "%s serves %s, another engine %s: %s", where, expected.model_path, info.model_path, error
        )
        return ""
    if ours == theirs:
        return ""
    return (
        f"it serves {info.model_path}, and {where} {expected.model_path}, which has other weights: "
        "all replicas must serve one model"
    )


async def refuse_other_models(names: Sequence[str], engines: Sequence[Engine]) -> None:
    """Raise ConfigError if two of the engines that answer now serve different models."""
    infos = await asyncio.gather(*(_info(engine) for engine in engines))
    found = [(name, engine, info) for name, engine, info in zip(names, engines, infos, strict=True) if info]
    for name, engine, info in found[1:]:
        first_name, first_engine, first = found[0]
        model = first_name, first
        if difference := difference_of(model, info) or await other_weights(first_engine, model, engine, info):
            raise ConfigError(f"engine {name}: {difference}")


async def _info(engine: Engine) -> ModelInfo | None:
    try:
        async with asyncio.timeout(_START_S):
            return await engine.model_info()
    except (EngineError, TimeoutError):  # it may start later, and is checked then
        return None
