"""What vLLM's workers do with new weights. Loaded by vLLM (`--worker-extension-cls`), which adds the methods
of `WeightUpdates` to its worker class and calls them by /collective_rpc; imports nothing of this package.

vLLM's own update from a folder leaves the model without weights if the folder cannot be read, and the server
then ends with the next request; its own broadcast needs a communicator of vLLM on the trainer's side. These
methods check a folder before they touch a weight, put the old tensors back after a failure, and join the
trainer's process group, with gloo or NCCL.

Every method returns a mapping, with `error`, a message, if it has refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_GROUP_TIMEOUT = timedelta(seconds=600)
_Answer = dict[str, Any]


class Refused(Exception):
    """A request that is refused; nothing was changed."""


def _answering(method: Callable[..., _Answer | None]) -> Callable[..., _Answer]:
    """Turn Refused and failures of files and broadcasts into an answer; vLLM would log a crash of its
    worker."""

    @functools.wraps(method)
    def answered(self: Any, *args: Any, **options: Any) -> _Answer:
        try:
            return method(self, *args, **options) or {}
        except Refused as refused:
            return {"error": str(refused)}
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            return {"error": f"{type(error).__name__}: {error}", "failed": True}

    return answered


class WeightUpdates:
    """Methods that are added to vLLM's worker class; `self` is a worker. Their names are its own."""

    @_answering
    def areal_describe(self: Any) -> _Answer:
        """Return what a client must know of the model, and of the settings of the server."""
        config = self.vllm_config
        model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
        return {
            "model_path": _start_folder(self),
            "vocab_size": model.get_vocab_size(),
            "max_model_len": model.max_model_len,
            "model_type": model.hf_config.model_type,
            "workers": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size * parallel.data_parallel_size,
            "dtype": str(model.dtype).removeprefix("torch."),
            "logprobs_mode": str(model.logprobs_mode),
            "max_logprobs": model.max_logprobs,
            "prefix_caching": bool(cache.enable_prefix_caching),
            "quantization": model.quantization,
            "lora": config.lora_config is not None,
        }

    @_answering
    def areal_load_folder(self: Any, path: str) -> None:
        """Load the safetensors folder at `path`; a folder that does not fit is refused."""
        _check_folder(Path(path), Path(_start_folder(self)))
        if _state(self).is_open:
            _close(self)
        _load(self, path)

    @_answering
    def areal_begin(self: Any) -> None:
        """Open an update by broadcasts."""
        state = _state(self)
        if state.is_open:
            raise Refused("a weight update is already open")
        state.is_open = True

    @_answering
    def areal_join(
        self: Any, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None:
        """Join the trainer's process group, each worker as rank `rank_offset` + its own rank."""
        groups = _state(self).groups
        if name in groups:
            raise Refused(f"the group {name} was joined already")
        if (backend == "nccl") != (self.device.type == "cuda"):
            raise Refused(f"backend {backend} does not fit an engine on {self.device.type}")
        host = f"[{address}]" if ":" in address else address
        rank = rank_offset + self.rank
        store, _, _ = next(
            distributed_c10d.rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=_GROUP_TIMEOUT)
        )
        store.set_timeout(_GROUP_TIMEOUT)
        # The steps are those of the trainer, because all members must use the same keys in the store.
        made, _ = distributed_c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            distributed_c10d.Backend(backend),
            dist.PrefixStore(name, store),
            group_name=distributed_c10d.GroupName(name),
            timeout=_GROUP_TIMEOUT,
        )
        distributed_c10d._world.pg_group_ranks[made] = {i: i for i in range(world_size)}
        groups[name] = made

    @_answering
    def areal_leave(self: Any, name: str) -> None:
        """Leave a process group."""
        group = _state(self).groups.pop(name, None)
        if group is None:
            raise Refused(f"the group {name} does not exist")
        dist.destroy_process_group(group)

    @_answering
    def areal_receive(
        self: Any, names: list[str], dtypes: list[str], shapes: list[list[int]], group: str
    ) -> None:
        """Receive one broadcast of uint8 from rank 0, in which the tensors follow one another, and load
        them."""
        state = _state(self)
        if not state.is_open:
            raise Refused("weights arrive between begin_weight_update and end_weight_update")
        if group not in state.groups:
            raise Refused(f"the group {group} was not joined")
        types = [getattr(torch, dtype) for dtype in dtypes]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, types, strict=True)]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        dist.broadcast(received, src=0, group=state.groups[group])
        if not state.is_loading:
            _start_loading(self)
        parts = received.split(sizes)
        with _configured(self):
            self.model_runner.get_model().load_weights(
                (name, part.view(dtype).view(shape))
                for name, part, dtype, shape in zip(names, parts, types, shapes, strict=True)
            )

    @_answering
    def areal_end(self: Any) -> None:
        """Close the update; the weights that were loaded are used from now on."""
        if not _state(self).is_open:
            raise Refused("there is no update to end: begin_weight_update opens one")
        _close(self)

    @_answering
    def areal_abandon(self: Any) -> _Answer:
        """Close an update of which a part is missing. If weights were loaded, those with which the server was
        started are loaded in their place, and `is_reset` is true."""
        was_loading = _state(self).is_loading
        _close(self)
        if was_loading:
            _load(self, _start_folder(self))
        return {"is_reset": was_loading}

    @_answering
    def areal_checksums(self: Any) -> _Answer:
        """Return the first 16 hex digits of the SHA-256 of each parameter, row-major. On a CPU vLLM keeps
        the matrices of linear layers only in a form of its kernels; they have a mark in their names."""
        checksums = {}
        for name, weight in self.model_runner.get_model().named_parameters():
            if not weight.numel():
                checksums[f"{name} (packed)"] = ""
                continue
            data = weight.detach().cpu().contiguous().view(-1).view(torch.uint8)
            checksums[name] = hashlib.sha256(data.numpy()).hexdigest()[:16]
        return {"checksums": checksums}


class _State:
    """The state of a worker's updates.

    Attributes:
        folder: the folder that the server was started with.
        is_open: whether an update by broadcasts is open.
        is_loading: whether the model awaits weights, so that it cannot compute.
        groups: the process groups that were joined.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.is_open = False
        self.is_loading = False
        self.groups: dict[str, Any] = {}


def _state(worker: Any) -> _State:
    found = worker.__dict__.get("areal_state")
    if found is None:
        # Loading a folder changes the path in vLLM's configuration, so the first one is kept here.
        found = worker.__dict__["areal_state"] = _State(worker.vllm_config.model_config.model)
    return found


def _start_folder(worker: Any) -> str:
    return _state(worker).folder


def _configured(worker: Any) -> Any:
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(worker.vllm_config)


def _start_loading(worker: Any) -> None:
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    with _configured(worker):
        initialize_layerwise_reload(worker.model_runner.get_model())
    _state(worker).is_loading = True


def _close(worker: Any) -> None:
    """Close the open update, if there is one; layers that got no weights keep their old ones."""
    state = _state(worker)
    state.is_open = False
    if state.is_loading:
        state.is_loading = False
        _finish_loading(worker)


def _finish_loading(worker: Any) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with _configured(worker):
        finalize_layerwise_reload(worker.model_runner.get_model(), worker.vllm_config.model_config)
    _repack_shared(worker)


def _load(worker: Any, path: str) -> None:
    try:
        worker.reload_weights(weights_path=path)
    except BaseException:
        _finish_loading(worker)
        raise
    _repack_shared(worker)


def _repack_shared(worker: Any) -> None:
    """On a CPU, renew the packed form of weights that a layer shares, such as an output layer tied to the
    embedding: vLLM packs them once, and a reload writes the weights but leaves that form as it was."""
    for layer in worker.model_runner.get_model().modules():
        if hasattr(layer, "cpu_linear") and layer.weight.numel():
            layer.quant_method.process_weights_after_loading(layer)


def _check_folder(folder: Path, served: Path) -> None:
    """Raise Refused unless the weights in `folder` have the names and shapes of those in `served`."""
    found, expected = dict(_shapes(folder)), dict(_shapes(served))
    if not found:
        raise Refused(f"there are no weights in {folder}")
    tied = {"lm_head.weight"}  # a model that shares it with the embedding may be saved with or without it
    if lacking := sorted(expected.keys() - found.keys() - tied):
        raise Refused(f"{folder} lacks {len(lacking)} of the model's weights, such as {lacking[0]}")
    for name, shape in found.items():
        if name in expected and shape != expected[name]:
            raise Refused(f"{folder}: {name} has the shape {shape}, expected {expected[name]}")


def _shapes(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield name and shape of each weight, from the headers of the safetensors files."""
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, entry["shape"]
