"""Checks whether an engine holds exactly the published weights.

Both sides hash the bits of every tensor as the engine defines it (`cpu_hash` or `gpu_hash`). Engines fuse
matrices and hold them in their own type and on their own device, so the published weights are converted to
that form: fused, and rounded to float32, bfloat16 or float16 as the engine rounds them when loading. A tensor
agrees if it has the engine's hash in one of these types; a wrong weight therefore never agrees, and a type
chosen by the engine is not an error.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference.engine import Engine
from areal_agents.training.model.folder import raw_bytes
from areal_agents.training.model.safetensors_files import Checkpoint

logger = logging.getLogger(__name__)

# tensors that engines do not hold: recomputed, or the same as the embedding
_COMPUTED = ("rotary_emb.inv_freq", "lm_head.weight")

FusedPart = tuple[int, int]  # expert, and position within the fused matrix

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
         "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}  # fmt: skip
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_EXPERTS = {"gate": ("w13_weight", 0), "up": ("w13_weight", 1), "down": ("w2_weight", 0)}
_PADDED = ("embed_tokens.weight", "lm_head.weight")  # engines pad the vocabulary with zero rows
_PAD_TO = 64
THREADS = 8  # on which tensors are hashed on a CPU; each holds one tensor and its conversions
_EXPERT_WEIGHTS = re.compile(r"\.experts\.w(13|2)_weight$")


@dataclass(frozen=True, slots=True)
class Agreement:
    """tensors: number of tensors that the engine holds. compared: number of them that agree; the others have
    an engine-specific form."""

    compared: int
    tensors: int


class Weights(Protocol):
    """Published weights; implemented by `FolderWeights` and by `host_copy.HostCopy`."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each weight, by name."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a weight in the published type, on the CPU."""
        ...


class FolderWeights:
    """The weights in a folder.

    Raises:
        TrainingError: the folder's files cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._files = Checkpoint(folder)
        self.shapes = {name: stored.shape for name, stored in self._files.tensors.items()}

    def read(self, name: str) -> Tensor:
        """See Weights.read."""
        return self._files.read(self._files.tensors[name])


class Checksums:
    """Published weights under the names and in the forms that engines use."""

    def __init__(self, published: Weights) -> None:
        self._published = published
        self._parts: dict[str, dict[FusedPart, str]] = {}
        for name in published.shapes:
            fused, part = _engine_name(name)
            self._parts.setdefault(fused, {})[part] = name
        self._last: tuple[str, torch.dtype] = ("cpu", torch.float32)  # the type that agreed last

    async def check(self, engine: Engine) -> Agreement | None:
        """Compare with the tensors that the engine holds. Return None, with a warning, if the engine has
        several workers, because the hashes of their shards cannot be computed here.

        Raises:
            EngineError: a tensor differs or is missing; the message names the tensor and the engine.
        """
        ranks = (await engine.checksum()).ranks
        if len(ranks) != 1:
            logger.warning(
                "%s: the weights of %d tensor-parallel workers are not compared", engine.base_url, len(ranks)
            )
            return None
        return await asyncio.to_thread(self._compare, ranks[0], engine.base_url)

    def _compare(self, held: Mapping[str, str], url: str) -> Agreement:
        unknown = held.keys() - self._parts.keys()
        missing = sorted(n for n in self._parts.keys() - held.keys() if not n.endswith(_COMPUTED))
        if missing and not unknown:
            raise EngineError(f"the weights that {url} serves lack {missing[0]}, which was published")
        # the smallest tensors are enough to find the type
        common = sorted(self._parts.keys() & held.keys(), key=self._rows)
        if not common:
            raise EngineError(f"{url} serves a different model: it has none of the published weights")
        first, *others = common
        agree = [self._agrees(first, held[first])]
        # A GPU hashes one tensor fast, and should not have to hold several.
        count = THREADS if self._last[0] == "cpu" else 1
        with ThreadPoolExecutor(count, thread_name_prefix="compare-weights") as threads:
            agree += threads.map(lambda name: self._agrees(name, held[name]), others)
        for name, does in zip(common, agree, strict=True):
            if not does:
                raise EngineError(
                    f"{url} serves other weights than those published: {name} differs (its checksum is "
                    f"{held[name]}, which is that of the published one in none of float32, bfloat16, float16)"
                )
        if unknown:
            logger.warning(
                "%s: %d of %d weights have an engine-specific form and are not compared, such as %s",
                url, len(unknown), len(held), min(unknown),
            )  # fmt: skip
        return Agreement(len(common), len(held))

    def _agrees(self, name: str, want: str) -> bool:
        whole = self._whole(name)
        kinds = {whole.dtype, *_TYPES}  # try the folder's own type first, since it is the likeliest
        forms = [self._last] + [(kind, dtype) for kind in HASHES for dtype in [whole.dtype, *kinds]]
        for tensor in _paddings(name, whole):
            for form in dict.fromkeys(forms):
                kind, dtype = form
                device = "cuda" if kind == "gpu" and torch.cuda.is_available() else "cpu"
                if HASHES[kind](tensor.to(dtype).to(device)) == want:
                    self._last = form
                    return True
        return False

    def _whole(self, name: str) -> Tensor:
        """The tensor in the form in which engines fuse it."""
        experts: dict[int, list[Tensor]] = {}
        for (expert, _), published in sorted(self._parts[name].items()):
            experts.setdefault(expert, []).append(self._published.read(published))
        matrices = [torch.cat(rows) if len(rows) > 1 else rows[0] for rows in experts.values()]
        return torch.stack(matrices) if _EXPERT_WEIGHTS.search(name) else matrices[0]

    def _rows(self, name: str) -> tuple[int, str]:
        shapes = [self._published.shapes[part] for part in self._parts[name].values()]
        return sum(shape[0] if shape else 1 for shape in shapes), name


class EngineComparison:
    """Compares several engines with the published weights.

    Args:
        known: base URLs of engines that need no comparison.

    Attributes:
        compared: base URLs of engines whose weights agree or that have no checksums.
    """

    def __init__(self, published: Weights, *, known: Collection[str] = ()) -> None:
        self.compared: set[str] = set()
        self._known = known
        self._checksums = Checksums(published)
        self._agreements: list[Agreement] = []
        self._difference: EngineError | None = None

    async def __call__(self, engine: Engine) -> None:
        """Compare one engine. Raise EngineError if its weights differ; an engine that cannot answer is not
        compared."""
        if engine.base_url in self._known:
            return
        try:
            agreement = await self._checksums.check(engine)
        except EngineUnavailable as error:
            logger.warning("the weights of %s cannot be compared now: %s", engine.base_url, error)
        except EngineRejected as error:  # it will not be able to later either
            logger.warning("the weights of %s cannot be compared: %s", engine.base_url, error)
            self.compared.add(engine.base_url)
        except EngineError as error:
            self._difference = self._difference or error
            raise
        else:
            self.compared.add(engine.base_url)
            if agreement is not None:
                self._agreements.append(agreement)

    def raise_difference(self) -> None:
        """Raise the EngineError of the first compared engine whose weights differ, if there is one."""
        if self._difference is not None:
            raise self._difference

    @property
    def share(self) -> float | None:
        """Number of weights that agree / number of weights that the compared engines hold; None if no engine
        was compared."""
        tensors = sum(agreement.tensors for agreement in self._agreements)
        return sum(agreement.compared for agreement in self._agreements) / tensors if tensors else None


def _engine_name(name: str) -> tuple[str, FusedPart]:
    """The engine's name of the matrix that contains a published weight, and which part of it the weight
    is."""
    expert = _EXPERT.match(name)
    if expert is not None:
        fused, position = _EXPERTS[expert[3]]
        return f"{expert[1]}.{fused}", (int(expert[2]), position)
    module, _, parameter = name.rpartition(".")
    parent, _, layer = module.rpartition(".")
    if layer in _ROWS:
        fused, position = _ROWS[layer]
        return f"{parent}.{fused}.{parameter}", (0, position)
    return name, (0, 0)


def _paddings(name: str, tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, and the tensor with the padding that an engine may have added."""
    yield tensor
    if name.endswith(_PADDED) and len(tensor) % _PAD_TO:
        yield torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % _PAD_TO))


Hash = Callable[[Tensor], str]

_MASK = 0xFFFFFFFF
_MASK64 = (1 << 64) - 1
_SEED = 0x243F6A88
_SEEDS = (_SEED, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _MASK)
_POSITION = ((0x27D4EB2D, 15), (0x165667B1, 13))
_TILE = 8192  # words
_TILES_AT_ONCE = 512


def cpu_hash(tensor: Tensor) -> str:
    """The checksum that an engine on a CPU returns: the first 8 bytes of the SHA-256 of the row-major bytes,
    in hex."""
    return sha256(raw_bytes(tensor)).hexdigest()[:16]


def gpu_hash(tensor: Tensor) -> str:
    """The checksum that SGLang on a GPU returns (`gpu_tensor_hash` of 0.5.21), computed on the tensor's
    device.

    Each 32-bit word is mixed with its position by MurmurHash3's finaliser, summed per tile of 8192 words,
    finalised, and the tiles' 64-bit sums go through splitmix64.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if not len(data):
        return f"{0:016x}"
    words = torch.nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    total = 0
    for start in range(0, len(words), _TILE * _TILES_AT_ONCE):
        total += _tiles(words[start : start + _TILE * _TILES_AT_ONCE], start, len(words) * 4)
    return f"{_splitmix64(total & _MASK64):016x}"


HASHES: Mapping[str, Hash] = {"cpu": cpu_hash, "gpu": gpu_hash}


def _tiles(words: Tensor, start: int, nbytes: int) -> int:
    """Sum of the tiles' hashes; `words` begin at word `start` of a tensor of `nbytes` bytes."""
    index = torch.arange(start, start + len(words), device=words.device) & _MASK
    values = words.long() & _MASK
    halves = []
    for seed, (factor, turn) in zip(_SEEDS, _POSITION, strict=True):
        mixed_position = ((index * factor + seed) & _MASK) ^ ((index << turn | index >> (32 - turn)) & _MASK)
        mixed = _finalise(values ^ mixed_position)
        mixed = torch.nn.functional.pad(mixed, (0, -len(mixed) % _TILE)).view(-1, _TILE)
        halves.append(_finalise((mixed.sum(1) & _MASK) ^ (nbytes & _MASK)))
    return sum(high << 32 | low for high, low in zip(*(h.tolist() for h in halves), strict=True))


def _finalise(x: Tensor) -> Tensor:
    """MurmurHash3's fmix32, on words held in 64 bits."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def _splitmix64(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _MASK64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _MASK64
    return x ^ x >> 31
