"""Applies `store.retain` in bounded steps: exports the turns of old groups if configured, then deletes them.

Turns are deleted after they were exported, so a process that dies between the two leaves a file whose turns
are still in the store. The next process first deletes the turns that the newest file contains, so at most a
few turns are exported twice; they can be recognised by the turn's id, which is unique.
"""

from __future__ import annotations

import logging
from pathlib import Path

from areal_agents.store.config import RetainConfig
from areal_agents.store.parquet import exported_groups, newest_export, write_export
from areal_agents.store.store import Store

_logger = logging.getLogger(__name__)

_GROUPS_PER_STEP = 32


class Retention:
    """Deletes the turns of old groups from one store. Not thread-safe; used by the process that writes turns.

    `config` must name a number of versions; without one, everything is kept.
    """

    def __init__(self, store: Store, config: RetainConfig) -> None:
        if config.versions is None:
            raise ValueError("retain.versions must be a number of versions, got None, which keeps everything")
        self._store = store
        self._versions = config.versions
        self._folder = Path(config.export) if config.export else None
        self._done_step = -1  # no step up to this one has turns left to delete
        self._version_offset: int | None = None  # newest version minus its step; a resume changes it
        self._has_recovered = self._folder is None

    def run_once(self) -> int:
        """Export and delete the turns of a bounded number of groups; return the number of deleted turns.

        Blocks for some milliseconds.

        Raises:
            StoreError: the store or the export failed; nothing was deleted.
            ConfigError: an export is configured, and pyarrow is not installed.
        """
        if not self._has_recovered:
            self._delete_exported()
        self._detect_resume()
        found = self._store.expired_groups(
            keep_versions=self._versions, after_step=self._done_step, limit=_GROUPS_PER_STEP
        )
        if not found:
            return 0
        groups = [group for group, _ in found]
        if self._folder is not None:
            write_export(self._store, groups, self._folder)
        emptied = self._store.empty_groups(groups, keep_versions=self._versions).result()
        self._done_step = found[-1][1] - 1  # the last step may have further groups
        _logger.info("store.retain: deleted the turns of %d groups up to step %d", len(groups), found[-1][1])
        return emptied

    def _detect_resume(self) -> None:
        """Start again from the first step after a resume, which may have undone reuses of groups."""
        newest = self._store.latest_version()
        offset = None if newest is None else newest.version - newest.step
        if offset != self._version_offset:
            self._version_offset, self._done_step = offset, -1

    def _delete_exported(self) -> None:
        """Delete the turns that an earlier process exported and may not have deleted."""
        assert self._folder is not None
        newest = newest_export(self._folder)
        if newest is not None:
            self._store.empty_groups(exported_groups(newest), keep_versions=self._versions).result()
        self._has_recovered = True
