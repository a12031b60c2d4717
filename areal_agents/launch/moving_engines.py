"""Keeps the trainer's clients at the addresses of their engines, in a run on several machines."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from areal_agents.errors import StoreError
from areal_agents.inference.clients import EngineClient
from areal_agents.inference.pool import move_engines
from areal_agents.store import Store

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


@contextmanager
def following_engines(store: Store, engines: Sequence[EngineClient]) -> Iterator[None]:
    """Send the requests of each client to the address that its engine has in the store, within the block."""
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_LOOK_S):
            try:
                move_engines(engines, store.addresses("engine"))
            except StoreError as error:
                logger.warning("the addresses of the engines cannot be read: %s", error)

    thread = threading.Thread(target=follow, name="engine-addresses", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
