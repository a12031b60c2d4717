"""Timeouts and idle cleanup of episodes, and the removal of trained turns by the setting `store.retain`.

An error in one episode, or in one part of a sweep, is logged, and the sweep continues with the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator

from areal_agents.errors import StoreError
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.episodes.implicit import ImplicitEpisodes
from areal_agents.proxy.episodes.sessions import Sessions
from areal_agents.proxy.workers.ownership import Ownership
from areal_agents.store import Conflict, OpenEpisode, Retention, Store

_logger = logging.getLogger(__name__)

_SWEEP_S = 5.0
_MEMORY_IDLE_S = 900.0


class Housekeeping:
    """Sweeps the open episodes at intervals.

    The idle time of an episode of an earlier process counts from the first sweep that finds it. With several
    workers, each sweeps its own episodes, and the first also those that no running worker owns; at most one
    worker has `retention`.
    """

    def __init__(
        self,
        *,
        store: Store,
        sessions: Sessions,
        implicit: ImplicitEpisodes,
        config: ProxyConfig,
        ownership: Ownership | None = None,
        retention: Retention | None = None,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._implicit = implicit
        self._config = config
        self._ownership = ownership
        self._retention = retention
        self._last_used: dict[str, float] = {}
        self._unrewarded: dict[str, float] = {}  # time of the first sweep that found the episode
        self._abandoned: dict[str, float] = {}  # time of the first sweep that found the group

    async def run(self) -> None:
        """Sweep until cancelled."""
        interval_s = min(
            _SWEEP_S,
            self._config.implicit_idle_s / 2,
            self._config.idle_timeout_s / 2,
            self._config.reward_timeout_s / 2,
        )
        while True:
            await asyncio.sleep(interval_s)
            await self.sweep()

    async def sweep(self) -> None:
        """Apply all timeouts once. Errors are logged, and the next sweep tries again."""
        with _log_failure("closing idle episodes"):
            await self._close_idle()
        with _log_failure("failing unrewarded episodes"):
            await self._fail_unrewarded()
        with _log_failure("dropping abandoned groups"):
            await self._drop_abandoned()
        with _log_failure("removing idle episodes from memory"):
            self._sessions.forget_idle(_MEMORY_IDLE_S)
            self._implicit.drop_empty()
        if self._retention is not None:
            with _log_failure("removing trained turns (store.retain)"):
                await asyncio.to_thread(self._retention.run_once)

    async def _fail_unrewarded(self) -> None:
        """Fail finished episodes that got no reward in time, by the monotonic clock of this process.

        The time does not run while another episode of the group is open: a reward may need the whole group.
        """
        now, limit_s = time.monotonic(), self._config.reward_timeout_s
        found = await asyncio.to_thread(self._store.unrewarded_episodes, of_ended_groups=True)
        self._unrewarded = {episode_id: self._unrewarded.get(episode_id, now) for episode_id in found}
        due = [episode_id for episode_id, since in self._unrewarded.items() if now - since > limit_s]
        # All writes are submitted before any is awaited, so that they share a commit.
        writes = [(episode_id, self._store.fail_unrewarded([episode_id])) for episode_id in due]
        for episode_id, write in writes:
            with _log_failure(f"failing episode {episode_id}"):
                if await asyncio.wrap_future(write):
                    _logger.warning("episode %s failed: no reward within %g s", episode_id, limit_s)

    async def _drop_abandoned(self) -> None:
        """Drop incomplete groups without open episodes, because the gate counts them."""
        now, limit_s = time.monotonic(), self._config.idle_timeout_s
        found = await asyncio.to_thread(self._store.abandoned_groups)
        self._abandoned = {group_id: self._abandoned.get(group_id, now) for group_id in found}
        for group_id, since in self._abandoned.items():
            if now - since > limit_s:
                reason = f"it is not complete, and none of its episodes was open for {limit_s:g} s"
                # Conflict: the group was completed in the meantime.
                with _log_failure(f"dropping group {group_id}"), contextlib.suppress(Conflict):
                    await asyncio.wrap_future(self._store.drop_open_group(group_id, reason))
                    _logger.warning("group %s was dropped: %s", group_id, reason)

    async def _close_idle(self) -> None:
        now = time.monotonic()
        in_memory = self._sessions.last_used()
        found = await asyncio.to_thread(self._store.open_episodes)
        if self._ownership is not None:
            found = self._ownership.swept(found)
        self._last_used = {
            episode.id: in_memory.get(episode.id, self._last_used.get(episode.id, now)) for episode in found
        }
        for episode in found:
            idle_s = now - self._last_used[episode.id]
            limit_s = self._config.implicit_idle_s if episode.is_implicit else self._config.idle_timeout_s
            if idle_s > limit_s and not self._sessions.used_since(episode.id, now - limit_s):
                # Conflict: the episode's owner sealed it in the meantime.
                with _log_failure(f"closing episode {episode.id}"), contextlib.suppress(Conflict):
                    await self._close(episode, idle_s)

    async def _close(self, episode: OpenEpisode, idle_s: float) -> None:
        if self._ownership is not None and not await self._ownership.claim(episode.id, episode.owner):
            return  # another worker is using it
        if episode.is_implicit:
            await self._sessions.seal(episode.id, "finished")
            self._implicit.forget(episode.id)
        else:
            await self._sessions.seal(episode.id, "failed", error=f"idle for {idle_s:.0f} s")


@contextlib.contextmanager
def _log_failure(what: str) -> Iterator[None]:
    """Log an exception of the with-block and continue, because sweeps must not end."""
    try:
        yield
    except StoreError as error:
        _logger.warning("%s failed, and the next sweep tries again: %s", what, error)
    except Exception:
        _logger.exception("%s failed because of a bug, and the next sweep tries again", what)
