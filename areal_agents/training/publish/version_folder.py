"""Writes the folder of each version on a background thread while the next weight is gathered.

Each weight is compared, bit for bit in the published type, with the folder of the previous version, which is
kept anyway; computing the share of changed weights therefore needs no additional memory.
"""

from __future__ import annotations

import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from areal_agents.errors import TrainingError
from areal_agents.training.model.folder import ModelFolder
from areal_agents.training.model.gathering import published_shapes, whole_weights
from areal_agents.training.model.lora import write_adapter
from areal_agents.training.model.model import Policy
from areal_agents.training.model.safetensors_files import Checkpoint

logger = logging.getLogger(__name__)

WAITING_BYTES = 512_000_000  # gathered weights that may wait for the disk, in bytes


@dataclass(frozen=True, slots=True)
class WrittenVersion:
    """A version's folder. nbytes: size of its weights. density: the share of the weights that changed (see
    `Density`)."""

    nbytes: int
    density: float | None


def exhaust(weights: Iterable[tuple[str, Tensor]], each: Callable[[str, Tensor], None] | None) -> None:
    """Gather every weight and pass it to `each`, even if `each` fails on this rank. Collective.

    A failure of `each` is raised after all weights are gathered, so that the other ranks do not hang in a
    collective.
    """
    failure: Exception | None = None
    for name, tensor in weights:
        if each is None or failure is not None:
            continue
        try:
            each(name, tensor)
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure


def write_version(
    policy: Policy, folder: Path, version: int, *, base: Path, adapter: bool, writes: bool
) -> WrittenVersion | None:
    """Write a version's folder in `folder`; its density is relative to the previous version. Collective.

    Args:
        base: the folder of the initial model.
        adapter: whether to write only the adapter instead of the whole weights.
        writes: see `write_policy`, also for the exceptions.
    """
    path = version_folder(folder, version)
    # Folders of later versions were left by an earlier process of the run.
    earlier = [old for v, old in version_folders(folder).items() if v < version] if writes else []
    before = earlier[-1] if earlier else None
    if adapter:
        return write_policy_adapter(policy, path, base=base, writes=writes, before=before)
    return write_policy(policy, path, like=base, writes=writes, before=before)


def write_policy(
    policy: Policy, path: Path, *, like: Path, writes: bool, before: Path | None = None
) -> WrittenVersion | None:
    """Write the whole weights, with an adapter merged, as a Hugging Face folder. Collective.

    Needs memory for one weight and for at most WAITING_BYTES that wait for the disk.

    Args:
        like: the folder of the initial model, from which the other files are copied.
        writes: whether this rank writes and gets a result; the others only take part in gathering.
        before: the folder relative to which the density is measured.

    Raises:
        TrainingError: the folder cannot be written; unfinished files are removed.
    """
    weights = whole_weights(policy.model, policy.lora)
    if not writes:
        exhaust(weights, None)
        return None
    failure: Exception | None = None
    folder: ModelFolder | None = None
    density = Density(before)
    writing = BackgroundCalls(WAITING_BYTES)

    def write(name: str, tensor: Tensor) -> None:
        assert folder is not None
        published = tensor.to(folder.dtype)
        folder.add(name, published)
        density.add(name, published)

    shapes = published_shapes(policy.model)
    try:
        folder = ModelFolder(path, shapes, like=like, dtype=policy.saved_dtype)
    except Exception as error:
        failure = error
    exhaust(
        weights,
        None if folder is None else lambda name, t: writing.submit(lambda: write(name, t), t.nbytes),
    )
    try:
        writing.finish()
        if folder is not None:
            folder.finish()
    except BaseException:
        if folder is not None:
            folder.discard()
        raise
    if failure is not None:
        raise failure
    return WrittenVersion(sum(map(prod, shapes.values())) * policy.saved_dtype.itemsize, density.share)


def write_policy_adapter(
    policy: Policy, path: Path, *, base: Path, writes: bool, before: Path | None = None
) -> WrittenVersion | None:
    """Write only the adapter, as a peft folder; see `write_policy`. Collective.

    Args:
        base: the model that the adapter belongs to.
    """
    weights = policy.adapter_state_dict(keep=writes)
    if not writes:
        return None
    assert weights is not None and policy.lora is not None
    density = Density(before)
    for name, tensor in weights.items():
        density.add(name, tensor)
    write_adapter(weights, path, policy.lora, base=str(base.resolve()))
    return WrittenVersion(sum(tensor.nbytes for tensor in weights.values()), density.share)


def version_folder(folder: Path, version: int) -> Path:
    """The path of one version's folder, whether or not it exists."""
    return folder / f"v{version}"


def version_folders(folder: Path) -> dict[int, Path]:
    """The complete folders of versions, by version, ascending."""
    found = {int(p.name[1:]): p for p in folder.glob("v*") if p.name[1:].isdigit()}
    return dict(sorted(found.items()))


def forget_before(folder: Path, version: int, *, keep: int) -> list[int]:
    """Remove all versions up to `version` except the last `keep`; return those removed.

    A folder that cannot be removed, for example on a network disk while an engine reads it, is tried again
    next time.
    """
    folders = {v: path for v, path in version_folders(folder).items() if v <= version}
    forgotten = []
    for old in list(folders)[:-keep]:
        try:
            shutil.rmtree(folders[old])
        except OSError as error:
            logger.warning("the folder of version %d could not be removed yet: %s", old, error)
        else:
            forgotten.append(old)
    return forgotten


class BackgroundCalls:
    """Runs submitted calls one at a time on a background thread. After a failure no more calls run, and
    `finish` raises it.

    Args:
        limit: bytes that may wait for the thread; a call that is larger by itself waits alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="version-folder")
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._bytes = 0
        self._failure: BaseException | None = None

    def submit(self, call: Callable[[], None], nbytes: int) -> None:
        """Submit `call`, which holds `nbytes` in memory. Blocks while more than `limit` bytes would wait."""
        while self._waiting and self._bytes + nbytes > self._limit:
            self._take()
        if self._failure is None:
            self._waiting.append((self._thread.submit(call), nbytes))
            self._bytes += nbytes

    def finish(self) -> None:
        """Wait for all calls; the first failure is raised."""
        while self._waiting:
            self._take()
        self._thread.shutdown()
        if self._failure is not None:
            raise self._failure

    def _take(self) -> None:
        """Wait for the oldest call."""
        future, nbytes = self._waiting.popleft()
        self._bytes -= nbytes
        failure = future.exception()
        if failure is not None and self._failure is None:
            self._failure = failure
            for later, _ in self._waiting:
                later.cancel()
            self._waiting = deque((later, size) for later, size in self._waiting if not later.cancelled())


class Density:
    """Counts the changed weights over the tensors of one version.

    Args:
        before: the folder of the previous version; if it is None or cannot be read, nothing is compared.
    """

    def __init__(self, before: Path | None) -> None:
        self._before: Checkpoint | None = None
        self._changed = self._compared = 0
        if before is not None:
            try:
                self._before = Checkpoint(before)
            # removed by hand or not a model folder, so there is nothing to compare with
            except TrainingError:
                self._before = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Compare a weight, as published, with the previous version's weight of the same name and shape."""
        stored = self._before.tensors.get(name) if self._before is not None else None
        if self._before is None or stored is None or stored.shape != tuple(tensor.shape):
            return
        old = self._before.read(stored)
        self._changed += int(torch.count_nonzero(tensor.to(old.dtype).cpu() != old))
        self._compared += old.numel()

    @property
    def share(self) -> float | None:
        """Number of changed weights / number of compared weights; None if nothing was compared."""
        return self._changed / self._compared if self._compared else None
