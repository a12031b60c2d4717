"""Builds the pool of engines behind a proxy; the pool follows the current policy version in the store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from areal_agents.errors import ConfigError
from areal_agents.inference.clients import EngineClient, Protocol, connect
from areal_agents.inference.config import is_base_url
from areal_agents.inference.pool import (
    CurrentVersion,
    EnginePool,
    PoolLimits,
    RouterEngine,
    canary_engines,
    refuse_other_models,
)
from areal_agents.rendering import ChatRenderer
from areal_agents.store import Store
from areal_agents.store.trainer_lock import TrainerLock

logger = logging.getLogger(__name__)

_UPDATE_TIMEOUT_S = 600.0  # a large model is read from its folder


@dataclass(frozen=True, slots=True)
class EngineUrls:
    """The addresses of the engines, and what they must serve.

    Attributes:
        engines: base URLs of the replicas, at least one.
        router: base URL of a router in front of the replicas that generation requests go through, or "".
        adapters: whether the policy is a LoRA adapter of the model that the engines serve.
        vocab_size: vocabulary size of that model, if known; an engine with another size is refused.
        move: whether engines that are started again may have other addresses, which the store has.
        protocol: what the engines speak.
        key: the key of the engines and of the router; "" if they have none.
    """

    engines: tuple[str, ...]
    router: str = ""
    adapters: bool = False
    vocab_size: int | None = None
    move: bool = False
    protocol: Protocol = "sglang"
    key: str = field(default="", repr=False)

    def describe(self) -> str:
        """Return the addresses in a form for people."""
        urls = ", ".join(self.engines)
        return f"{urls}, through {self.router}" if self.router else urls


def make_pool(
    urls: EngineUrls,
    *,
    store: Store,
    renderer: ChatRenderer,
    request_timeout_s: float,
    limits: PoolLimits | None = None,
    canary_share: float = 0.0,
) -> EnginePool:
    """Return the pool of engines of a proxy; the caller closes it.

    With a `canary_share` above 0, the last engines serve the candidate to that share of the episodes.
    """
    engines = [
        connect(
            url,
            urls.protocol,
            request_timeout_s=request_timeout_s,
            update_timeout_s=_UPDATE_TIMEOUT_S,
            adapters=urls.adapters,
            key=urls.key,
        )
        for url in urls.engines
    ]
    router = (
        RouterEngine(
            urls.router, engines, request_timeout_s=request_timeout_s, adapters=urls.adapters, key=urls.key
        )
        if urls.router
        else None
    )

    def current() -> CurrentVersion | None:
        served = store.served_versions()
        if served is None:
            return None
        row, candidate = served.stable, served.candidate
        # Without replicas of its own a candidate is served by none.
        beside = CurrentVersion(candidate.version, candidate.path) if candidate and canary_share else None
        in_storage = row.checksum is not None
        return CurrentVersion(row.version, row.path, row.folder_pending, in_storage, beside)

    return EnginePool(
        engines,
        names=[f"engine {index}" for index in range(len(engines))] if urls.move else urls.engines,
        current=current,
        without_trainer=lambda: without_trainer(store),
        decode=lambda ids: renderer.tokenizer.decode(list(ids)),
        router=router,
        vocab_size=urls.vocab_size,
        limits=limits,
        canary=canary_engines(urls.engines, canary_share) if canary_share else (),
        canary_share=canary_share,
    )


@contextlib.asynccontextmanager
async def without_trainer(store: Store) -> AsyncIterator[bool]:
    """Yield whether no trainer of the store is running; if so, a trainer that starts waits for the block."""
    with contextlib.ExitStack() as stack:
        try:
            alone = await asyncio.to_thread(stack.enter_context, TrainerLock.of(store.url).unheld())
        except OSError as error:
            logger.warning("cannot determine whether a trainer is running: %s", error)
            alone = False
        yield alone


def check_addresses(engine_urls: Sequence[str], router_url: str) -> None:
    """Raise ConfigError for an address that is not a base URL, and for a router without engines."""
    for url in (*engine_urls, *([router_url] if router_url else [])):
        if not is_base_url(url):
            raise ConfigError(f"the address of an engine or router must be http://host:port, got {url!r}")
    if router_url and not engine_urls:
        raise ConfigError(
            f"the router {router_url} needs the addresses of the engines behind it: give --engine-url once "
            "for each engine"
        )


def check_models(urls: Sequence[str], protocol: Protocol = "sglang", key: str = "") -> None:
    """Raise ConfigError if two of the engines that answer serve different models."""
    if len(urls) > 1:
        asyncio.run(_check(urls, protocol, key))


async def _check(urls: Sequence[str], protocol: Protocol, key: str) -> None:
    async with contextlib.AsyncExitStack() as opened:
        engines: list[EngineClient] = [connect(url, protocol, key=key) for url in urls]
        for engine in engines:
            opened.push_async_callback(engine.aclose)
        await refuse_other_models(urls, engines)
