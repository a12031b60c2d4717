"""The interface of an engine: takes token ids, returns ids with logprobs and versions, and swaps weights.

Versions are the run's integers; on the wire they are str(version). An engine that was just started reports
"default", which is version 0, the run's initial weights. Weights carry their Hugging Face names everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol, get_args

import numpy as np

from areal_agents.core.completion import Completion, Logprobs, SamplingParams, TokenChunk, TokenIds
from areal_agents.errors import EngineError
from areal_agents.inference.expert_routing import ExpertLayout

PauseMode = Literal["retract", "in_place", "abort"]
TensorForm = Literal["named", "flattened_bucket", "delta"]
MemoryKind = Literal["weights", "kv_cache"]
GroupBackend = Literal["gloo", "nccl"]
OnTokens = Callable[[TokenChunk], None]
MOST_LOGPROB = 1e-4  # a logprob may exceed 0 by this much, for rounding
MOST_MASS = 1.02  # a sum of probabilities may exceed 1 by this much: some engines round logprobs to bfloat16

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What an engine serves: the policy version, and the limits that requests are checked against.

    `max_context` bounds prompt plus completion, in tokens. `kernel` is the engine's name for its kernels, if
    it reports one. `experts` is None for a model without experts, or if its folder is not readable from here.
    `workers` is the number of tensor-parallel processes, `architecture` the model type in the model's config,
    if the engine reports it. `effective_context` is the length of prompt and completion together at which the
    engine may end a completion before `max_new_tokens`; `end_ids` are the tokens that end a completion
    regardless of the request. Both are None if they are not known. `stages_weights` tells that weights which
    are sent in pieces are used only when the update ends, all at once, so that the engine samples while they
    arrive.
    """

    model_path: str
    version: int
    vocab_size: int
    max_context: int
    kernel: str = ""
    experts: ExpertLayout | None = None
    workers: int = 1
    architecture: str = ""
    effective_context: int | None = None
    end_ids: frozenset[int] | None = None
    stages_weights: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """The logprobs that a model assigns to the tokens at N consecutive positions of a sequence.

    All logprobs are natural logarithms of the plain distribution (temperature 1, nothing truncated) over the
    next token, given all tokens before it. ValueError if the arrays do not fit together, or hold no logprobs.

    Attributes:
        token_logprobs: [N] float32, the logprobs of the tokens of the sequence.
        top_ids: [N, k] int32, the most likely tokens at each position, best first.
        top_logprobs: [N, k] float32, their logprobs.
        version: the version of the weights that the engine reported with the answer. After a concurrent swap
            with pause mode in_place, the first positions may be scored by the previous weights.
    """

    token_logprobs: Logprobs
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    version: int

    def __post_init__(self) -> None:
        for name, dtype in (
            ("token_logprobs", np.float32),
            ("top_ids", np.int32),
            ("top_logprobs", np.float32),
        ):
            array = np.array(getattr(self, name), dtype=dtype)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        count, shape = self.token_logprobs.shape, self.top_ids.shape
        if len(count) != 1 or len(shape) != 2 or shape[:1] != count or self.top_logprobs.shape != shape:
            raise ValueError(
                f"token_logprobs, top_ids and top_logprobs must be [N], [N, k] and [N, k], got {count}, "
                f"{shape} and {self.top_logprobs.shape}"
            )
        for values in (self.token_logprobs, self.top_logprobs):
            if not np.isfinite(values).all() or (values > MOST_LOGPROB).any():
                raise ValueError("logprobs must be finite and at most 0")
        if (np.diff(self.top_logprobs, axis=1) > 0).any():
            raise ValueError("top_logprobs must not ascend")
        if (np.diff(np.sort(self.top_ids, axis=1), axis=1) == 0).any():
            raise ValueError("top_ids must differ at each position")
        mass = np.exp(self.top_logprobs, dtype=np.float64).sum(axis=1)
        if (mass > MOST_MASS).any():
            raise ValueError(
                f"the probabilities of top_logprobs must add up to at most 1, got {mass.max():.4f}"
            )

    def __len__(self) -> int:
        return len(self.token_logprobs)


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A process group through which the trainer, its rank 0, broadcasts weights to engines.

    Attributes:
        address, port: where the trainer listens.
        rank_offset: the rank of this engine's first tensor-parallel worker, at least 1.
        world_size: 1 for the trainer + the workers of all engines.
        name: the name of the group in requests; unique among the joined groups.
        backend: gloo on CPUs, nccl on GPUs.
    """

    address: str
    port: int
    rank_offset: int
    world_size: int
    name: str
    backend: GroupBackend

    def __post_init__(self) -> None:
        if not self.name or not self.address:
            raise ValueError(
                f"a weight group needs an address and a name, got {self.address!r}, {self.name!r}"
            )
        if not 0 < self.port < 65536:
            raise ValueError(f"port must be from 1 to 65535, got {self.port}")
        if not 1 <= self.rank_offset < self.world_size:
            raise ValueError(
                f"rank_offset must be from 1 to world_size - 1, got {self.rank_offset} of {self.world_size}"
            )
        if self.backend not in get_args(GroupBackend):
            raise ValueError(f"backend must be one of {get_args(GroupBackend)}, got {self.backend!r}")


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Weights that travel as one broadcast of `nbytes` uint8.

    The bytes of the tensors follow one another, row-major and unpadded, in the order given here.

    Attributes:
        names: Hugging Face names.
        dtypes: keys of ITEM_BYTES, one per name.
        shapes: one per name.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes) or not self.names:
            raise ValueError(
                f"a bucket needs at least one name, and a dtype and a shape for each, got {len(self.names)} "
                f"names, {len(self.dtypes)} dtypes, {len(self.shapes)} shapes"
            )
        if unknown := sorted(set(self.dtypes) - ITEM_BYTES.keys()):
            raise ValueError(f"dtypes must be of {sorted(ITEM_BYTES)}, got {unknown[0]!r}")
        start = 0
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            if start % ITEM_BYTES[dtype]:
                raise ValueError(
                    f"{name} would begin at byte {start} of its bucket, where engines cannot read {dtype}: "
                    "put the types with the longer numbers first"
                )
            start += prod(shape) * ITEM_BYTES[dtype]

    @property
    def nbytes(self) -> int:
        """Length of the broadcast in bytes."""
        return sum(prod(shape) * ITEM_BYTES[d] for shape, d in zip(self.shapes, self.dtypes, strict=True))


@dataclass(frozen=True, slots=True)
class WeightsChecksum:
    """Hashes of the weights that an engine holds.

    Attributes:
        ranks: one mapping per tensor-parallel worker, from the engine's own parameter name to 16 hex digits.
            Engines fuse matrices: q_proj, k_proj and v_proj are rows of `self_attn.qkv_proj`, gate_proj and
            up_proj of `mlp.gate_up_proj`; all else has its Hugging Face name. On a CPU a hash is the first
            8 bytes of the SHA-256 of the tensor's row-major bytes in the dtype that the engine serves.
    """

    ranks: tuple[Mapping[str, str], ...]


class Sampler(Protocol):
    """Samples completions and scores tokens: one engine, or a pool of them.

    All implementations promise the following (`tests/inference/test_sampler_contract.py`). A completion has
    at most `max_new_tokens` ids, all in the vocabulary, and a logprob and a version for each. The pieces of a
    stream are the completion. A call that is cancelled, or whose listener raises, is aborted in the engine
    and harms no other call. A prompt that cannot be served is refused, not cut.

    Every method raises EngineUnavailable when the engine does not answer in time, EngineRejected when it
    refuses the request, and EngineError when its answer cannot be trusted.
    """

    async def generate(
        self,
        rid: str,
        input_ids: TokenIds,
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
        stream_interval: int = 1,
    ) -> Completion:
        """Continue `input_ids` [P]; cancelling the call aborts the generation.

        `rid` names the request. Use each once: SGLang may abort a request whose id was used before, even if
        that request has ended (0.5.21: until two seconds after a stream has ended).

        `on_tokens` is called in the event loop with each piece as it arrives; together they are the
        completion's tokens. What it raises ends the call and aborts the generation. `affinity` names calls
        that share a prefix, such as an episode's: a pool keeps them on one replica, and a single engine
        ignores it.

        Each further piece has at least `stream_interval` tokens, but for the last one; the first does not
        wait for so many. Without `on_tokens` it has no effect.
        """
        ...

    async def score(
        self, rid: str, input_ids: TokenIds, *, start: int, top: int = 0, affinity: str = ""
    ) -> PromptScores:
        """Compute the logprobs of the tokens at positions `start`..P-1 of `input_ids` [P], sampling nothing.

        Each is conditioned on all tokens before it, so 1 ≤ `start` < P; anything else raises EngineRejected.
        N is P - `start`. Call it concurrently for a batch: the engine schedules the requests together.
        Cancelling the call ends the computation; EngineUnavailable if another aborts it.

        Args:
            rid: names the request; as with `generate`, use each once.
            input_ids: [P] the sequence. The embedded engine takes P ≤ `max_context`, vLLM 0.32
                P ≤ `max_context` - 1, SGLang 0.5.21 P ≤ `max_context` - 7.
            start: the first position that is scored.
            top: k, how many of the most likely tokens are returned at each position; at most the vocabulary.
            affinity: see `generate`.
        """
        ...

    async def abort(self, rid: str) -> None:
        """End a running generation; its caller gets what was sampled, with finish_reason "abort"."""
        ...

    async def health(self) -> None:
        """Return if the engine answers, raise otherwise."""
        ...

    async def model_info(self) -> ModelInfo:
        """Return the model, version and limits that are served now."""
        ...

    async def busy_s(self) -> float | None:
        """Return the seconds since the start spent sampling; None if the engine does not count them."""
        ...

    async def aclose(self) -> None:
        """Release connections. The engine itself keeps running."""
        ...


class Engine(Sampler, Protocol):
    """A served policy whose weights the trainer replaces. Errors as in Sampler.

    New weights come from a folder, as tensors in requests, or as broadcasts in a process group. The last two
    are sent between `begin_weight_update` and `end_weight_update`, every weight of the model once:

        pause → begin → update_weights_from_tensors or receive_weights, the last with last=True → end → resume

    An engine that stages weights (`ModelInfo.stages_weights`) is paused for the swap only:

        begin → … → prepare_weight_update → pause → end → resume
    """

    @property
    def base_url(self) -> str:
        """The URL of the engine, which also names it in errors."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. retract: continue later on recomputed keys and values; in_place: continue later on
        the old ones; abort: end all running generations. New requests wait for `resume`."""
        ...

    async def resume(self) -> None:
        """Continue sampling after `pause`."""
        ...

    async def prepare_weights_from_disk(self, path: str) -> None:
        """Have the safetensors folder at `path` read beside serving, so that the next
        `update_weights_from_disk` of the same path only swaps. An engine that cannot does nothing."""
        ...

    async def settle(self) -> None:
        """Wait until running requests and the updates of other processes have ended, so that an update is
        possible without a pause. An engine whose update waits for them returns at once."""
        ...

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Serve the safetensors folder at `path` as `version`. On an error the old weights are kept."""
        ...

    async def begin_weight_update(self, pause: PauseMode | None = None) -> None:
        """Open an update by tensors or broadcasts; an update that a lost trainer left open is closed first.

        Args:
            pause: the mode of the pause in which the update ends; None: that of the current pause.
        """
        ...

    async def update_weights_from_tensors(
        self, payloads: Sequence[str], version: int, *, last: bool = True, form: TensorForm = "named"
    ) -> None:
        """Send some of the weights: one payload per tensor-parallel worker, each the base64 form of a pickle.
        With `last`, `version` is what the engine serves from now on.

        Args:
            form: what is pickled. named: a list of (name, tensor). flattened_bucket: a mapping of
                flattened_tensor, uint8, and metadata, which tells name, shape, dtype and place of each
                weight; the tensor may be a handle of shared memory. delta, for the embedded engine only: a
                mapping of `before`, the version that the changes apply to, changes, a list of (name, indices,
                values), and whole, a list of (name, tensor); a weight in neither stays as it is.
        """
        ...

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Join a process group; returns when all its members have, the trainer (rank 0) among them."""
        ...

    async def leave_weight_group(self, name: str) -> None:
        """Leave the process group `name`."""
        ...

    async def receive_weights(self, bucket: WeightBucket, *, group: str, version: int, last: bool) -> None:
        """Receive some of the weights from rank 0 of `group`, which broadcasts them concurrently. With
        `last`, `version` is what the engine serves from now on."""
        ...

    async def prepare_weight_update(self) -> None:
        """Have the weights that arrived made ready beside serving, so that `end_weight_update` only swaps.
        An engine that cannot does nothing."""
        ...

    async def end_weight_update(self) -> None:
        """Close the update. The embedded engine swaps here, all weights at once, or raises and keeps the old
        ones; SGLang wrote each tensor as it came."""
        ...

    async def abandon_weight_update(self) -> None:
        """Close an update of which a part is missing or in doubt, so that none of it is swapped in, even if
        that part arrives late. SGLang wrote each tensor as it came; its weights have to be loaded anew."""
        ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Make the LoRA adapter folder at `path` known as `name`, which must be new."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter once the generations that use it have ended."""
        ...

    async def set_version(self, version: int, *, abort_running: bool) -> None:
        """Report `version` from now on, without new weights; `abort_running` ends all running generations,
        whose callers get what was sampled."""
        ...

    async def checksum(self) -> WeightsChecksum:
        """Hash the weights in use (not adapters)."""
        ...

    async def release_memory(self, kinds: Sequence[MemoryKind]) -> None:
        """Release the memory of `kinds`, while paused in mode retract or abort. Released weights are lost:
        update them after `resume_memory` and before `resume`."""
        ...

    async def resume_memory(self, kinds: Sequence[MemoryKind]) -> None:
        """Allocate the memory of `kinds` again."""
        ...


def adapter_name(version: int) -> str:
    """Return the name of the LoRA adapter of policy `version` in engines."""
    return f"policy-{version}"


def version_from_wire(value: object) -> int:
    """Parse a weight version; "default" is 0. EngineError for anything that is not a version."""
    if value == "default":
        return 0
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    raise EngineError(f"the engine reports weight version {value!r}; expected an integer of this run")
