"""Compares the weights of an engine with the current version on demand, while training continues."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from areal_agents.errors import ConfigError, EngineError, TrainingError
from areal_agents.inference.engine import Engine
from areal_agents.store import Store
from areal_agents.training.publish.checksums import Agreement, Checksums, FolderWeights

_ATTEMPTS = 10
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Verified:
    """The result for an engine that serves `version`; `agreement` is None if its weights have no checksum
    that can be computed here."""

    version: int
    agreement: Agreement | None


async def verify(engine: Engine, store: Store, *, base: Path | None = None) -> Verified:
    """Compare the weights of an engine with the current version.

    Args:
        base: the folder to compare with instead of the version's, namely the model's folder if versions are
            adapters.

    Raises:
        ConfigError: nothing was published yet.
        EngineError: the engine's weights differ, it serves another version for longer than a swap takes, or
            it does not answer.
        TrainingError: the version's folder cannot be read, or is not written yet.
    """
    for _ in range(_ATTEMPTS):
        versions = store.served_versions()
        if versions is None:
            raise ConfigError("no version has been published yet; verify a run that has started training")
        served = (await engine.model_info()).version
        current = versions.stable
        if versions.candidate is not None and served == versions.candidate.version:
            current = versions.candidate  # as engines of a canary do
        wanted = current.version
        if served == wanted and not (base is None and current.folder_pending):
            try:
                agreement = await Checksums(FolderWeights(base or Path(current.path))).check(engine)
            except (EngineError, TrainingError):
                if store.served_versions() == versions:
                    raise  # otherwise the version was swapped meanwhile
            else:
                if (await engine.model_info()).version == served:
                    return Verified(served, agreement)
        await asyncio.sleep(_PAUSE_S)
    if served != wanted:
        raise EngineError(f"{engine.base_url} serves version {served}, expected the current version {wanted}")
    raise TrainingError(
        f"the folder of version {wanted}, to compare with, is not written (yet); try again, or set "
        "trainer.publish.folder_every: 1"
    )
