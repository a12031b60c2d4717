"""Publishers of a policy, engines that fail on purpose, and checks of the weights that an engine serves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from training_support import make_sample

from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.core.completion import Completion, SamplingParams, TokenChunk, as_token_ids
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference import SGLangEngine
from areal_agents.inference.engine import Engine, PauseMode, WeightGroup
from areal_agents.store import Store
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import Policy
from areal_agents.training.publish.config import PublishConfig
from areal_agents.training.publish.publisher import Publisher

PROMPT = as_token_ids([5, 9, 2, 40, 17, 33])
LONG = SamplingParams(max_new_tokens=200, ignore_eos=True)
WHOLE = ("disk", "tensor", "broadcast", "ipc")  # transports that send all weights


@contextmanager
def publisher(
    policy: Policy,
    group: Ranks,
    store: Store | None,
    engines: Sequence[Engine],
    run_dir: Path,
    model: Path,
    *,
    keep: int = 2,
    engine_wait_s: float = 0,
    **config: Any,
) -> Iterator[Publisher]:
    made = Publisher(
        PublishConfig(engine_wait_s=engine_wait_s, **config), policy, group,
        store=store, engines=engines, run_dir=run_dir, model_path=model, keep=keep,
    )  # fmt: skip
    try:
        yield made
    finally:
        made.close()


def disturb(policy: Policy, seed: int, scale: float = 0.05) -> None:
    """Change all trained weights, as an optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                local = parameter.to_local()
                local.add_(scale * torch.randn(local.shape, generator=generator))


def sample(url: str, *, tokens: int = 12, adapters: bool = False) -> Completion:
    """Return the engine's completion of PROMPT."""

    async def ask() -> Completion:
        async with SGLangEngine(url, adapters=adapters, control_timeout_s=20) as engine:
            return await engine.generate(
                "asked", PROMPT, SamplingParams(max_new_tokens=tokens, ignore_eos=True)
            )

    return asyncio.run(ask())


def policy_logprobs(policy: Policy, completion: Completion) -> np.ndarray:
    """Return the policy's logprobs [C] of the tokens that the engine sampled. Collective."""
    ids = [*PROMPT.tolist(), *completion.token_ids.tolist()]
    told = make_sample(ids, range(len(PROMPT), len(ids)), rng=np.random.default_rng(0))
    (micro,) = pack([told], token_budget=4096)
    with torch.no_grad():
        logprobs, *_ = policy(micro)
    policy.reshard()  # as a backward pass does; until then the root's weights are unsharded
    return logprobs.numpy()


def assert_serves(url: str, policy: Policy, version: int, *, adapters: bool = False) -> None:
    """Assert that the engine samples with the weights of the policy, and reports this version."""
    completion = sample(url, adapters=adapters)
    assert completion.versions.tolist() == [version] * 12
    np.testing.assert_allclose(completion.logprobs, policy_logprobs(policy, completion), atol=1e-4)


async def paused_generation(engine: Engine, mode: PauseMode) -> asyncio.Task[Completion]:
    """Return an unfinished generation of an engine, and pause the engine unless the mode is `drain`."""
    if mode != "drain":
        return await held_generation(engine, lambda: engine.pause(mode), engine.resume)
    begun = asyncio.Event()
    running = asyncio.create_task(engine.generate("running", PROMPT, LONG, lambda piece: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    return running


async def held_generation(
    engine: Engine,
    hold: Callable[[], Awaitable[object]],
    release: Callable[[], Awaitable[object]],
    sampling: SamplingParams = LONG,
) -> asyncio.Task[Completion]:
    """Return an unfinished generation after `hold`; if it ended before, another generation is started."""
    for attempt in range(50):
        begun, pieces = asyncio.Event(), []

        def take(piece: TokenChunk, begun: asyncio.Event = begun, pieces: list[TokenChunk] = pieces) -> None:
            pieces.append(piece)
            begun.set()

        running = asyncio.create_task(engine.generate(f"held-{attempt}", PROMPT, sampling, take))
        await asyncio.wait_for(begun.wait(), 60)
        await hold()
        seen = -1
        while len(pieces) > seen:  # pieces that were already sent still arrive
            seen = len(pieces)
            await asyncio.sleep(0.1)
        if not running.done():
            return running
        await running
        await release()
    raise AssertionError("each generation ended before it was held")


def resume(url: str) -> None:
    """Resume an engine that a test left paused."""

    async def ask() -> None:
        async with SGLangEngine(url) as engine:
            await engine.resume()

    asyncio.run(ask())


def serve_folder(url: str, folder: Path) -> None:
    """Load a model folder into the engine as version 0, as if a server had just been started with it."""

    async def ask() -> None:
        async with SGLangEngine(url) as engine:
            await engine.update_weights_from_disk(str(folder), 0)

    asyncio.run(ask())


class ReturningEngine(SGLangEngine):
    """The client of a server that rejects the first request to `refuses`, and dies at the first request to
    `dies_at`. The restarted server is reachable after `looks` failed probes, or never if `looks` is None."""

    def __init__(
        self, url: str, first_weights: Path, *, dies_at: str, refuses: str = "", looks: int | None = 2
    ) -> None:
        super().__init__(url, control_timeout_s=20)
        self.asked: list[str] = []
        self.is_down = False
        self._first_weights, self._looks = first_weights, looks
        self.dies_at, self._refuses = dies_at, refuses
        self._group = ""

    async def join_weight_group(self, group: WeightGroup) -> None:
        await super().join_weight_group(group)
        self._group = group.name

    async def _do(self, path: str, body: Any, **options: Any) -> dict[str, Any]:
        await self._reach(path)
        return await super()._do(path, body, **options)

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        await self._reach(path)
        return await super()._call(method, path, body)

    async def _reach(self, path: str) -> None:
        if path == self.dies_at and path not in self.asked:
            await self.start_anew()
            self.is_down = True
        is_refused = path == self._refuses and path not in self.asked
        self.asked.append(path)
        if is_refused:
            raise EngineRejected(f"{self.base_url}{path} refused the request")
        if not self.is_down:
            return
        if path == "/model_info" and self._looks is not None:
            self._looks -= 1
            self.is_down = self._looks > 0
        raise EngineUnavailable(f"{self.base_url}{path} is not reachable")

    async def start_anew(self) -> None:
        """Reset the server to its state after a restart."""
        async with SGLangEngine(self.base_url) as engine:
            for call in (
                engine.abandon_weight_update(),
                engine.leave_weight_group(self._group),
                engine.unload_adapter("policy-1"),
            ):
                with suppress(EngineError):
                    await call
            await engine.resume()
            await engine.update_weights_from_disk(str(self._first_weights), 0)
