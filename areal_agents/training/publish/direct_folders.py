"""The folders of versions that engines receive directly: written behind the engines' swap, on a thread.

The row of a version is written before any engine has the weights, with its folder pending. The folder is
complete when it has its final name; only then is the row told so, and older folders are removed. A version
without a folder is served by the engines that the trainer has sent it to, and by no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from areal_agents.training.distributed import Ranks
from areal_agents.training.model.folder import ModelFolder
from areal_agents.training.model.gathering import published_shapes
from areal_agents.training.model.model import Policy
from areal_agents.training.publish.host_copy import HostCopy
from areal_agents.training.publish.rank_failures import on_every_rank
from areal_agents.training.publish.version_folder import forget_before, version_folder, write_policy

logger = logging.getLogger(__name__)


class DirectFolders:
    """Writes the folders of versions. Every rank has one; only the first rank copies and writes.

    Args:
        folder: where the version folders are. like: the folder of the initial model.
        every: a folder is written of every n-th version.
        keep: the number of folders that are kept.
        written: called on the first rank, on any thread, when the folder of a version is complete.
    """

    def __init__(
        self,
        policy: Policy,
        ranks: Ranks,
        folder: Path,
        *,
        like: Path,
        every: int,
        keep: int,
        written: Callable[[int], None],
    ) -> None:
        self._policy, self._ranks = policy, ranks
        self._folder, self._like = folder, like
        self._every, self._keep, self._written = every, keep, written
        self._copy: HostCopy | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="version-folder")
        self._writing: Future[None] | None = None
        self._since = every  # versions since the last folder; the first version gets one
        self._version = self._complete = -1  # the version published last; the last with a folder

    def begin(self, version: int, *, copied: bool = False) -> HostCopy | None:
        """Wait until the folder before is written, and return the copy that must take the version, if one
        must.

        Args:
            copied: whether the copy is needed for more than the folder.

        Raises:
            TrainingError: the folder of an earlier version could not be written, or the copy does not fit.
        """
        self.wait()
        self._version = version
        self._since += 1
        if not self._ranks.is_first or not (copied or self._is_due):
            return None
        if self._copy is None:
            self._copy = HostCopy(
                published_shapes(self._policy.model),
                self._policy.saved_dtype,
                pinned=self._ranks.device.type == "cuda",
            )
        return self._copy

    def start(self) -> None:
        """Write the folder of the version that `begin` was called for in the background, if it is due."""
        copy = self._copy
        if self._is_due and copy is not None and copy.version == self._version != self._complete:
            self._since = 0
            self._writing = self._thread.submit(self._write, copy, self._version)

    def complete(self) -> Path:
        """Make the folder of that version complete now, and return its path. Collective.

        Raises:
            TrainingError: it cannot be written.
        """
        on_every_rank(self._ranks, self.wait)
        path, copy = version_folder(self._folder, self._version), self._copy
        is_written = self._complete == self._version
        if not self._ranks.broadcast(is_written):
            if self._ranks.broadcast(copy is not None and copy.version == self._version):
                on_every_rank(self._ranks, lambda: self._write(copy, self._version) if copy else None)
            else:
                on_every_rank(self._ranks, lambda: self._gather(path))
            self._since = 0
        return path

    def wait(self) -> None:
        """Wait until nothing is being written; raise the TrainingError of a folder that could not be."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def release_copy(self) -> None:
        """Give up the copy in host memory; nothing is being written. A later `begin` would make another."""
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    def close(self) -> None:
        """Wait for the folder that is being written, whether it succeeds or not, and give up the copy."""
        self._thread.shutdown(wait=True)
        self.release_copy()

    @property
    def _is_due(self) -> bool:
        return self._since >= self._every

    def _write(self, copy: HostCopy, version: int) -> None:
        folder = ModelFolder(
            version_folder(self._folder, version), copy.shapes, like=self._like, dtype=copy.dtype
        )
        try:
            for name in copy.shapes:
                folder.add(name, copy.read(name))
            folder.finish()
        except BaseException:
            folder.discard()
            raise
        self._note(version)

    def _gather(self, path: Path) -> None:
        """Gather the weights once more, and write them. Collective."""
        if write_policy(self._policy, path, like=self._like, writes=self._ranks.is_first) is not None:
            self._note(self._version)

    def _note(self, version: int) -> None:
        self._complete = version
        self._written(version)
        forget_before(self._folder, version, keep=self._keep)
