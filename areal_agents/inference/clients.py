"""Chooses the client of an engine by the kind of its server."""

from __future__ import annotations

from typing import Any, Literal

from areal_agents.inference.sglang.client import SGLangEngine
from areal_agents.inference.vllm.client import VLLMEngine

# What a server speaks: SGLang's protocol, which is also the embedded engine's, or vLLM's.
Protocol = Literal["sglang", "vllm"]
EngineClient = SGLangEngine | VLLMEngine


def protocol_of(kind: str) -> Protocol:
    """Return what engines of an `engine.kind` speak."""
    return "vllm" if kind == "vllm" else "sglang"


def connect(url: str, protocol: Protocol, **options: Any) -> EngineClient:
    """Return the client of the engine at `url`; `options` are those that both clients have."""
    return VLLMEngine(url, **options) if protocol == "vllm" else SGLangEngine(url, **options)
