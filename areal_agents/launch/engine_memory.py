"""The memory of a run's engines: weights, and keys and values in the rest of what they are given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from areal_agents.config import Config
from areal_agents.inference.config import DEFAULT_MAX_CONTEXT
from areal_agents.inference.sglang.server import CPU_TOKENS, place
from areal_agents.inference.vllm.server import CPU_CACHE_GIB
from areal_agents.launch.gpus import Machine
from areal_agents.launch.nodes import ranks_beside_engines

if TYPE_CHECKING:
    from areal_agents.training.memory.estimate import TrainerMemory

MIB, GIB = 2**20, 2**30
# SGLang 0.5.21 (arg_groups/memory_hook.py): up to this many GiB of a GPU, tokens of a prefill chunk
_CHUNKS = ((20, 2048), (60, 4096), (160, 8192))
_LARGEST_CHUNK = 16_384
_VLLM_SHARE = 0.92  # of a GPU, unless it is told another


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What one engine holds on each of its devices.

    Attributes:
        weights: bytes of its part of the weights.
        room: bytes for keys and values; on a CPU they are taken as sequences come.
        least_room: bytes of the keys and values of one sequence.
        tokens: the tokens whose keys and values have room.
    """

    weights: int
    room: int
    least_room: int
    tokens: int

    @property
    def total(self) -> int:
        """Weights, keys and values."""
        return self.weights + max(0, self.room)

    @classmethod
    def of(cls, config: Config, machine: Machine, memory: TrainerMemory) -> EngineMemory:
        """Compute it from the sizes of the model that `memory` has measured."""
        engine = config.engine
        on_gpu = bool(engine_gpus(config, machine))
        width = _width(config, on_gpu=on_gpu)
        shares = engine.tensor_parallel if on_gpu else 1
        weights = memory.model_elements * width // shares
        per_token = memory.cache_elements() * width / shares
        context = engine.max_context or min(memory.positions or DEFAULT_MAX_CONTEXT, DEFAULT_MAX_CONTEXT)
        if engine.kind == "embedded":
            room = round(engine.slots * context * per_token)
        elif not on_gpu:
            room = CPU_CACHE_GIB * GIB if engine.kind == "vllm" else round(CPU_TOKENS * per_token)
        else:
            room = round(_server_share(config, machine.memory) * machine.memory) - weights
        return cls(weights, room, round(context * per_token), max(0, round(room / per_token)))


def engine_gpus(config: Config, machine: Machine) -> list[tuple[int, ...]]:
    """The GPUs of each engine that the run starts; empty if it starts none, or on the CPU."""
    engine = config.engine
    if not starts_engines(config):
        return []
    if engine.kind != "embedded":
        beside = ranks_beside_engines(config.trainer, max(1, config.trainer.nodes))
        taken = beside if trainer_gpus(config, machine) else 0
        placed = place(engine, machine.gpus, trainer_gpus=taken)
        return [placement.gpus for placement in placed if placement.gpus]
    if not engine.device.startswith("cuda"):
        return []
    first = int(engine.device.partition(":")[2] or 0)
    return [(first + replica,) for replica in range(engine.replicas)]


def starts_engines(config: Config) -> bool:
    """Whether the run starts engines."""
    return not config.engine.urls and not config.data.episodes


def trainer_gpus(config: Config, machine: Machine) -> int:
    """The number of GPUs of each of its machines that the trainer computes on."""
    on_cpu = config.trainer.device == "cpu" or (config.trainer.device == "auto" and not machine.gpus)
    return 0 if on_cpu else config.trainer.ranks // max(1, config.trainer.nodes)


def engine_bytes_in_training(config: Config, memory: int) -> int:
    """The bytes that engines hold of each of the trainer's GPUs while a step is trained.

    SGLang gives back everything when it sleeps; the embedded engine keeps its weights.

    Args:
        memory: bytes of a GPU.

    Raises:
        ConfigError: the embedded engine does not support the model.
    """
    engine = config.engine
    if engine.colocate == "none":
        return 0
    if engine.kind != "embedded":
        return round(engine.static_memory * memory) if engine.colocate == "split" else 0
    if not engine.device.startswith("cuda"):
        return 0
    weights, cache = _embedded_elements(config)
    return (weights + (cache if engine.colocate == "split" else 0)) * _width(config, on_gpu=True)


def ranges(numbers: Iterable[int]) -> str:
    """Consecutive numbers as 0-3, a single one as 0."""
    numbers = list(numbers)
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _server_share(config: Config, memory: int) -> float:
    """The share of a GPU that a server takes for weights, keys and values.

    If none is given, vLLM takes 0.92, and SGLang leaves what a prefill chunk and CUDA graphs need, which is
    most of a small GPU.
    """
    if config.engine.static_memory:
        return config.engine.static_memory
    if config.engine.kind == "vllm":
        return _VLLM_SHARE
    chunk = next((tokens for gib, tokens in _CHUNKS if memory < gib * GIB), _LARGEST_CHUNK)
    left = (512 + 1.5 * chunk + 128 * config.engine.tensor_parallel) * MIB
    if memory > 60 * GIB:
        left = max(left, 10 * GIB)
    return 1 - left / memory


def _width(config: Config, *, on_gpu: bool) -> int:
    """Bytes of a weight in the engines."""
    dtype = config.engine.dtype
    return 4 if dtype == "float32" or (dtype == "auto" and not on_gpu) else 2


def _embedded_elements(config: Config) -> tuple[int, int]:
    """The numbers of weights, and of keys and values, that an embedded engine holds."""
    from areal_agents.inference.embedded.model.architecture import read_architecture
    from areal_agents.training.model.loading import build_model

    arch = read_architecture(Path(config.model))
    context = config.engine.max_context or min(arch.max_positions, DEFAULT_MAX_CONTEXT)
    cache = 2 * arch.layers * arch.kv_heads * arch.head_dim * config.engine.slots * context
    return sum(p.numel() for p in build_model(Path(config.model))[0].parameters()), cache
