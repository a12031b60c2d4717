"""Chooses the settings that depend on the memory of a GPU: what is recomputed, and the size of micro-batches.

Of the settings that fit, the one with the least recomputation is taken. Micro-batches become smaller than
`MOST_TOKENS`, or than the longest sample, only if even recomputing every block is not enough.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.errors import ConfigError, TrainingError
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.memory.estimate import MemoryUnknown, TrainerMemory
from areal_agents.training.model.sharding import Checkpointing

logger = logging.getLogger(__name__)

GIB = 2**30
MOST_TOKENS = 32768
CPU_TOKENS = 4096
UNMEASURED_TOKENS = 8192  # of a model whose memory is not known
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
    longest: int = 0,
) -> Choice | None:
    """The best settings whose peak is at most `free` bytes; None if there are none.

    Args:
        checkpointing: `auto`, or the only policy to consider.
        tokens: of a micro-batch; 0: as many as fit, up to MOST_TOKENS or the longest sample.
        longest: tokens of the longest sample, which should fit in a micro-batch; 0: not known.
    """
    policies = [*_policies(memory.layers)] if checkpointing == "auto" else [checkpointing]
    sizes = [tokens] if tokens else [*_sizes(memory.positions, longest)]
    for size in sizes:
        for policy in policies:
            peak = memory.need(policy, size).peak  # type: ignore[arg-type]
            if peak <= free:
                return Choice(policy, size, peak)  # type: ignore[arg-type]
    return None


def smallest(memory: TrainerMemory, *, checkpointing: Checkpointing | str, tokens: int) -> Choice:
    """Of the allowed settings those that need the least memory, to be shown where none fits."""
    policy: Checkpointing = "full" if checkpointing == "auto" else checkpointing  # type: ignore[assignment]
    size = tokens or [*_sizes(memory.positions, 0)][-1]
    return Choice(policy, size, memory.need(policy, size).peak)


def settle(
    config: TrainerConfig,
    algorithm: AlgorithmConfig,
    model_path: Path,
    ranks: Ranks,
    *,
    engine_bytes: Callable[[int], int] = lambda memory: 0,
    longest: int = 0,
) -> TrainerConfig:
    """Return the configuration with a value in place of each `auto`, the same on every rank. Collective.

    If the memory of the model is not known, every block is recomputed, and micro-batches are small.

    Args:
        engine_bytes: given the bytes of a GPU, returns those that engines hold of this rank's GPU while a
            step is trained.
        longest: tokens of the longest sample, which should fit in a micro-batch; 0: not known.

    Raises:
        TrainingError: nothing fits, and `memory_check` is refuse; raised on every rank.
    """
    if ranks.device.type == "cpu":
        return on_cpu(config, longest=longest)
    box: tuple[str, TrainerConfig | None] = ("", None)
    if ranks.is_first:
        total = torch.cuda.get_device_properties(ranks.device).total_memory
        try:
            free = total - reserve(total) - engine_bytes(total)
            memory = TrainerMemory(config, algorithm, model_path, ranks, on_gpu=True)
            box = "", settled_within(config, memory, free, longest=longest)
        except MemoryUnknown as error:
            settled = _settled(config, "bfloat16", "full", max(UNMEASURED_TOKENS, longest))
            logger.warning(
                "%s; the trainer uses activation_checkpointing: %s, microbatch_tokens: %d, which you can set",
                error, settled.activation_checkpointing, settled.microbatch_tokens,
            )  # fmt: skip
            box = "", settled
        except (TrainingError, ConfigError) as error:
            box = str(error), None
    fault, chosen = ranks.broadcast(box)
    if chosen is None:
        raise TrainingError(fault)
    return chosen


def on_cpu(config: TrainerConfig, *, longest: int = 0) -> TrainerConfig:
    """Return the configuration with a value in place of each `auto`, for a trainer on the CPU."""
    return _settled(config, "float32", "off", max(CPU_TOKENS, longest))


def settled_within(config: TrainerConfig, memory: TrainerMemory, free: int, *, longest: int) -> TrainerConfig:
    """Return the configuration with a value in place of each `auto`, for a GPU with `free` bytes.

    Raises:
        TrainingError: nothing fits, and `memory_check` is refuse.
        MemoryUnknown: the model cannot be measured.
    """
    checkpointing, tokens = config.activation_checkpointing, config.microbatch_tokens
    choice = choose(memory, free, checkpointing=checkpointing, tokens=tokens, longest=longest)
    if choice is None:
        choice = smallest(memory, checkpointing=checkpointing, tokens=tokens)
        fault = (
            f"the trainer needs {choice.peak / GIB:.1f} GiB on each GPU (activation_checkpointing: "
            f"{choice.checkpointing}, microbatch_tokens: {choice.tokens}), and {free / GIB:.1f} GiB are free "
            "for it; areal-agents plan shows what would help"
        )
        if config.memory_check == "refuse":
            raise TrainingError(f"{fault}; trainer.memory_check: warn tries it nevertheless")
        logger.warning("%s; the run continues, because trainer.memory_check is warn", fault)
    if choice.tokens < longest:
        logger.warning(
            "a sample may have up to %d tokens, and a micro-batch holds %d: longer samples are dropped with "
            "their groups", longest, choice.tokens,
        )  # fmt: skip
    return _settled(config, "bfloat16", choice.checkpointing, choice.tokens)


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


def _sizes(positions: int, longest: int) -> Sequence[int]:
    """Sizes of micro-batches, from the largest that is useful, among them that of the longest sample."""
    most = max(min(MOST_TOKENS, positions) if positions else MOST_TOKENS, longest)
    sizes = [most * share // 8 for share in (8, 6, 4, 3, 2)] + [most // 8, most // 16, most // 32]
    useful = {size for size in sizes if size >= min(LEAST_TOKENS, most)}
    return sorted({*useful, longest} - {0}, reverse=True)
