"""Follows engines that are started again at other addresses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from areal_agents.inference.clients import EngineClient

logger = logging.getLogger(__name__)


def move_engines(engines: Sequence[EngineClient], addresses: Mapping[int, str]) -> None:
    """Send the further requests of each client to the present address of its engine.

    Args:
        engines: the client of each engine.
        addresses: the present addresses by the index of the engine; one that is missing stays as it is.
    """
    for index, engine in enumerate(engines):
        address = addresses.get(index)
        if address is not None and address.rstrip("/") != engine.base_url:
            logger.warning("engine %d is now at %s, no longer at %s", index, address, engine.base_url)
            engine.move_to(address)
