"""Fixtures: one proxy per test module, and one renderer for all modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from proxy_support import MODEL, RunningProxy, running_proxy
from scripted_sampler import ScriptedSampler

from areal_agents.rendering import ChatRenderer


@pytest.fixture(scope="session")
def renderer() -> ChatRenderer:
    return ChatRenderer.from_folder(MODEL)


@pytest.fixture(scope="module")
def shared_proxy(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("proxy") / "store.db"
    with running_proxy(path, ScriptedSampler(renderer)) as running:
        yield running


@pytest.fixture
def proxy(shared_proxy: RunningProxy) -> RunningProxy:
    """The module's proxy, whose engine replies "ok" and has no calls of earlier tests."""
    engine = shared_proxy.engine
    engine.script = lambda call: "ok"
    engine.delay_s, engine.version, engine.max_context = 0.0, 0, 4096
    engine.hurry.clear()
    engine.calls.clear()
    engine.cancelled.clear()
    return shared_proxy
