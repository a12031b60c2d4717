"""Generates through a router that the user runs in front of the workers, such as sglang-router.

A router forwards /generate but no request that changes an engine, so aborts go to the workers directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from areal_agents.core.completion import SamplingParams
from areal_agents.errors import EngineError
from areal_agents.inference.engine import Engine, ModelInfo
from areal_agents.inference.sglang.client import SGLangEngine


class RouterEngine(SGLangEngine):
    """The client of a router.

    Args:
        base_url: the URL of the router.
        workers: the engines behind it.
        request_timeout_s: longest wait for one completion.
        adapters, key: see SGLangEngine.
    """

    def __init__(
        self,
        base_url: str,
        workers: Sequence[Engine],
        *,
        request_timeout_s: float = 600.0,
        adapters: bool = False,
        key: str = "",
    ) -> None:
        super().__init__(base_url, request_timeout_s=request_timeout_s, adapters=adapters, key=key)
        self._workers = workers

    async def abort(self, rid: str) -> None:
        """End a generation on whichever worker runs it. Raises EngineError if a worker cannot be reached."""
        done = await asyncio.gather(*(worker.abort(rid) for worker in self._workers), return_exceptions=True)
        for error in (result for result in done if isinstance(result, BaseException)):
            raise error

    async def model_info(self) -> ModelInfo:
        """Return the model info of the first worker that answers; a router would forward to any worker."""
        failure: EngineError | None = None
        for worker in self._workers:
            try:
                info = await worker.model_info()
            except EngineError as error:
                failure = error
                continue
            # Workers may limit completions to different lengths.
            self._served, self._info = info.version, replace(info, effective_context=None)
            return info
        assert failure is not None, "a router needs at least one worker"
        raise failure


def is_routable(sampling: SamplingParams) -> bool:
    """Whether a router forwards all fields of a request.

    sglang-router 0.3.2 silently drops the fields that it does not know: structural tags and routed experts.
    Requests with such fields are sent to a worker directly.
    """
    has_tag = sampling.grammar is not None and sampling.grammar.kind == "structural_tag"
    return not has_tag and sampling.routed_experts_from is None
