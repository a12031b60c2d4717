"""Inference: the interface of an engine, and how to start one.

Everything speaks SGLang's native HTTP protocol, so the embedded engine and a real SGLang server are driven
by one client.
"""

from __future__ import annotations

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
