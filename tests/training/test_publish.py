"""Every transport delivers the trainer's weights to the engine, under the number of the version."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from publish_support import PROMPT, WHOLE, assert_serves, disturb, paused_generation, publisher, sample
from safetensors.torch import load_file
from training_support import build_model

from areal_agents.core.completion import SamplingParams, as_token_ids
from areal_agents.errors import EngineError, EngineUnavailable
from areal_agents.inference import PauseMode, SGLangEngine
from areal_agents.store import Store
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.lora import LoraOptions
from areal_agents.training.model.model import ModelOptions, Policy, load_policy
from areal_agents.training.publish.disk import swap
from areal_agents.training.publish.verifying import Verified, verify


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send weights in about a hundred buckets instead of one."""
    monkeypatch.setattr("areal_agents.training.publish.transports.MB", 1_000)


async def verified(url: str, store: Store, *, base: Path | None = None) -> Verified:
    async with SGLangEngine(url) as engine:
        return await verify(engine, store, base=base)


@pytest.mark.parametrize("transport", WHOLE)
@pytest.mark.usefixtures("small_buckets")
def test_the_engine_serves_the_trainers_weights(
    transport: str,
    policy: Policy,
    group: Ranks,
    store: Store,
    served_url: str,
    run_dir: Path,
    model_folder: Path,
) -> None:
    engines = [SGLangEngine(served_url, control_timeout_s=60)]
    with publisher(
        policy, group, store, engines, run_dir, model_folder, transport=transport, bucket_mb=7
    ) as out:
        first = out.publish(version=0, step=0)
        assert first is not None and (first.agreement, first.density) == (1.0, None)
        for version in (1, 2):
            disturb(policy, version)
            published = out.publish(version=version, step=version)
            assert published is not None and published.agreement is None
            assert published.density is not None and published.density > 0.99
            assert 0 < published.pause_s < published.publish_s
            assert 0 < published.assemble_s < published.publish_s
            assert_serves(served_url, policy, version)
        found = asyncio.run(verified(served_url, store))
        assert found.version == 2 and found.agreement is not None
        assert found.agreement.compared == found.agreement.tensors
        with pytest.raises(EngineError, match=rf"{served_url} serves other weights.*norm.*differs"):
            asyncio.run(verified(served_url, store, base=run_dir / "weights" / "v1"))
    weights = policy.full_state_dict()
    folder = load_file(run_dir / "weights" / "v2" / "model.safetensors")
    assert folder.keys() == weights.keys()
    assert all(torch.equal(folder[name], tensor) for name, tensor in weights.items())
    assert published.nbytes == sum(tensor.nbytes for tensor in weights.values())
    assert sorted(p.name for p in (run_dir / "weights").iterdir()) == ["v1", "v2"]
    latest = store.latest_version()
    assert latest is not None and (latest.version, latest.path) == (2, str(run_dir / "weights" / "v2"))
    assert not latest.folder_pending


@pytest.mark.parametrize("transport", [*WHOLE, "lora"])
@pytest.mark.usefixtures("small_buckets")
def test_unchanged_weights_leave_every_logprob_unchanged(
    transport: str, group: Ranks, store: Store, served_url: str, run_dir: Path, model_folder: Path
) -> None:
    lora = LoraOptions(rank=2) if transport == "lora" else None
    policy = load_policy(model_folder, group, options=ModelOptions(lora=lora))
    disturb(policy, 3)
    engines = [SGLangEngine(served_url, control_timeout_s=60)]
    seen = []

    async def score() -> np.ndarray:
        sampling = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
        async with SGLangEngine(served_url, adapters=lora is not None) as engine:
            return (await engine.generate("greedy", PROMPT, sampling)).logprobs

    with publisher(
        policy, group, store, engines, run_dir, model_folder, transport=transport, bucket_mb=7, verify="every"
    ) as out:
        for version in range(1, 5):
            published = out.publish(version=version, step=version)
            assert published is not None and published.agreement == 1.0
            assert published.density == (0.0 if version > 1 else None)
            seen.append(asyncio.run(score()))
    # The sums of a matrix product depend in their last bit on where in memory the weights begin.
    for other in seen[1:]:
        np.testing.assert_allclose(other, seen[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("transport", WHOLE)
def test_a_bfloat16_model_is_published_in_the_type_in_which_it_was_saved(
    transport: str,
    group: Ranks,
    store: Store,
    engine_url: str,
    run_dir: Path,
    tmp_path: Path,
    model_folder: Path,
) -> None:
    """The engine holds float32: its checksums are those of the weights rounded to bfloat16, then widened."""
    policy = load_policy(model_folder, group)
    policy.saved_dtype = torch.bfloat16
    disturb(policy, 5)
    with publisher(
        policy, group, store, [SGLangEngine(engine_url)], run_dir, model_folder, transport=transport
    ) as out:
        published = out.publish(version=0, step=0)
    assert published is not None and published.agreement == 1.0
    assert published.nbytes * 2 == sum(tensor.nbytes for tensor in policy.full_state_dict().values())


@pytest.mark.parametrize(
    ("pause", "held", "finish", "versions"),
    [("retract", "retract", "length", {0, 1}), ("in_place", "in_place", "length", {0, 1}),
     ("abort", "retract", "abort", {0}), ("drain", "drain", "length", {0})],
)  # fmt: skip
def test_the_configured_pause_decides_what_a_swap_does_to_running_generations(
    pause: PauseMode,
    held: PauseMode,
    finish: str,
    versions: set[int],
    policy: Policy,
    group: Ranks,
    store: Store,
    engine_url: str,
    run_dir: Path,
    model_folder: Path,
) -> None:
    """The generation is paused beforehand, so that it cannot end before the publisher pauses it."""
    modes: list[PauseMode] = []

    class Noting(SGLangEngine):
        async def pause(self, mode: PauseMode) -> None:
            modes.append(mode)
            await super().pause(mode)

    async def play() -> tuple[str, set[int]]:
        async with SGLangEngine(engine_url) as generating:
            running = await paused_generation(generating, held)
            await asyncio.to_thread(out.publish, version=1, step=1)
            completion = await running
            return completion.finish_reason, set(completion.versions.tolist())

    with publisher(
        policy, group, store, [Noting(engine_url)], run_dir, model_folder, pause=pause, verify="off"
    ) as out:
        assert asyncio.run(play()) == (finish, versions)
    assert modes == ([] if pause == "drain" else [pause])
    assert set(sample(engine_url).versions.tolist()) == {1}


def test_versions_are_recorded_and_served_and_the_last_two_are_kept(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    with publisher(policy, group, store, [SGLangEngine(engine_url)], run_dir, model_folder) as out:
        for version in range(12):
            out.publish(version=version, step=version)
    assert sorted(p.name for p in (run_dir / "weights").iterdir()) == ["v10", "v11"]
    latest = store.latest_version()
    assert latest is not None and (latest.version, latest.path) == (11, str(run_dir / "weights" / "v11"))


def test_each_run_has_its_own_part_of_a_shared_folder_for_weights(
    policy: Policy, group: Ranks, store: Store, engine_url: str, tmp_path: Path, model_folder: Path
) -> None:
    shared = tmp_path / "memory"
    paths = []
    for version, run in enumerate(("a/run", "b/run")):
        with publisher(
            policy, group, store, [SGLangEngine(engine_url)], tmp_path / run, model_folder, folder=str(shared)
        ) as out:
            published = out.publish(version=version, step=0)
            assert published is not None and published.path.parent.parent == shared
            paths.append(published.path)
    assert all(path.is_dir() for path in paths) and paths[0].parent != paths[1].parent


def test_an_incomplete_version_that_a_killed_trainer_left_is_removed(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    left, kept = run_dir / "weights" / ".v3.99.tmp", run_dir / "weights" / "v2"
    left.mkdir(parents=True)
    kept.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    with publisher(policy, group, store, [SGLangEngine(engine_url)], run_dir, model_folder) as out:
        assert list((run_dir / "weights").iterdir()) == [kept]
        published = out.publish(version=3, step=0)  # v2 holds no weights: there is nothing to compare with
    assert published is not None and published.density is None


def test_tokens_after_a_swap_carry_the_new_version(engine_url: str, tmp_path: Path) -> None:
    other = build_model(tmp_path, seed=7)

    async def play(version: int) -> np.ndarray:
        async with SGLangEngine(engine_url) as generating, SGLangEngine(engine_url) as swapping:
            running = await paused_generation(generating, "retract")
            await swap(swapping, str(other), version)
            return (await running).versions

    for version in (1, 2):
        versions = asyncio.run(play(version))
        assert len(versions) == 200 and (np.diff(versions) >= 0).all()
        assert (versions[0], versions[-1]) == (version - 1, version)


def test_an_engine_that_refuses_the_weights_continues_with_the_old_ones(
    engine_url: str, tmp_path: Path
) -> None:
    async def play() -> list[int]:
        async with SGLangEngine(engine_url) as engine:
            with pytest.raises(EngineError):
                await swap(engine, str(tmp_path / "nowhere"), 1)
            completion = await engine.generate(
                "r", as_token_ids([2, 3]), SamplingParams(max_new_tokens=3, ignore_eos=True)
            )
            return completion.versions.tolist()

    assert asyncio.run(play()) == [0, 0, 0]


class LossyEngine(SGLangEngine):
    """A client that does not receive the responses to the named calls."""

    def __init__(self, url: str, *, loses: tuple[str, ...]) -> None:
        super().__init__(url)
        self._loses = loses

    async def pause(self, mode: PauseMode) -> None:
        await super().pause(mode)
        self._lose("pause")

    async def resume(self) -> None:
        await super().resume()
        self._lose("resume")

    def _lose(self, call: str) -> None:
        if call in self._loses:
            raise EngineUnavailable(f"the answer to {call} was lost")


@pytest.mark.parametrize("loses", [("pause",), ("pause", "resume")])
def test_a_lost_response_to_the_pause_does_not_leave_the_engine_paused(
    engine_url: str, model_folder: Path, loses: tuple[str, ...]
) -> None:
    async def play() -> int:
        async with LossyEngine(engine_url, loses=loses) as engine:
            with pytest.raises(EngineUnavailable, match="pause was lost"):  # the first error, not the last
                await swap(engine, str(model_folder), 1)
            return len(await engine.generate("r", as_token_ids([2, 3]), SamplingParams(max_new_tokens=1)))

    async def bounded() -> int:
        try:
            return await asyncio.wait_for(play(), 60)
        finally:
            async with SGLangEngine(engine_url) as engine:
                await engine.resume()  # in any case, because other tests use the engine

    assert asyncio.run(bounded()) == 1
