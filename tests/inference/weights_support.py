"""What a trainer sends to an engine: weights by each transport, and adapters in the format of peft."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import pickle
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from inference_support import load_reference
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from areal_agents.inference import SGLangEngine
from areal_agents.inference.embedded.updates.process_group import join_group, leave_group
from areal_agents.inference.engine import WeightBucket, WeightGroup
from areal_agents.inference.ports import reserved_ports

JOIN_S = 30.0
Named = Sequence[tuple[str, Tensor]]
Transport = Callable[[SGLangEngine, Path, int], Awaitable[None]]


def weights_of(folder: Path) -> list[tuple[str, Tensor]]:
    return sorted(load_file(folder / "model.safetensors").items())


def payload_of(named: Any) -> str:
    return base64.b64encode(pickle.dumps(named)).decode()


def bucket_of(named: Named) -> tuple[WeightBucket, Tensor]:
    """Return the bucket to announce, and the bytes to broadcast."""
    names, tensors = zip(*named, strict=True)
    dtypes = tuple(str(t.dtype).removeprefix("torch.") for t in tensors)
    flat = torch.cat([t.contiguous().flatten().view(torch.uint8) for t in tensors])
    return WeightBucket(names, dtypes, tuple(tuple(t.shape) for t in tensors)), flat


async def by_disk(engine: SGLangEngine, folder: Path, version: int) -> None:
    await engine.update_weights_from_disk(str(folder), version)


async def by_prepared_disk(engine: SGLangEngine, folder: Path, version: int) -> None:
    await engine.prepare_weights_from_disk(str(folder))
    await engine.update_weights_from_disk(str(folder), version)


async def by_tensors(engine: SGLangEngine, folder: Path, version: int) -> None:
    named = weights_of(folder)
    await engine.begin_weight_update()
    await engine.update_weights_from_tensors([payload_of(named[:5])], version, last=False)
    await engine.update_weights_from_tensors([payload_of(named[5:])], version)
    await engine.end_weight_update()


async def by_broadcast(engine: SGLangEngine, folder: Path, version: int) -> None:
    named = weights_of(folder)
    async with joined(engine) as (group, name):
        await engine.begin_weight_update()
        await send(engine, group, name, named[:7], version, last=False)
        await send(engine, group, name, named[7:], version, last=True)
        await engine.end_weight_update()


TRANSPORTS: Mapping[str, Transport] = {
    "disk": by_disk,
    "prepared": by_prepared_disk,
    "tensors": by_tensors,
    "broadcast": by_broadcast,
}


@contextmanager
def fresh_group() -> Iterator[WeightGroup]:
    """Yield a group of two members, on a port that is reserved for it."""
    with reserved_ports(1) as (port,):
        yield WeightGroup("127.0.0.1", port, 1, 2, f"weights-{uuid.uuid4().hex[:8]}", "gloo")


@asynccontextmanager
async def joined(engine: SGLangEngine) -> AsyncIterator[tuple[dist.ProcessGroup, str]]:
    """Yield the trainer's process group with one engine, and the name of the group."""
    with fresh_group() as group:
        made, _ = await asyncio.gather(
            asyncio.to_thread(join_group, group, rank=0, timeout_s=JOIN_S), engine.join_weight_group(group)
        )
    try:
        yield made, group.name
        await engine.leave_weight_group(group.name)
    finally:
        leave_group(made)


async def send(
    engine: SGLangEngine, group: dist.ProcessGroup, name: str, named: Named, version: int, *, last: bool
) -> None:
    bucket, flat = bucket_of(named)
    assert bucket.nbytes == len(flat)
    work = dist.broadcast(flat, src=0, group=group, async_op=True)
    await engine.receive_weights(bucket, group=name, version=version, last=last)
    await asyncio.to_thread(work.wait, timedelta(seconds=JOIN_S))


def hashes_of(folder: Path) -> dict[str, str]:
    """Return the checksums that an engine must report for a folder, with matrices fused as in SGLang."""
    tensors = dict(weights_of(folder))
    fused: dict[str, list[Tensor]] = {}
    for name in (*tensors,):
        for part, whole in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("gate", "gate_up"), ("up", "gate_up")):
            if f".{part}_proj." in name:
                fused.setdefault(name.replace(f".{part}_proj.", f".{whole}_proj."), [])
    for whole, parts in fused.items():
        members = ("q", "k", "v") if ".qkv_proj." in whole else ("gate", "up")
        kind = "qkv" if ".qkv_proj." in whole else "gate_up"
        for member in members:
            parts.append(tensors.pop(whole.replace(f".{kind}_proj.", f".{member}_proj.")))
    tensors |= {name: torch.cat(parts) for name, parts in fused.items()}
    return {name: hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for name, t in tensors.items()}


def write_adapter(
    folder: Path, base: Path, *, seed: int, rank: int = 4, config: Mapping[str, Any] | None = None
) -> Path:
    """Write an adapter with random factors for every linear layer of the model at `base`; `config` overrides
    its adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in weights_of(base):
        if "_proj." in name:
            stem = "base_model.model." + name.removesuffix(".weight")
            a, b = (
                torch.randn(rank, weight.shape[1], generator=generator),
                torch.randn(weight.shape[0], rank, generator=generator),
            )
            tensors |= {f"{stem}.lora_A.weight": a * 0.1, f"{stem}.lora_B.weight": b * 0.1}
    folder.mkdir(parents=True)
    targets = [f"{p}_proj" for p in ("q", "k", "v", "o", "gate", "up", "down")]
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": 8.0, "target_modules": targets, "bias": "none"}
    plain |= {"base_model_name_or_path": str(base), "task_type": "CAUSAL_LM", "lora_dropout": 0.0}
    (folder / "adapter_config.json").write_text(json.dumps({**plain, **(config or {})}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@torch.no_grad()
def adapted_reference(base: Path, adapter: Path) -> PreTrainedModel:
    """Return the model at `base` in transformers, with W + (alpha / rank) · B A in place of each W."""
    model = load_reference(base)
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    scale = config["lora_alpha"] / (np.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    for name, parameter in model.named_parameters():
        stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{stem}A.weight" in factors:
            parameter += scale * factors[f"{stem}B.weight"] @ factors[f"{stem}A.weight"]
    return model
