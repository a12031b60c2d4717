"""Chooses the settings that depend on the memory of a GPU: what is recomputed, and the size of micro-batches.

Of the settings that fit, the one with the least recomputation is taken. Micro-batches become smaller than
`MOST_TOKENS` only if even recomputing every block is not enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.errors import TrainingError
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.memory.estimate import TrainerMemory
from areal_agents.training.model.sharding import Checkpointing

GIB = 2**30
MOST_TOKENS = 32768
CPU_TOKENS = 4096
LEAST_TOKENS = 1024
# What the estimate does not contain: the CUDA context, kernels and NCCL's buffers, and fragmentation.
CONTEXT_BYTES = 3 * GIB // 2
FRAGMENTED = 0.03


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings that fit; `peak` is the most bytes that one rank then needs."""

    checkpointing: Checkpointing
    tokens: int
    peak: int


def reserve(memory: int) -> int:
    """The bytes of a GPU with this memory that no estimate may use."""
    return CONTEXT_BYTES + round(FRAGMENTED * memory)


def choose(
    memory: TrainerMemory,
    free: int,
    *,
    checkpointing: Checkpointing | str,
    tokens: int,
) -> Choice | None:
    """The best settings whose peak is at most `free` bytes; None if there are none.

    Args:
        checkpointing: `auto`, or the only policy to consider.
        tokens: of a micro-batch; 0: as many as fit, up to MOST_TOKENS.
    """
    policies = [*_policies(memory.layers)] if checkpointing == "auto" else [checkpointing]
    sizes = [tokens] if tokens else [*_sizes(memory.positions)]
    for size in sizes:
        for policy in policies:
            peak = memory.need(policy, size).peak  # type: ignore[arg-type]
            if peak <= free:
                return Choice(policy, size, peak)  # type: ignore[arg-type]
    return None


def smallest(memory: TrainerMemory, *, checkpointing: Checkpointing | str, tokens: int) -> Choice:
    """Of the allowed settings those that need the least memory, to be shown where none fits."""
    policy: Checkpointing = "full" if checkpointing == "auto" else checkpointing  # type: ignore[assignment]
    size = tokens or [*_sizes(memory.positions)][-1]
    return Choice(policy, size, memory.need(policy, size).peak)


def settle(
    config: TrainerConfig,
    algorithm: AlgorithmConfig,
    model_path: Path,
    ranks: Ranks,
    *,
    engine_bytes: Callable[[int], int] = lambda memory: 0,
) -> TrainerConfig:
    """Return the configuration with a value in place of each `auto`, the same on every rank. Collective.

    Args:
        engine_bytes: given the bytes of a GPU, returns those that engines hold of this rank's GPU while a
            step is trained.

    Raises:
        TrainingError: nothing fits; raised on every rank.
    """
    if ranks.device.type == "cpu":
        return _settled(config, "float32", "off", CPU_TOKENS)
    box: tuple[str, Choice | None] = ("", None)
    if ranks.is_first:
        total = torch.cuda.get_device_properties(ranks.device).total_memory
        free = total - reserve(total) - engine_bytes(total)
        try:
            box = _chosen(config, algorithm, model_path, ranks, free)
        except TrainingError as error:
            box = str(error), None
    fault, choice = ranks.broadcast(box)
    if choice is None:
        raise TrainingError(fault)
    return _settled(config, "bfloat16", choice.checkpointing, choice.tokens)


def _chosen(
    config: TrainerConfig, algorithm: AlgorithmConfig, model_path: Path, ranks: Ranks, free: int
) -> tuple[str, Choice | None]:
    memory = TrainerMemory(config, algorithm, model_path, ranks, on_gpu=True)
    wanted: dict[str, object] = {
        "checkpointing": config.activation_checkpointing,
        "tokens": config.microbatch_tokens,
    }
    choice = choose(memory, free, **wanted)  # type: ignore[arg-type]
    if choice is not None:
        return "", choice
    least = smallest(memory, **wanted)  # type: ignore[arg-type]
    return (
        f"the trainer needs {least.peak / GIB:.1f} GiB on each GPU (activation_checkpointing: "
        f"{least.checkpointing}, microbatch_tokens: {least.tokens}), and {free / GIB:.1f} GiB are free for "
        "it; areal-agents plan shows what would help",
        None,
    )


def _settled(config: TrainerConfig, dtype: str, checkpointing: Checkpointing, tokens: int) -> TrainerConfig:
    return config.model_copy(
        update={
            "dtype": dtype if config.dtype == "auto" else config.dtype,
            "activation_checkpointing": checkpointing
            if config.activation_checkpointing == "auto"
            else config.activation_checkpointing,
            "microbatch_tokens": config.microbatch_tokens or tokens,
        }
    )


def _policies(layers: int) -> Iterator[Checkpointing]:
    """Checkpointing policies, from the least recomputation to the most."""
    yield "off"
    yield from (every for every in (8, 4, 3, 2) if every < layers)
    yield "full"


def _sizes(positions: int) -> Sequence[int]:
    """Sizes of micro-batches, from the largest that is useful."""
    most = min(MOST_TOKENS, positions) if positions else MOST_TOKENS
    sizes = [most * share // 8 for share in (8, 6, 4, 3, 2)] + [most // 8, most // 16, most // 32]
    return [size for size in sizes if size >= min(LEAST_TOKENS, most)]
