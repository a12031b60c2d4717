"""Derives the seeds of episodes from the run's seed, and fixes that of hashes where tasks are made."""

from __future__ import annotations

import hashlib

from areal_agents.core.completion import MAX_SEED

# Some packages generate tasks in the order of a set, which otherwise differs in every process.
FIXED_HASHES = {"PYTHONHASHSEED": "0"}


def episode_seed(run_seed: int, *of: str | int) -> int:
    """Return a seed from 0 to MAX_SEED, different for every `of`, for example (group, index, attempt)."""
    name = "/".join(map(repr, (run_seed, *of)))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") & MAX_SEED
