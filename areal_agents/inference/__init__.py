"""Inference: the interface of an engine, and how to start one.

The embedded engine and a real SGLang server speak SGLang's native HTTP protocol and are driven by one
client; vLLM has a client of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_agents.lazy_imports import on_first_use

if TYPE_CHECKING:
    from areal_agents.inference.config import EmbeddedEngineConfig, EngineConfig
    from areal_agents.inference.engine import Engine, ModelInfo, OnTokens, PauseMode, PromptScores, Sampler
    from areal_agents.inference.engine_process import EngineProcess, running_engine
    from areal_agents.inference.sglang.client import SGLangEngine

__all__ = [
    "EmbeddedEngineConfig",
    "Engine",
    "EngineConfig",
    "EngineProcess",
    "ModelInfo",
    "OnTokens",
    "PauseMode",
    "PromptScores",
    "SGLangEngine",
    "Sampler",
    "running_engine",
]

# Every process reads the configuration of engines, and few of them speak to one.
__getattr__ = on_first_use(
    __name__,
    {
        "config": (
            "EmbeddedEngineConfig",
            "EngineConfig",
        ),
        "engine": (
            "Engine",
            "ModelInfo",
            "OnTokens",
            "PauseMode",
            "PromptScores",
            "Sampler",
        ),
        "engine_process": (
            "EngineProcess",
            "running_engine",
        ),
        "sglang.client": ("SGLangEngine",),
    },
)
