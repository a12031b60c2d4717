"""Only adapters are published, and the engine samples like the policy with merged adapters."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from peft import PeftModel
from publish_support import assert_serves, disturb, paused_generation, publisher, sample
from safetensors.torch import load_file
from training_support import record_groups
from transformers import AutoModelForCausalLM

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.errors import EngineError, EngineUnavailable
from areal_agents.inference import SGLangEngine
from areal_agents.store import Store
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.lora import LoraOptions
from areal_agents.training.model.model import ModelOptions, Policy, load_policy
from areal_agents.training.publish import adapters
from areal_agents.training.run import RunResult, run


@pytest.fixture
def adapted(model_folder: Path, group: Ranks) -> Policy:
    return load_policy(model_folder, group, options=ModelOptions(lora=LoraOptions(rank=3, alpha=5)))


def loaded_adapters(url: str, versions: range) -> list[int]:
    """Unload the adapters of `versions`; return those that the engine had, since it refuses the others."""

    async def ask() -> list[int]:
        found = []
        async with SGLangEngine(url) as engine:
            for version in versions:
                try:
                    await engine.unload_adapter(f"policy-{version}")
                    found.append(version)
                except EngineError:
                    pass
        return found

    return asyncio.run(ask())


def test_the_engine_serves_the_adapter(
    adapted: Policy, group: Ranks, store: Store, served_url: str, run_dir: Path, model_folder: Path
) -> None:
    engines = [SGLangEngine(served_url, control_timeout_s=60)]
    with publisher(adapted, group, store, engines, run_dir, model_folder, transport="lora") as out:
        for version in range(1, 5):
            disturb(adapted, version, scale=0.2)
            published = out.publish(version=version, step=version)
            assert published is not None
            assert published.agreement == (1.0 if version == 1 else None)  # for the base, once
            assert_serves(served_url, adapted, version, adapters=True)
    weights = adapted.adapter_state_dict()
    assert weights is not None and published.nbytes == sum(t.nbytes for t in weights.values())
    assert published.density is not None and published.density > 0.99
    assert sorted(p.name for p in (run_dir / "weights").iterdir()) == ["v3", "v4"]
    folder = run_dir / "weights" / "v4"
    assert sorted(p.name for p in folder.iterdir() if p.suffix != ".md") == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, str(folder)).merge_and_unload().state_dict()
    for name, tensor in adapted.full_state_dict().items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-5)
    assert loaded_adapters(served_url, range(1, 5)) == [3, 4]


def test_an_adapter_of_another_run_with_the_same_name_is_replaced(
    adapted: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    engines = [SGLangEngine(engine_url)]
    with publisher(adapted, group, store, engines, run_dir, model_folder, transport="lora") as out:
        out.publish(version=6, step=0)

        async def leave_one() -> None:
            async with SGLangEngine(engine_url) as engine:
                await engine.load_adapter("policy-7", str(run_dir / "weights" / "v6"))

        asyncio.run(leave_one())
        disturb(adapted, 1, scale=0.2)
        out.publish(version=7, step=1)
    assert_serves(engine_url, adapted, 7, adapters=True)


@pytest.mark.parametrize(("pause", "finish"), [("retract", "abort"), ("drain", "length")])
def test_running_generations_end_or_keep_their_adapter(
    pause: str,
    finish: str,
    adapted: Policy,
    group: Ranks,
    store: Store,
    engine_url: str,
    run_dir: Path,
    model_folder: Path,
) -> None:
    engines = [SGLangEngine(engine_url)]
    with publisher(
        adapted, group, store, engines, run_dir, model_folder, transport="lora", pause=pause
    ) as out:
        out.publish(version=1, step=1)

        async def play() -> tuple[str, set[int]]:
            async with SGLangEngine(engine_url, adapters=True) as engine:
                running = await paused_generation(engine, "retract")  # adapters are published without a pause
                await asyncio.to_thread(out.publish, version=2, step=2)
                await engine.resume()
                completion = await running
                return completion.finish_reason, set(completion.versions.tolist())

        assert asyncio.run(play()) == (finish, {1})
    assert set(sample(engine_url, adapters=True).versions.tolist()) == {2}


@pytest.mark.parametrize("goes_on", ["before the trainer ends", "afterwards"])
def test_an_old_adapter_that_is_in_use_delays_neither_the_trainer_nor_its_end(
    goes_on: str,
    adapted: Policy,
    group: Ranks,
    store: Store,
    engine_url: str,
    run_dir: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> set[int]:
        async with SGLangEngine(engine_url, adapters=True) as engine:
            # The generation ends only after the engine is resumed below.
            running = await paused_generation(engine, "retract")
            for version in (2, 3):  # version 3 is the first that no longer keeps version 1
                async with asyncio.timeout(60):
                    published = await asyncio.to_thread(out.publish, version=version, step=version)
                assert published is not None and published.left_out == 0 and not running.done()
            if goes_on == "afterwards":
                monkeypatch.setattr(adapters, "_END_S", 0.05)
                async with asyncio.timeout(60):
                    await asyncio.to_thread(published_by.close)
                assert not running.done()
            await engine.resume()
            return set((await running).versions.tolist())

    monkeypatch.setattr(adapters, "_END_S", 60.0)
    engines = [SGLangEngine(engine_url, control_timeout_s=120)]  # longer than the limits above
    with ExitStack() as published_by:
        out = published_by.enter_context(
            publisher(adapted, group, store, engines, run_dir, model_folder, transport="lora", pause="drain")
        )
        out.publish(version=1, step=1)
        assert asyncio.run(play()) == {1}
    assert loaded_adapters(engine_url, range(1, 4)) == [2, 3]


def test_an_adapter_that_was_not_unloaded_is_unloaded_later(
    adapted: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    class FailingOnce(SGLangEngine):
        asked: ClassVar[list[str]] = []

        async def unload_adapter(self, name: str) -> None:
            self.asked.append(name)
            if len(self.asked) == 1:
                raise EngineUnavailable("it did not answer")
            await super().unload_adapter(name)

    engine = FailingOnce(engine_url)
    with publisher(adapted, group, store, [engine], run_dir, model_folder, transport="lora") as out:
        for version in range(1, 5):
            out.publish(version=version, step=version)
    assert engine.asked == ["policy-1", "policy-1", "policy-2"]
    assert loaded_adapters(engine_url, range(1, 5)) == [3, 4]


def test_a_run_trains_publishes_and_resumes_adapters_alone(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    def train(steps: int) -> RunResult:
        return run(
            TrainerConfig(steps=steps, lr=1e-2, batch_timeout_s=5, lora={"rank": 2}, checkpoint_every=1),
            AlgorithmConfig(),
            store=store,
            engines=[SGLangEngine(engine_url, control_timeout_s=20)],
            model_path=model_folder,
            run_dir=run_dir,
            groups=2,
            max_staleness=8,
            stop=threading.Event(),
        )

    record_groups(store, engine_url, ["a", "b"])
    assert train(1) == RunResult(1, 1, finished=True)
    record_groups(store, engine_url, ["c", "d"], adapters=True)
    assert train(2) == RunResult(2, 3, finished=True)  # version 2: the checkpoint, published again
    first, second = (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    assert first["logprob_diff_max"] <= 1e-4
    # sampled under the adapter of version 1, trained from the same adapter as version 2: the ratio is 1
    assert second["staleness_max"] == 0 and second["tokens"] == 128
    assert second["logprob_diff_max"] <= 1e-4 and second["weight_mean"] == pytest.approx(1, abs=1e-5)
    assert second["density"] > 0 and second["publish_bytes"] < 100_000
    latest = store.latest_version()
    assert latest is not None and latest.path == str(run_dir / "weights" / "v3")
    published = load_file(run_dir / "weights" / "v3" / "adapter_model.safetensors")
    final = load_file(run_dir / "final-adapter" / "adapter_model.safetensors")
    assert published.keys() == final.keys() and all(torch.equal(published[n], final[n]) for n in final)
    assert not list((run_dir / "weights").rglob("model*.safetensors"))  # no full weights were published
    whole = load_file(run_dir / "final" / "model.safetensors")
    assert whole.keys() == load_file(model_folder / "model.safetensors").keys()
