"""Finds a sandbox host that has a place, for all callers of this process.

Callers wait in one line, first come, first served, so that only the first of them asks the hosts. It asks the
one with the most free places, as far as this process knows from the answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from areal_agents.direct_http import direct_websocket, websocket_errors
from areal_agents.errors import SandboxError
from areal_agents.sandbox.remote.messages import GOODBYE_S, LONGEST_MESSAGE, PATH, PING_S, SILENT_S

PLACE_S = 3600.0  # longest wait for a place
_CONNECT_S = 5.0
_LOOK_S = 2.0  # between two looks at the addresses
_AGAIN_S = 0.5  # until a host that had no place is asked again, unless one of this process's places got free
_LOST_S = 5.0  # the same for one that could not be reached
_SAY_S = 10.0  # a longer wait is logged

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostAddress:
    """A sandbox host: its URL, and the token that it asks for."""

    url: str
    token: str


@dataclass(slots=True)
class _Known:
    """What is known of a host: its free places as far as its answers tell, and when it may be asked again."""

    free: float = float("inf")
    again: float = 0.0


@dataclass(frozen=True, slots=True)
class PlaceOnHost:
    """A place on a host, which is free again when its connection, a WebSocket, has ended."""

    url: str
    connection: Any


class SandboxHosts:
    """The sandbox hosts of a run, as one rollout process uses them."""

    def __init__(self, addresses: Callable[[], Sequence[HostAddress]], *, place_s: float = PLACE_S) -> None:
        """Args:
        addresses: returns the hosts that are running; it is called on another thread.
        place_s: longest wait for a place in seconds.
        """
        self._addresses = addresses
        self._place_s = place_s
        self._line = asyncio.Lock()
        self._freed = asyncio.Event()
        self._found: Sequence[HostAddress] = ()
        self._looked = float("-inf")
        self._known: dict[HostAddress, _Known] = {}

    async def place(self) -> PlaceOnHost:
        """Wait for a place. Raises SandboxError if there is none within `place_s`."""
        begun = time.monotonic()
        is_said = False
        async with self._line:
            while True:
                self._freed.clear()
                place = await self._try()
                if place is not None:
                    return place
                waited = time.monotonic() - begun
                if waited > self._place_s:
                    raise SandboxError(
                        f"no sandbox host had a place within {self._place_s:g} s: {self._state()}"
                    )
                if waited > _SAY_S and not is_said:
                    logger.warning("a sandbox waits for a place on a host: %s", self._state())
                    is_said = True
                try:
                    async with asyncio.timeout(_AGAIN_S):
                        await self._freed.wait()
                except TimeoutError:
                    pass

    def free(self, place: PlaceOnHost) -> None:
        """Note that a place is free again."""
        for address, known in self._known.items():
            if address.url == place.url:
                known.free, known.again = known.free + 1, 0.0
        self._freed.set()

    async def _try(self) -> PlaceOnHost | None:
        """Ask the hosts for a place, one after the other."""
        await self._look()
        while True:
            now = time.monotonic()
            asked = [one for one in self._found if self._known[one].again <= now]
            if not asked:
                return None
            host = max(asked, key=lambda one: self._known[one].free)
            if (place := await self._ask(host)) is not None:
                return place

    async def _ask(self, host: HostAddress) -> PlaceOnHost | None:
        known = self._known[host]
        try:
            connection = await direct_websocket(
                host.url + PATH,
                headers={"Authorization": f"Bearer {host.token}"},
                connect_s=_CONNECT_S,
                longest_message=LONGEST_MESSAGE,
                ping_s=PING_S,
                silent_s=SILENT_S,
                goodbye_s=GOODBYE_S,
            )
        except OSError as error:
            logger.warning("the sandbox host at %s cannot be reached: %s", host.url, error)
            known.again = time.monotonic() + _LOST_S
            return None
        # It hangs, ends, or is another program.
        lost: tuple[type[Exception], ...] = (OSError, ValueError, TypeError, KeyError, *websocket_errors())
        try:
            async with asyncio.timeout(_CONNECT_S):
                answer = json.loads(await connection.recv())
            is_full = answer["is"] == "full"
            free = 0.0 if is_full else float(answer["free"])
        except lost as error:
            connection.transport.abort()
            logger.warning("the sandbox host at %s gives no answer: %r", host.url, error)
            known.again = time.monotonic() + _LOST_S
            return None
        except BaseException:
            connection.transport.abort()
            raise
        known.free = free
        if is_full:
            known.again = time.monotonic() + _AGAIN_S
            await connection.close()
            return None
        return PlaceOnHost(host.url, connection)

    async def _look(self) -> None:
        """Read the addresses of the hosts again, if that was some time ago."""
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._found = tuple(await asyncio.to_thread(self._addresses))
        self._looked = time.monotonic()
        self._known = {one: self._known.get(one) or _Known() for one in self._found}

    def _state(self) -> str:
        if not self._found:
            return "none is running"
        urls = ", ".join(one.url for one in self._found)
        return f"all places of {urls} are taken, or they cannot be reached"
