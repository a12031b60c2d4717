"""How long a trainer that is told to end may take: as long as its checkpoint needs."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from areal_agents.config import Config

BASE_S = 60.0  # for everything but the bytes of the checkpoint
BYTES_PER_S = 200e6  # a shared disk that is slow
BYTES_PER_PARAMETER = 12  # master weights and the two moments of AdamW, in float32
_LONGEST_HEADER = 100_000_000  # bytes, as in the safetensors library


def stop_timeout_s(config: Config) -> float:
    """Return the longest time from SIGTERM until the trainer is killed, in seconds.

    It covers a checkpoint that is being written and the one that is written at the end.
    """
    trainer = config.trainer
    if trainer.stop_timeout_s:
        return trainer.stop_timeout_s
    models = [] if trainer.lora is not None else [config.model]  # adapters are small
    if config.algorithm.needs_critic:
        models.append(trainer.critic_model or config.model)
    size = BYTES_PER_PARAMETER * sum(parameters_of(Path(model)) for model in models)
    return BASE_S + 2 * size / BYTES_PER_S


def parameters_of(folder: Path) -> int:
    """Return the number of values in the safetensors files of a folder, from their headers.

    A damaged file counts as empty; the process that loads the model reports it.
    """
    count = 0
    for path in folder.glob("*.safetensors"):
        try:
            with open(path, "rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(size, _LONGEST_HEADER)))
            count += sum(
                math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
            )
        except (OSError, ValueError, struct.error, TypeError, KeyError, AttributeError):
            continue
    return count
