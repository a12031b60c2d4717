"""Profiles: settings that suit a kind of machine. A profile is a set of ordinary keys, below all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROFILES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    # One consumer card: an adapter of a model of up to 1.7B, and the engine asleep while a step is trained.
    "24gb": {
        "engine": {"kind": "sglang", "colocate": "sleep", "memory_fraction": 0.6, "max_context": 8192},
        "trainer": {"device": "cuda", "ranks": 1, "lora": {"rank": 32}, "lr": 2e-5},
    },
    # One H100: all weights of a model of up to 1.7B; with `trainer.lora`, an adapter of one of up to 14B.
    "80gb": {
        "engine": {"kind": "sglang", "colocate": "sleep", "memory_fraction": 0.5, "max_context": 32768},
        "trainer": {"device": "cuda", "ranks": 1},
    },
    # Eight H100: half of them train all weights of a model of up to 8B, the others generate.
    "node": {
        "engine": {"kind": "sglang", "replicas": 4, "max_context": 32768},
        "trainer": {"device": "cuda", "ranks": 4, "publish": {"transport": "broadcast"}},
    },
}


def with_profile(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings with those of their profile below them; what is given wins, key by key."""
    name = given.get("profile")
    if not isinstance(name, str) or name not in PROFILES:
        return given
    return _merged(PROFILES[name], given)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for key, value in below.items():
        if isinstance(value, Mapping) and isinstance(above.get(key), Mapping):
            merged[key] = _merged(value, above[key])
    return merged
