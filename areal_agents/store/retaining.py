"""Carries out `store.retain` in bounded pieces: exports turns if requested, then deletes their contents.

What was exported is given up afterwards, so a death between the two leaves a file whose turns are still
in the store. The next process run deletes what the newest file holds before it exports more, so that hardly
anything is exported twice; a turn's id tells, for it is unique.
"""

from __future__ import annotations

import logging
from pathlib import Path

from areal_agents.store.config import RetainConfig
from areal_agents.store.parquet import exported_groups, newest_export, write_export
from areal_agents.store.store import Store

_logger = logging.getLogger(__name__)

_GROUPS_A_GO = 32


class Retention:
    """What of trained groups is kept in one store. Not thread-safe; to be used by the writer of turns.

    `config` names a number of versions: without one, everything is kept.
    """

    def __init__(self, store: Store, config: RetainConfig) -> None:
        if config.versions is None:
            raise ValueError("where everything is kept there is nothing to do")
        self._store = store
        self._versions = config.versions
        self._folder = Path(config.export) if config.export else None
        self._done_step = -1  # of every step up to it nothing is left to be given up
        self._life: int | None = None  # of the run, as the numbers of its versions tell
        self._has_looked_back = self._folder is None

    def go(self) -> int:
        """Do a bounded piece of what is due; how many turns were given up. Blocks for some milliseconds.

        Raises:
            StoreError: the store or the export's disk refuses; nothing was given up.
            ConfigError: Parquet files are requested, and pyarrow is not installed.
        """
        if not self._has_looked_back:
            self._look_back()
        self._note_life()
        found = self._store.expired_groups(
            keep_versions=self._versions, after_step=self._done_step, limit=_GROUPS_A_GO
        )
        if not found:
            return 0
        groups = [group for group, _ in found]
        if self._folder is not None:
            write_export(self._store, groups, self._folder)
        emptied = self._store.empty_groups(groups, keep_versions=self._versions).result()
        self._done_step = found[-1][1] - 1  # the last step may have more groups than were looked at
        _logger.info(
            "store.retain: the turns of %d groups up to step %d were given up", len(groups), found[-1][1]
        )
        return emptied

    def _note_life(self) -> None:
        """Begin with the first step again after a resume: a reuse that it took back had held its group."""
        newest = self._store.latest_version()
        life = None if newest is None else newest.version - newest.step
        if life != self._life:
            self._life, self._done_step = life, -1

    def _look_back(self) -> None:
        """Finish what an earlier process run had only exported."""
        assert self._folder is not None
        newest = newest_export(self._folder)
        if newest is not None:
            self._store.empty_groups(exported_groups(newest), keep_versions=self._versions).result()
        self._has_looked_back = True
