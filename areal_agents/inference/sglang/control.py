"""The calls of a trainer to SGLang: pauses, weights by each transport, adapters, checksums, memory.

Every answer is checked: if a server did not do what was requested, an EngineError names the server.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from areal_agents.errors import EngineError, EngineRejected
from areal_agents.inference.engine import (
    MemoryKind,
    PauseMode,
    TensorForm,
    WeightBucket,
    WeightGroup,
    WeightsChecksum,
)
from areal_agents.inference.sglang.transport import HttpTransport
from areal_agents.inference.sglang.wire import as_object, shorten

logger = logging.getLogger(__name__)

# endpoints of the embedded engine only
PREPARE_PATH = "/prepare_weights_from_disk"
PREPARE_UPDATE_PATH = "/prepare_weight_update"
ABANDON_PATH = "/abandon_weight_update"


class SGLangControl:
    """The methods of `engine.Engine` that replace weights.

    Args:
        http: the server.
        control_timeout_s: longest wait for any other call.
        update_timeout_s: longest wait for one step of an update of weights or adapters.
    """

    def __init__(self, http: HttpTransport, *, control_timeout_s: float, update_timeout_s: float) -> None:
        self._http = http
        self._control_timeout_s = control_timeout_s
        self._update_timeout_s = update_timeout_s
        self._paused: PauseMode | None = None
        self._ends_in: PauseMode | None = None  # the pause in which the open update ends

    @property
    def base_url(self) -> str:
        """The URL of the server."""
        return self._http.base_url

    async def pause(self, mode: PauseMode) -> None:
        """See Engine.pause. Raises EngineError for in_place on a server that would label tokens wrongly."""
        if mode == "in_place":
            await self._check_may_freeze()
        await self._call("POST", "/pause_generation", {"mode": mode})
        if mode == "abort":
            # In this mode SGLang only holds new requests back, and its scheduler may still have a step of a
            # request that has just ended, with which it cannot flush its cache. Retract completes that step.
            await self._call("POST", "/pause_generation", {"mode": "retract"})
        self._paused = mode

    async def resume(self) -> None:
        """See Engine.resume."""
        await self._call("POST", "/continue_generation", {})
        self._paused = None

    async def prepare_weights_from_disk(self, path: str) -> None:
        """See Engine.prepare_weights_from_disk."""
        await self._do(PREPARE_PATH, {"model_path": path}, optional=True)

    async def settle(self) -> None:
        """See Engine.settle."""
        await self._settled()

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """See Engine.update_weights_from_disk. Without a pause, a server with a prefix cache must get no new
        requests meanwhile (see `_settled`)."""
        body = {"model_path": path, **_taking_effect(version, self._paused)}
        if self._paused is None:
            body["flush_cache"] = await self._settled()
        await self._do("/update_weights_from_disk", body)

    async def begin_weight_update(self, pause: PauseMode | None = None) -> None:
        """See Engine.begin_weight_update."""
        self._ends_in = pause or self._paused
        body = {"selector": "all"}
        try:
            await self._do("/begin_weight_update", body, optional=True)
        except EngineRejected as error:
            if "already open" not in str(error):
                raise
            logger.warning("%s: an unfinished weight update was discarded: %s", self.base_url, error)
            try:
                await self.abandon_weight_update()
            except EngineRejected as refusal:  # if it is open still, the next request says so
                logger.debug("%s", refusal)
            await self._do("/begin_weight_update", body)

    async def update_weights_from_tensors(
        self, payloads: Sequence[str], version: int, *, last: bool = True, form: TensorForm = "named"
    ) -> None:
        """See Engine.update_weights_from_tensors."""
        body = {"serialized_named_tensors": list(payloads), **self._part_of(version, last)}
        if form != "named":
            body["load_format"] = form
        await self._do("/update_weights_from_tensor", body)

    async def join_weight_group(self, group: WeightGroup) -> None:
        """See Engine.join_weight_group."""
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": group.rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._do("/init_weights_update_group", body)

    async def leave_weight_group(self, name: str) -> None:
        """See Engine.leave_weight_group."""
        body = {"group_name": name}
        await self._do("/destroy_weights_update_group", body, timeout_s=self._control_timeout_s)

    async def receive_weights(self, bucket: WeightBucket, *, group: str, version: int, last: bool) -> None:
        """See Engine.receive_weights."""
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
            **self._part_of(version, last),
        }
        await self._do("/update_weights_from_distributed", body)

    async def prepare_weight_update(self) -> None:
        """See Engine.prepare_weight_update."""
        await self._do(PREPARE_UPDATE_PATH, {}, optional=True)

    async def end_weight_update(self) -> None:
        """See Engine.end_weight_update."""
        await self._do("/end_weight_update", {}, optional=True)

    async def abandon_weight_update(self) -> None:
        """See Engine.abandon_weight_update."""
        if not await self._do(ABANDON_PATH, {}, optional=True):
            await self._do("/end_weight_update", {}, optional=True)

    async def load_adapter(self, name: str, path: str) -> None:
        """See Engine.load_adapter."""
        await self._do("/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> None:
        """See Engine.unload_adapter."""
        # It waits for generations to end, so a short time limit keeps it from delaying a new version.
        await self._do("/unload_lora_adapter", {"lora_name": name}, timeout_s=self._control_timeout_s)

    async def set_version(self, version: int, *, abort_running: bool) -> None:
        """See Engine.set_version."""
        await self._do("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        if abort_running:
            # Abort after the change, so that an aborted call continues under the new version.
            await self._call("POST", "/abort_request", {"abort_all": True})

    async def checksum(self) -> WeightsChecksum:
        """See Engine.checksum."""
        answer = await self._do("/weights_checker", {"action": "checksum"})
        ranks = answer.get("ranks")
        try:
            return WeightsChecksum(tuple(_hashes(rank["checksums"]) for rank in ranks or ()))
        except (TypeError, KeyError, ValueError) as error:
            raise EngineError(
                f"{self.base_url}/weights_checker returned no checksums by tensor: {shorten(str(answer))}"
            ) from error

    async def release_memory(self, kinds: Sequence[MemoryKind]) -> None:
        """See Engine.release_memory. SGLang exits if requests are running, so this is checked here."""
        if self._paused not in ("retract", "abort"):
            raise EngineError(
                f"{self.base_url}: memory is released only after a pause in mode retract or abort, "
                f"got {self._paused or 'no pause'}"
            )
        await self._call("POST", "/release_memory_occupation", {"tags": list(kinds)})

    async def resume_memory(self, kinds: Sequence[MemoryKind]) -> None:
        """See Engine.resume_memory."""
        await self._call("POST", "/resume_memory_occupation", {"tags": list(kinds)})

    async def aclose(self) -> None:
        """See Engine.aclose."""
        await self._http.aclose()

    def _part_of(self, version: int, last: bool) -> dict[str, Any]:
        return _taking_effect(version, self._ends_in) if last else {"flush_cache": False}

    async def _settled(self) -> bool:
        """Wait until an update without a pause is possible; return whether it should flush the prefix cache.

        SGLang takes such an update when the last request has ended, and exits if its scheduler has not
        completed the step that it had already begun for that request. Without a prefix cache there is nothing
        to flush. With one, wait until a command that changes nothing has returned: SGLang takes it after the
        last request, too, and completes the step after it. The update may follow it as long as no new
        requests arrive between the two.
        """
        prefix_cache_off = (await self._server_info()).get("disable_radix_cache")
        if prefix_cache_off is False:
            nothing = {"names": [], "dtypes": [], "shapes": [], "group_name": "none", "flush_cache": False}
            try:
                await self._do("/update_weights_from_distributed", nothing)
            except EngineRejected as refusal:  # no process group has that name
                logger.debug("%s", refusal)
        return not prefix_cache_off

    async def _check_may_freeze(self) -> None:
        """Raise EngineError if the server cannot pause in place correctly. With SGLang's overlap schedule the
        result of one step is still pending when the pause begins, and its token, sampled by the old weights,
        would get the new version. With a prefix cache, which cannot be flushed under paused requests, later
        requests would reuse keys and values of the old weights."""
        info = await self._server_info()
        for setting, harm in (
            ("disable_overlap_schedule", "give the first token after a swap the wrong version"),
            ("disable_radix_cache", "leave keys and values of the old weights to later requests"),
        ):
            if info.get(setting) is False:
                raise EngineError(
                    f"{self.base_url}: pause in_place would {harm}; start SGLang with "
                    f"--{setting.replace('_', '-')}, or pause with retract"
                )

    async def _server_info(self) -> dict[str, Any]:
        return as_object(await self._call("GET", "/server_info"), "/server_info")

    async def _do(
        self, path: str, body: Any, *, optional: bool = False, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Send a command and return its successful answer; empty if `optional` and the server lacks the
        endpoint."""
        answer = await self._http.call(
            "POST", path, body, timeout_s=timeout_s or self._update_timeout_s, optional=optional
        )
        if optional and answer is None:
            logger.debug("%s has no endpoint %s; skipped", self.base_url, path)
            return {}
        done = as_object(answer, self.base_url + path)
        if done.get("success") is not True:
            said = done.get("message") or done.get("error_message") or done
            raise EngineError(f"{self.base_url}{path} did not succeed: {shorten(str(said))}")
        return done

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        return await self._http.call(method, path, body, timeout_s=self._control_timeout_s)


def _taking_effect(version: int, pause: PauseMode | None) -> dict[str, Any]:
    # Requests paused in place need their keys and values, so the server refuses to flush the cache.
    return {"weight_version": str(version), "flush_cache": pause != "in_place"}


def _hashes(found: Any) -> Mapping[str, str]:
    if not isinstance(found, dict) or not found:
        raise ValueError(f"expected a mapping of names to hashes, got {type(found).__name__}")
    return {str(name): str(value) for name, value in found.items()}
