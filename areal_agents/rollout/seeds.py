"""Derives the seeds of episodes from the run's seed."""

from __future__ import annotations

import hashlib

from areal_agents.core.completion import MAX_SEED


def episode_seed(run_seed: int, *of: str | int) -> int:
    """Return a seed from 0 to MAX_SEED, different for every `of`, for example (group, index, attempt)."""
    name = "/".join(map(repr, (run_seed, *of)))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") & MAX_SEED
