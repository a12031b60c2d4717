"""The proxies that share a store, as one of them sees them: which exist, which are running, where they are.

The workers of one machine know one another by lock files (`identity.py`), and the proxies of a run on
several machines by the table of roles in the store (`places.py`). Everything else that concerns several
proxies is the same for both. Each process has a name of its own, which is in the store as the owner of its
open episodes.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from areal_agents.proxy.auth import new_episode_key


class Peers(Protocol):
    """One proxy's view of itself and of the others.

    Attributes:
        index: index of this proxy, from 0; one that is restarted keeps its index.
        count: number of proxies that the run has when all are running.
        owner: the name with which this process owns episodes.
        secret: proves to a proxy that a request comes from another one of the same run.
        spreads_openings: whether requests that open episodes are served by the proxies in turn; if not,
            something in front of them does that, and each serves the requests that reach it.
    """

    index: int
    count: int
    owner: str
    secret: str
    spreads_openings: bool

    def address(self, index: int) -> str | None:
        """Return the base URL of the process that has this index; None if none is running."""

    def owner_of(self, index: int) -> str | None:
        """Return the owner name of the process that has this index; None if none is running.

        A process that is started again can have the address of the earlier one, and never its name.
        """

    def is_alive(self, owner: str) -> bool:
        """Whether the process with this owner name is still running."""

    async def look_for(self, owner: str) -> None:
        """Look again at which proxies are running if this one may have started since the last look."""

    def index_of(self, owner: str | None) -> int | None:
        """Return the index of the process with an owner name, None for an owner of another run."""

    def measured(self) -> list[int]:
        """Return the indexes of the proxies whose metrics are added up."""

    async def refresh(self) -> None:
        """Look again at which proxies are running, after one has not answered."""


def home(key: str, count: int) -> int:
    """Return the index of the proxy that opens the episode with this key, of `count` proxies.

    The same proxy takes the episode over if its owner dies. The index depends only on the key and on the
    number of proxies, so a restart does not change it.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % count


def new_key(peers: Peers) -> str:
    """Return a new episode key whose `home` is this proxy."""
    while True:
        key = new_episode_key()
        if home(key, peers.count) == peers.index:
            return key


def homes(key: bytes, count: int) -> list[int]:
    """Return the proxies in the order in which they take over an episode without an owner.

    The order is that of rendezvous hashing: every proxy computes the same one, and each is the first for an
    equal share of keys.
    """
    return sorted(range(count), key=lambda index: _weight(key, index))


def is_first(peers: Peers) -> bool:
    """Whether no proxy with a lower index is running; the first one does what only one may do."""
    return all(peers.address(index) is None for index in range(peers.index))


def _weight(key: bytes, index: int) -> bytes:
    return hashlib.blake2b(key + b"\0" + str(index).encode(), digest_size=8).digest()
