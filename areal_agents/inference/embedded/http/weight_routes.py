"""The routes for weights, adapters and memory: SGLang's endpoints, and two that prepare
a swap beside serving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from areal_agents.errors import RequestError
from areal_agents.inference.embedded.model.served import ServedModels
from areal_agents.inference.embedded.updates.checksum import overall_hash
from areal_agents.inference.embedded.updates.joined_groups import WeightGroups
from areal_agents.inference.embedded.updates.updates import WeightUpdates
from areal_agents.inference.engine import MemoryKind, WeightBucket, WeightGroup

Body = Mapping[str, Any]
Answer = dict[str, Any]


class WeightRoutes:
    """The route handlers: each takes a JSON object and returns one."""

    def __init__(self, models: ServedModels, updates: WeightUpdates, groups: WeightGroups) -> None:
        self._models = models
        self._updates = updates
        self._groups = groups

    async def prepare_from_disk(self, body: Body) -> Answer:
        await self._models.prepare(_text(body, "model_path"))
        return _done("The weights are read.")

    async def update_from_disk(self, body: Body) -> Answer:
        path = _text(body, "model_path")
        await self._models.update_from_disk(path, _version(body), flush_cache=_flush(body))
        return _done("Succeeded to update model weights.") | {"num_paused_requests": 0}

    async def begin(self, _: Body) -> Answer:
        self._updates.begin()
        return _done("Success")

    async def update_from_tensor(self, body: Body) -> Answer:
        payloads = body.get("serialized_named_tensors")
        if not isinstance(payloads, list):
            raise RequestError("serialized_named_tensors must be a list of base64 strings")
        await self._updates.add_tensors(
            payloads, _version(body), flush_cache=_flush(body), form=body.get("load_format")
        )
        return _done("Success")

    async def update_from_distributed(self, body: Body) -> Answer:
        if body.get("load_format") != "flattened_bucket":
            raise RequestError(f"load_format must be flattened_bucket, got {body.get('load_format')!r}")
        try:
            bucket = WeightBucket(
                tuple(body["names"]), tuple(body["dtypes"]), tuple(tuple(shape) for shape in body["shapes"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(f"names, dtypes and shapes do not describe a bucket: {error}") from error
        group, version = _text(body, "group_name"), _version(body)
        await self._updates.receive(bucket, group, version, flush_cache=_flush(body))
        return _done("Succeeded to update parameter online.")

    async def prepare_update(self, _: Body) -> Answer:
        await self._updates.prepare()
        return _done("The weights are ready.")

    async def end(self, _: Body) -> Answer:
        await self._updates.end()
        return _done("Success")

    async def abandon(self, _: Body) -> Answer:
        self._updates.abandon()
        return _done("Success")

    async def join_group(self, body: Body) -> Answer:
        try:
            group = WeightGroup(
                address=body["master_address"],
                port=body["master_port"],
                rank_offset=body["rank_offset"],
                world_size=body["world_size"],
                name=_text(body, "group_name"),
                backend=body.get("backend", "nccl"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(f"the group cannot be joined: {error!r}") from error
        await self._groups.join(group)
        return _done("Succeeded to initialize custom process group.")

    async def leave_group(self, body: Body) -> Answer:
        self._groups.leave(_text(body, "group_name"))
        return _done("Succeeded to destroy custom process group.")

    async def load_adapter(self, body: Body) -> Answer:
        await self._models.load_adapter(_text(body, "lora_name"), _text(body, "lora_path"))
        return _done("The adapter is loaded.")

    async def unload_adapter(self, body: Body) -> Answer:
        await self._models.unload_adapter(_text(body, "lora_name"))
        return _done("The adapter is unloaded.")

    async def checksum(self, body: Body) -> Answer:
        if body.get("action", "checksum") != "checksum":
            raise RequestError(f'action must be "checksum", got {body.get("action")!r}')
        hashes = await self._models.checksum()
        overall = overall_hash(hashes)
        return _done("Success.") | {
            "ranks": [{"checksums": hashes, "per_gpu_checksum": overall}],
            "per_engine_checksum": overall,
        }

    async def release_memory(self, body: Body) -> None:
        await self._models.release_memory(_kinds(body))

    async def resume_memory(self, body: Body) -> None:
        await self._models.resume_memory(_kinds(body))


def _done(message: str) -> Answer:
    return {"success": True, "message": message}


def _text(body: Body, name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} must be a non-empty string, got {value!r}")
    return value


def _version(body: Body) -> str | None:
    value = body.get("weight_version")
    if value is not None and not isinstance(value, str):
        raise RequestError(f"weight_version must be a string, got {value!r}")
    return value


def _flush(body: Body) -> bool:
    return bool(body.get("flush_cache", True))


def _kinds(body: Body) -> set[MemoryKind]:
    tags = body.get("tags") or list(get_args(MemoryKind))
    if not isinstance(tags, list) or not set(tags) <= set(get_args(MemoryKind)):
        raise RequestError(f"tags must be of {list(get_args(MemoryKind))}, got {tags!r}")
    return set(tags)
