"""A trainer with a canary, two real engines, and users: promotions, rollbacks, and kills in between."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from canary_support import RULES, train, users
from safetensors.torch import load_file
from test_crash_points import dying
from training_support import put_back

from areal_agents.inference import SGLangEngine, running_engine
from areal_agents.store import Store
from areal_agents.training.canary.controller import Canary
from areal_agents.training.checkpoint.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def second_engine(model_folder: Path) -> Iterator[str]:
    with running_engine(model_folder, kernel="torch", threads=1, slots=16, max_context=256) as url:
        yield url


@pytest.fixture
def engines(engine_url: str, second_engine: str, model_folder: Path) -> list[str]:
    asyncio.run(put_back(second_engine, model_folder))
    return [engine_url, second_engine]


def served(urls: Sequence[str]) -> list[int]:
    async def ask(url: str) -> int:
        async with SGLangEngine(url) as engine:
            return (await engine.model_info()).version

    return [asyncio.run(ask(url)) for url in urls]


def adapter(run_dir: Path, version: int) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "weights" / f"v{version}" / "adapter_model.safetensors")


def check_ended(run_dir: Path, urls: Sequence[str]) -> None:
    """Check that the first candidate was promoted and the second rolled back, and what the engines serve."""
    with Store.open(run_dir / "store.db") as store:
        rows = store.published_versions()
        trained = {step: set(store.groups_of_step(step)) for step in (1, 2, 3)}
    assert [(row.version, row.step, row.canary) for row in rows] == [
        (0, 0, None),
        (1, 1, "promoted"),
        (2, 2, "rolled_back"),
        (3, 3, None),
    ]
    assert served(urls) == [3, 3]
    restored, good, damaged = (adapter(run_dir, version) for version in (3, 1, 2))
    assert all(torch.equal(restored[name], weight) for name, weight in good.items())
    assert any(not torch.equal(damaged[name], weight) for name, weight in good.items())
    assert [len(trained[step]) for step in (1, 2, 3)] == [3, 3, 0]
    assert not trained[1] & trained[2], "no conversation is trained on twice"
    for row in rows[1:3]:
        assert row.verdict is not None and row.share == RULES.share
        assert min(row.verdict["conversations"].values()) > 1
        assert row.verdict["reason"].startswith("its mean score is")


def test_a_better_candidate_is_promoted_and_a_worse_one_rolled_back(
    engines: list[str], run_dir: Path, model_folder: Path
) -> None:
    with users(run_dir / "store.db", engines):
        result = train(run_dir, model_folder, engines)
    assert (result.step, result.version, result.finished) == (3, 3, True)
    check_ended(run_dir, engines)


# The point at which a trainer is killed: at which call of a function, and whether before or after it.
# Checkpoints are saved for step 0, for each candidate, and after the rollback.
POINTS: dict[str, tuple[Any, str, str, int]] = {
    "between the candidate's checkpoint and its row": (Store, "publish_candidate", "before", 1),
    "between the candidate's row and its swap": (Store, "publish_candidate", "after", 1),
    "in the comparison": (Store, "scored_conversations", "after", 3),
    "between the promotion and its swap": (Store, "promote_candidate", "after", 1),
    "between the rollback's folder and its row": (Store, "roll_back_candidate", "before", 1),
    "between the rollback's row and its swap": (Store, "roll_back_candidate", "after", 1),
    "between the rollback's swap and its checkpoint": (Checkpoints, "save", "before", 4),
}


def train_until_killed(point: str, run_dir: Path, model: Path, urls: Sequence[str]) -> None:
    """Train in a separate process that is killed at a point."""
    owner, name, when, calls = POINTS[point]
    setattr(owner, name, dying(getattr(owner, name), when, calls))
    train(run_dir, model, urls)


@pytest.mark.parametrize(
    "point",
    [
        point if point.startswith("in the") else
        pytest.param(point, marks=pytest.mark.slow)
        for point in POINTS
    ],
)  # fmt: skip
def test_a_killed_run_resumes_with_the_same_candidate(
    point: str, engines: list[str], run_dir: Path, model_folder: Path
) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["areal_agents.training.run"])
    run_dir.mkdir()
    with users(run_dir / "store.db", engines):
        killed = processes.Process(target=train_until_killed, args=(point, run_dir, model_folder, engines))
        killed.start()
        try:
            killed.join(120)
            assert killed.exitcode == -signal.SIGKILL
        finally:
            killed.kill()
            killed.join()
        train(run_dir, model_folder, engines)
    check_ended(run_dir, engines)


def test_an_order_of_the_operator_overrides_the_statistical_test(
    engines: list[str], run_dir: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen run neither decides nor trains, a stop leaves the candidate undecided, and an order decides
    against the scores."""
    looked, stop = threading.Event(), threading.Event()
    wait = Canary._wait

    def waiting(canary: Canary) -> Any:
        looked.set()
        return wait(canary)

    monkeypatch.setattr(Canary, "_wait", waiting)
    results: list[Any] = []
    with Store.open(run_dir / "store.db") as store, users(run_dir / "store.db", engines):
        # With this range of scores the comparison does not decide within the test; only an order does.
        rules = replace(RULES, low=-1e6, high=1e6, most_conversations=10**9)

        def train_on() -> None:
            results.append(train(run_dir, model_folder, engines, steps=9, rules=rules, stop=stop))

        thread = threading.Thread(target=train_on)
        thread.start()
        assert looked.wait(120)
        store.freeze(True)
        stop.set()
        thread.join(60)
        assert not thread.is_alive() and not results[0].finished
        rows = store.published_versions()
        assert [row.canary for row in rows] == [None, "candidate"]
        store.give_order(1, "roll_back")
        # The run is frozen, but the order ends the candidate; no further batch is taken.
        stop.clear()
        thread = threading.Thread(target=train_on)
        thread.start()
        cursor = store.cursor()
        while thread.is_alive() and store.max_version() < 2:
            cursor = store.wait(cursor, 10)
        before = store.group_counts()["complete"]
        # These are more than enough for a batch.
        while thread.is_alive() and store.group_counts()["complete"] < before + 20:
            cursor = store.wait(cursor, 10)
        assert thread.is_alive()
        assert [row.canary for row in store.published_versions()] == [None, "rolled_back", None]
        stop.set()
        thread.join(60)
        assert not thread.is_alive()
        assert not results[1].finished and store.group_counts()["trained"] == 3
        verdict = store.published_versions()[1].verdict
        assert verdict is not None and verdict["reason"] == "the operator ordered it"
