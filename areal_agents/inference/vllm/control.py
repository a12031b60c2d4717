"""The calls of a trainer to vLLM: pauses, weights from a folder or by broadcast, adapters, checksums.

Invariant: the weights, their version, and whatever was computed with other weights change together, while
nothing is sampled. vLLM labels tokens with the version that was set last, so the version is set in the same
pause in which the weights change.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
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

HOW_TO_START = "start it with areal_agents/inference/vllm/environment/serve.py; see docs/vllm.md"
_INITIAL = "default"  # the version of the weights that a server was started with


class VLLMControl:
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
        self._arriving: int | None = None  # the version of the open update, once its last part was announced

    @property
    def base_url(self) -> str:
        """The URL of the server."""
        return self._http.base_url

    async def pause(self, mode: PauseMode) -> None:
        """See Engine.pause; in_place is not supported with vLLM."""
        if mode == "in_place":
            self._refuse(
                "is not paused in_place, which would keep keys and values of the old weights; use retract"
            )
        # The other modes of vLLM's pause refuse new requests (0.33), or let what runs come to its end first.
        await self._update_call("/pause?mode=keep&clear_cache=false")
        if mode == "abort":
            await self._abort_all()
        await self._drop_computed()

    async def resume(self) -> None:
        """See Engine.resume."""
        await self._call("POST", "/resume")

    async def prepare_weights_from_disk(self, path: str) -> None:
        """See Engine.prepare_weights_from_disk. vLLM does nothing."""

    async def settle(self) -> None:
        """See Engine.settle. An update pauses vLLM by itself."""

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """See Engine.update_weights_from_disk."""
        async with self._paused():
            await self._workers("areal_load_folder", path)
            await self._label(str(version))

    async def begin_weight_update(self, pause: PauseMode | None = None) -> None:
        """See Engine.begin_weight_update."""
        self._arriving = None
        try:
            await self._workers("areal_begin")
        except EngineRejected as error:
            logger.warning("%s: an unfinished weight update was discarded: %s", self.base_url, error)
            await self.abandon_weight_update()
            await self._workers("areal_begin")

    async def update_weights_from_tensors(
        self, payloads: Sequence[str], version: int, *, last: bool = True, form: TensorForm = "named"
    ) -> None:
        """See Engine.update_weights_from_tensors; vLLM cannot."""
        self._refuse("takes no tensors in requests; use trainer.publish.transport: disk, broadcast or lora")

    async def join_weight_group(self, group: WeightGroup) -> None:
        """See Engine.join_weight_group."""
        await self._workers(
            "areal_join",
            group.address,
            group.port,
            group.rank_offset,
            group.world_size,
            group.name,
            group.backend,
        )

    async def leave_weight_group(self, name: str) -> None:
        """See Engine.leave_weight_group."""
        await self._workers("areal_leave", name)

    async def receive_weights(self, bucket: WeightBucket, *, group: str, version: int, last: bool) -> None:
        """See Engine.receive_weights."""
        await self._workers(
            "areal_receive", list(bucket.names), list(bucket.dtypes), [list(s) for s in bucket.shapes], group
        )
        if last:
            self._arriving = version

    async def prepare_weight_update(self) -> None:
        """See Engine.prepare_weight_update. vLLM does nothing."""

    async def end_weight_update(self) -> None:
        """See Engine.end_weight_update."""
        await self._workers("areal_end")
        if self._arriving is not None:
            version, self._arriving = self._arriving, None
            await self._label(str(version))

    async def abandon_weight_update(self) -> None:
        """See Engine.abandon_weight_update. If some of the weights had been loaded, the server serves its
        first weights again, and reports the version `default`."""
        self._arriving = None
        async with self._paused():
            answers = await self._workers("areal_abandon")
            if any(answer.get("is_reset") for answer in answers):
                await self._label(_INITIAL)

    async def load_adapter(self, name: str, path: str) -> None:
        """See Engine.load_adapter."""
        body = {"lora_name": name, "lora_path": path}
        await self._http.call("POST", "/v1/load_lora_adapter", body, timeout_s=self._update_timeout_s)

    async def unload_adapter(self, name: str) -> None:
        """See Engine.unload_adapter."""
        await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def set_version(self, version: int, *, abort_running: bool) -> None:
        """See Engine.set_version."""
        await self._label(str(version))
        if abort_running:
            # Abort after the change, so that an aborted call continues under the new version.
            await self._abort_all()

    async def checksum(self) -> WeightsChecksum:
        """See Engine.checksum."""
        answers = await self._workers("areal_checksums")
        return WeightsChecksum(tuple(answer["checksums"] for answer in answers))

    async def release_memory(self, kinds: Sequence[MemoryKind]) -> None:
        """See Engine.release_memory; not supported with vLLM."""
        self._refuse("releases no memory for the trainer; use engine.colocate: none or split")

    async def resume_memory(self, kinds: Sequence[MemoryKind]) -> None:
        """See Engine.resume_memory; not supported with vLLM."""
        self._refuse("releases no memory for the trainer; use engine.colocate: none or split")

    async def aclose(self) -> None:
        """See Engine.aclose."""
        await self._http.aclose()

    async def _described(self) -> dict[str, Any]:
        """Return what the workers tell of the model and of the settings of the server."""
        return (await self._workers("areal_describe"))[0]

    async def _drop_computed(self) -> None:
        """Have the running requests, which are frozen, give up their keys and values, and empty the prefix
        cache; the requests compute them anew."""
        answer = await self._update_call("/reset_prefix_cache?reset_running_requests=true")
        if as_object(answer, "/reset_prefix_cache").get("success") is not True:
            raise EngineError(f"{self.base_url} kept keys and values of the old weights: {answer}")

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause the server in mode retract within the block, unless it is paused already."""
        answer = as_object(await self._call("GET", "/is_paused"), "/is_paused")
        if answer.get("is_paused") is True:
            yield
            return
        await self.pause("retract")
        try:
            yield
        finally:
            await self.resume()

    async def _abort_all(self) -> None:
        await self._call("POST", "/abort_requests", {})

    async def _label(self, version: str) -> None:
        await self._call("POST", "/update_weight_version", {"new_version": version})

    async def _workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call a method of `weight_updates.WeightUpdates` in each worker and return the answers, at least
        one."""
        body = {"method": method, "args": args}
        try:
            answer = await self._update_call("/collective_rpc", body)
        except EngineUnavailable as error:
            if method in str(error):  # it names a method that the workers do not have
                raise EngineError(
                    f"{self.base_url} lacks this package's worker extension: {HOW_TO_START}"
                ) from error
            raise
        except EngineRejected as error:
            raise EngineError(f"{self.base_url} is not a vLLM of this package's: {HOW_TO_START}") from error
        results = as_object(answer, "/collective_rpc").get("results")
        if not isinstance(results, list) or not results or not all(isinstance(r, dict) for r in results):
            raise EngineError(f"{self.base_url}/collective_rpc {method} answered {shorten(str(answer))}")
        for result in results:
            if message := result.get("error"):
                kind = EngineError if result.get("failed") else EngineRejected
                raise kind(
                    f"{self.base_url} refused {method.removeprefix('areal_')} (400): {shorten(message)}"
                )
        return results

    def _refuse(self, what: str) -> NoReturn:
        raise EngineRejected(f"{self.base_url}: vLLM {what}")

    async def _update_call(self, path: str, body: Any = None) -> Any:
        return await self._http.call("POST", path, body, timeout_s=self._update_timeout_s)

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        return await self._http.call(method, path, body, timeout_s=self._control_timeout_s)
