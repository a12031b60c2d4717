"""The two sides of a canary: which conversations, and which replicas, belong to it.

The side of a conversation is a function of its id and the share alone. So it is the same in every process and
after every restart, it does not depend on what is said, and an episode keeps it as long as the share is the
same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

_BUCKETS = 2**32


def is_of_canary(episode_id: str, share: float) -> bool:
    """Whether an episode is one of the `share` of all episodes that the canary serves; "" is not."""
    if not episode_id:
        return False
    digest = hashlib.blake2b(episode_id.encode(), digest_size=4).digest()
    return int.from_bytes(digest) < share * _BUCKETS


def canary_engines(urls: Sequence[str], share: float) -> tuple[str, ...]:
    """Return the engines of the canary, the last ones: their share of all, at least one, and never all.

    Raises ValueError if there are fewer than two engines.
    """
    if len(urls) < 2:
        raise ValueError(f"a canary needs an engine of its own beside the others, got {len(urls)} engines")
    count = min(max(1, round(share * len(urls))), len(urls) - 1)
    return tuple(urls[-count:])
