"""Generates through a router that the user runs in front of the workers, such as sglang-router.

A router passes /generate on and nothing that changes an engine, so aborts go to the workers themselves.
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
        base_url: the router's.
        workers: the engines behind it.
        request_timeout_s: longest wait for one completion.
        adapters: see SGLangEngine.
    """

    def __init__(
        self,
        base_url: str,
        workers: Sequence[Engine],
        *,
        request_timeout_s: float = 600.0,
        adapters: bool = False,
    ) -> None:
        super().__init__(base_url, request_timeout_s=request_timeout_s, adapters=adapters)
        self._workers = workers

    async def abort(self, rid: str) -> None:
        """End a generation, on whichever worker it is. EngineError if a worker cannot be told."""
        done = await asyncio.gather(*(worker.abort(rid) for worker in self._workers), return_exceptions=True)
        for error in (result for result in done if isinstance(result, BaseException)):
            raise error

    async def model_info(self) -> ModelInfo:
        """What the first worker that answers serves; the router would ask one of its choice."""
        failure: EngineError | None = None
        for worker in self._workers:
            try:
                info = await worker.model_info()
            except EngineError as error:
                failure = error
                continue
            # Workers may have room for completions of different lengths.
            self._served, self._info = info.version, replace(info, room=None)
            return info
        assert failure is not None, "a router has workers"
        raise failure


def is_routable(sampling: SamplingParams) -> bool:
    """Whether a router passes on all that a request asks for.

    sglang-router 0.3.2 leaves out, without a word, the fields that it does not know: structural tags and
    routed experts. Such a request is sent to a worker directly.
    """
    has_tag = sampling.grammar is not None and sampling.grammar.kind == "structural_tag"
    return not has_tag and sampling.routed_experts_from is None
