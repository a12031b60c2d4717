"""A replica that came late, or came back, is brought to the current version.

From the folder that the version's row names, so that it needs nobody but the replica itself. Several
processes may find the same replica: each looks once more before it loads, and loading twice is no harm.
It is not paused for that, since resuming it could cut into a swap of the trainer's.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from areal_agents.errors import EngineRejected
from areal_agents.inference.engine import Engine, adapter_name
from areal_agents.inference.pool.replica import CurrentVersion

log = logging.getLogger(__name__)

_OTHERS_S = 0.5  # that whoever else has loaded an adapter may take to name the version


async def load(engine: Engine, goal: CurrentVersion) -> None:
    """Make an engine serve `goal`. EngineError if it cannot."""
    if not (Path(goal.path) / "adapter_config.json").is_file():
        await engine.update_weights_from_disk(goal.path, goal.version)
        return
    name = adapter_name(goal.version)
    try:
        await engine.load_adapter(name, goal.path)
    except EngineRejected as error:
        await asyncio.sleep(_OTHERS_S)
        if (await engine.model_info()).version == goal.version:
            return  # somebody else did it, and its requests would miss the adapter if it were unloaded
        # Most likely somebody loaded it and was lost before they named the version.
        log.info("the adapter %s is loaded once more: %s", name, error)
        await engine.unload_adapter(name)
        await engine.load_adapter(name, goal.path)
    await engine.set_version(goal.version, abort_running=False)
