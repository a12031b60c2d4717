"""The proxies of a run on several machines, as the table of roles in the store has them.

A process claims its place, a row of the table, with a new epoch, and is alive while the row has that epoch
and a recent heartbeat. All times are those of the database. This process reads the table once a second, and
at once when another proxy does not answer or when it first sees an episode of a process that started since.
What it knows may therefore be outdated, so an episode may be taken over from a proxy that is only slow; the
store then refuses what that proxy still writes to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from areal_agents.errors import ConfigError, StoreError
from areal_agents.store import Store
from areal_agents.store.roles import BEAT_S, DEAD_AFTER_S, Role, RoleRow

_logger = logging.getLogger(__name__)

_ROLE: Role = "proxy"
_READ_S = 1.0  # between two readings
_SOONEST_S = 0.1  # a younger reading is not repeated
_SETTLE_S = 3 * BEAT_S  # in which every process that is running has beaten


@dataclass(frozen=True, slots=True)
class ProxyPlace:
    """The place of one proxy among those of a run.

    Attributes:
        index: index of the place.
        epoch: the epoch with which the process has claimed it; each process needs a new one.
        count: number of proxies of the run.
        secret: the secret of the run.
    """

    index: int
    epoch: int
    count: int
    secret: str


class ProxyTable:
    """The places of all proxies. It must be `watching` the table before it is used."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: dict[int, RoleRow] = {}
        self._read_at = self._steady_since = -1e9
        self._reading = threading.Lock()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Read the table, and read it again every second within the with-block.

        Raises:
            StoreError: the first reading fails.
        """
        self._read(0.0)
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="proxy-places", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def address(self, index: int) -> str | None:
        """Return where the process that has a place is reached; None if none is running or has said it."""
        row = self._rows.get(index)
        return row.url if row is not None and self._is_running(row) else None

    def owner_of(self, index: int) -> str | None:
        """Return the owner name of the process that has a place; None if none is running."""
        row = self._rows.get(index)
        return owner_name(index, row.epoch) if row is not None and self._is_running(row) else None

    async def refresh(self) -> None:
        """Read the table again, unless that was done just now."""
        await asyncio.to_thread(self._read, _SOONEST_S)

    def _is_running(self, row: RoleRow) -> bool:
        """Whether a process is running.

        After a time without the database nobody has a recent heartbeat, and all are given time for one.
        """
        is_settling = time.monotonic() - self._steady_since < _SETTLE_S
        return row.state == "running" and (row.is_alive or is_settling)

    def _read(self, soonest_s: float) -> None:
        """Read the table, unless it was read less than `soonest_s` ago."""
        with self._reading:
            began = time.monotonic()
            if began - self._read_at < soonest_s:
                return
            rows = self._store.role_rows(_ROLE)
            now = time.monotonic()
            if self._rows and now - self._read_at > DEAD_AFTER_S / 2:
                self._steady_since = now
            self._rows = {row.index: row for row in rows}
            self._read_at = began

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(_READ_S):
            try:
                self._read(_SOONEST_S)
            except StoreError as error:
                _logger.warning("which proxies are running could not be read, and is read again: %s", error)


class Places(ProxyTable):
    """One proxy's view of the places of all proxies."""

    spreads_openings = False

    def __init__(self, store: Store, place: ProxyPlace) -> None:
        super().__init__(store)
        self.index = place.index
        self.count = place.count
        self.secret = place.secret
        self.owner = owner_name(place.index, place.epoch)

    def is_alive(self, owner: str) -> bool:
        """Whether the process with this owner name is still running."""
        if owner == self.owner:
            return True
        if (place := _place_of(owner)) is None:
            return False
        index, epoch = place
        row = self._rows.get(index)
        return row is not None and row.epoch == epoch and self._is_running(row)

    async def look_for(self, owner: str) -> None:
        """Read the table again if the process is a later one of its place than the last reading has."""
        if (place := _place_of(owner)) is None:
            return
        index, epoch = place
        row = self._rows.get(index)
        if row is None or row.epoch < epoch:
            await asyncio.to_thread(self._read, 0.0)

    def index_of(self, owner: str | None) -> int | None:
        """Return the index of the place that a process has or had, None for an owner of another kind."""
        place = _place_of(owner or "")
        return place[0] if place is not None else None

    def measured(self) -> list[int]:
        """Return this proxy and the others that are running: a lost machine must not hide the metrics."""
        return sorted({self.index, *(index for index in self._rows if self.address(index) is not None)})


def refuse_beside_places(store: Store) -> None:
    """Raise ConfigError if proxies of a run use a store: a proxy without a place knows none of them."""
    for row in store.role_rows(_ROLE):
        if row.is_alive:
            raise ConfigError(
                f"proxy {row.index} of a run uses this store at {row.url}; use that address, or another store"
            )


def owner_name(index: int, epoch: int) -> str:
    """Return the name with which a process owns episodes in the store."""
    return f"{_ROLE}.{index}.{epoch}"


def _place_of(owner: str) -> tuple[int, int] | None:
    """Return (index, epoch) of an owner name, None if it is not one of a place."""
    role, _, rest = owner.partition(".")
    index, _, epoch = rest.partition(".")
    if role != _ROLE or not index.isdecimal() or not epoch.isdecimal():
        return None
    return int(index), int(epoch)
