"""Follows engines that are started again at other addresses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from areal_agents.errors import StoreError

logger = logging.getLogger(__name__)

LOOK_S = 1.0


class MovableClient(Protocol):
    """The client of an engine, which can be sent to another address."""

    @property
    def base_url(self) -> str:
        """The address of the engine."""

    def move_to(self, base_url: str) -> None:
        """Send every further request to another address."""


@contextmanager
def following_engines(
    engines: Sequence[MovableClient], read: Callable[[], Mapping[int, str]]
) -> Iterator[None]:
    """Send the requests of each client to the present address of its engine, within the block.

    A thread reads the addresses once a second, also while an engine does not answer.

    Args:
        engines: the client of each engine.
        read: returns the present addresses by the index of the engine; one that is missing stays as it is.
    """
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(LOOK_S):
            try:
                move_engines(engines, read())
            except StoreError as error:
                logger.warning("the addresses of the engines cannot be read: %s", error)

    thread = threading.Thread(target=follow, name="engine-addresses", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def move_engines(engines: Sequence[MovableClient], addresses: Mapping[int, str]) -> None:
    """Send the further requests of each client to the address of its engine."""
    for index, engine in enumerate(engines):
        address = addresses.get(index)
        if address is not None and address.rstrip("/") != engine.base_url:
            logger.warning("engine %d is now at %s, no longer at %s", index, address, engine.base_url)
            engine.move_to(address)
