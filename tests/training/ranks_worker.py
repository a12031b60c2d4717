"""The program of the two ranks in test_ranks, which spawned processes import by name."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from presets_support import WHOLE as WHOLE_BATCH
from presets_support import preset, train_once
from publish_support import (
    WHOLE,
    ReturningEngine,
    disturb,
    policy_logprobs,
    publisher,
    sample,
    serve_folder,
)
from recording_backend import NAME as RECORDING
from recording_backend import RecordingGroup, Span, register
from training_support import random_group, training_data

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.samples import TrainingData
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import EngineUnavailable, TrainingError
from areal_agents.inference import SGLangEngine
from areal_agents.inference.engine import MemoryKind
from areal_agents.store import Store
from areal_agents.training.batches import source
from areal_agents.training.checkpoint.checkpoint import Checkpoints, TrainingProgress, latest_checkpoint
from areal_agents.training.config import Offload, TrainerConfig
from areal_agents.training.distributed import Ranks, ranks
from areal_agents.training.model.lora import LoraOptions
from areal_agents.training.model.model import ModelOptions, load_policy
from areal_agents.training.publish import preflight, swapping
from areal_agents.training.publish.fleet import EventLoopThread
from areal_agents.training.records.files import step_folder, write_rows
from areal_agents.training.run import run
from areal_agents.training.step.optimizer import make_optimizer
from areal_agents.training.step.step import StepOptions, Stopped, train_batch

ALGORITHM = AlgorithmConfig(clip_high=0.28, minibatches=2)
OPTIONS = StepOptions(microbatch_tokens=150, share_prefixes=True, grad_clip=1.0)
OBSERVATIONS = "m2po with observations"
LAYOUTS = {  # how two ranks share the work, and the presets that are trained in this way
    "data": (
        "ppo",
        "grpo",
        "reinforce_pp",
        "gspo",
        "m2po",
        "dppo",
        "clip_cov",
        "kl_cov",
        "sft",
        "dpo",
        OBSERVATIONS,
    ),
    "context": ("ppo", "m2po", "clip_cov", "kl_cov", "dpo", OBSERVATIONS),
    "replicas": ("ppo",),
}


def samples() -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    return [s for g in "abc" for s in random_group(rng, group_id=g)]


def batch(group: Ranks, count: int | None = None) -> TrainingData | None:
    return training_data(samples()[:count]) if group.is_first else None


def train_preset(
    name: str, folder: Path, reference: Path, group: Ranks, records: Path
) -> tuple[dict[str, torch.Tensor], dict[str, float], float]:
    """Return the weights after a batch, the statistics, and the norm of the gradient. The token records of
    this rank are written to the run folder `records`."""
    options = replace(WHOLE_BATCH, microbatch_tokens=150, records_tokens=True)
    algorithm = preset(name.split()[0], observation_coefficient=0.5 if name == OBSERVATIONS else 0.0)
    result, weights = train_once(algorithm, folder, reference, group, options=options)
    assert result.tokens is not None
    path = step_folder(records, 1) / f"rank-{group.rank}.parquet"
    write_rows(path, result.tokens.rows(step=1, version=0, data=None))
    statistics = result.statistics.as_dict()
    if result.observation is not None:
        statistics |= {"observed": result.observation.tokens, "cross_entropy": result.observation.loss}
    return weights, statistics, result.grad_norm


def train_layouts(folder: Path, reference: Path, records: Path) -> dict[tuple[str, str], tuple]:
    """Train with every preset of every layout; return the results by (layout, preset)."""
    results = {}
    for layout, names in LAYOUTS.items():
        with ranks("cpu", **({layout: 2} if layout != "data" else {})) as group:
            for name in names:
                results[layout, name] = train_preset(name, folder, reference, group, records / layout / name)
    return results


def train(folder: Path, group: Ranks, *, offload: Offload = "none") -> tuple[dict, dict[str, torch.Tensor]]:
    """Train on three batches of two minibatches, and on one sample; return the statistics of the third batch,
    and the weights."""
    on_host = offload == "all"
    options = replace(OPTIONS, gradients_on_host=on_host)
    placement = ModelOptions(placement="offloaded" if on_host else "device")
    policy = load_policy(folder, group, options=placement)
    optimizer = make_optimizer(policy, TrainerConfig(lr=1e-2, offload=offload))
    for seed in range(3):
        result = train_batch(
            policy, optimizer, batch(group), ALGORITHM, options, ranks=group, version=0, seed=seed
        )
    # the other rank has no sample, but must still take part in the collectives
    alone = AlgorithmConfig()
    train_batch(policy, optimizer, batch(group, 1), alone, options, ranks=group, version=0, seed=3)
    return {**result.statistics.as_dict(), "grad_norm": result.grad_norm}, policy.full_state_dict()


def stop_within_a_step(folder: Path, group: Ranks) -> tuple[bool, bool]:
    """Stop a step once the second rank has the gradient of a micro-batch in its shards. Return whether this
    rank stopped, and whether it still has gradients or unsharded weights."""
    policy = load_policy(folder, group, options=ModelOptions(reshard="step"))
    shards = list(policy.parameters())
    stopped = False
    try:
        train_batch(
            policy, make_optimizer(policy, TrainerConfig(lr=1e-2)), batch(group), AlgorithmConfig(),
            replace(OPTIONS, microbatch_tokens=110, reshard="step"), ranks=group, version=0, seed=0,
            stopping=lambda: group.rank == 1 and any(shard.grad is not None for shard in shards),
        )  # fmt: skip
    except Stopped:
        stopped = True
    gathered = any(now is not shard for now, shard in zip(policy.parameters(), shards, strict=True))
    return stopped, gathered or any(shard.grad is not None for shard in shards)


def publish_by_each(folder: Path, group: Ranks, engine_url: str, out: Path) -> dict[str, float]:
    """Publish by each transport to an engine that restarts meanwhile, and to one that is not running. Return,
    by transport, the largest difference between the engine's and the policy's logprobs, and which ranks
    raised which error."""
    results: dict[str, float] = {}
    preflight._POLL_S = swapping._FIRST_PAUSE_S = 0.02
    for number, transport in enumerate((*WHOLE, "lora"), 1):
        lora = LoraOptions(rank=2) if transport == "lora" else None
        policy = load_policy(folder, group, options=ModelOptions(lora=lora))
        disturb(policy, number)
        store = Store.open(out / transport / "store.db") if group.is_first else None
        engines: list[SGLangEngine] = []
        if group.is_first:
            serve_folder(engine_url, folder)  # adapters belong to the initial model of the run
            dies_at = "/load_lora_adapter" if lora else "/pause_generation"
            engines = [ReturningEngine(engine_url, folder, dies_at=dies_at)]
        with publisher(
            policy, group, store, engines, out / transport, folder, transport=transport, engine_wait_s=20
        ) as publishing:
            publishing.publish(version=number, step=0)
        completion = group.broadcast(
            sample(engine_url, adapters=lora is not None) if group.is_first else None
        )
        assert completion is not None and set(completion.versions.tolist()) == {number}
        results[transport] = float(np.abs(completion.logprobs - policy_logprobs(policy, completion)).max())
        if group.is_first:
            engines = [SGLangEngine("http://127.0.0.1:9")]
        with publisher(policy, group, store, engines, out / transport, folder, transport=transport) as alone:
            try:
                alone.publish(version=number + 1, step=1)
            except EngineUnavailable:
                results[f"{transport} lost"] = 0
            except TrainingError:  # on the other rank
                results[f"{transport} lost"] = 1
        if store is not None:
            store.close()
    return results


def sleep_beside_a_slow_rank(
    folder: Path, group: Ranks, engine_url: str, out: Path
) -> dict[bool, dict[str, float]]:
    """Return when this rank had freed its memory, and when the first rank told the engine to resume its own,
    by whether the step was stopped. The times are those of the machine's monotonic clock. The second rank
    frees its memory after the first."""
    times: dict[bool, dict[str, float]] = {False: {}, True: {}}

    class Waking(SGLangEngine):
        async def resume_memory(self, kinds: Sequence[MemoryKind]) -> None:
            times[stops]["woken"] = time.monotonic()
            await super().resume_memory(kinds)

    store = Store.open(out / "store.db") if group.is_first else None
    engines = [Waking(engine_url)] if group.is_first else []
    policy = load_policy(folder, group)
    with publisher(policy, group, store, engines, out, folder) as publishing:
        for stops in (False, True):
            with suppress(Stopped), publishing.engines_asleep(("kv_cache",), together=(Stopped,)):
                freed = out / f"freed-{stops}"  # written by the first rank
                if not group.is_first:
                    while not freed.exists():
                        time.sleep(0.02)
                    time.sleep(0.3)  # in which a first rank that did not wait would wake the engine
                times[stops]["freed"] = time.monotonic()
                if group.is_first:
                    freed.touch()
                if stops:
                    raise Stopped
    if store is not None:
        store.close()
    return times


def watched_loop(*arguments: Any) -> tuple[Any, list[Span], list[Span]]:
    """Return the result of `loop`, the times at which the first rank waited for a batch or for engines, and
    the times at which this rank was in a collective of the device group."""
    waits: list[Span] = []
    next_batch, run_on_loop = source.next_batch, EventLoopThread.run

    def waiting(name: str, seconds: float, call: Callable[[], Any]) -> Any:
        began = time.monotonic()
        time.sleep(seconds)
        try:
            return call()
        finally:
            waits.append((name, began, time.monotonic()))

    RecordingGroup.spans.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            source, "next_batch", lambda *a, **k: waiting("batch", 0.5, lambda: next_batch(*a, **k))
        )
        patch.setattr(
            EventLoopThread,
            "run",
            lambda self, work: waiting("engines", 0.2, lambda: run_on_loop(self, work)),
        )
        return loop(*arguments), waits, list(RecordingGroup.spans)


def loop(model: Path, run_dir: Path, store: Store | None, engine_url: str, steps: int) -> Any:
    """Run the training loop; return its step, version and latest checkpoint, or the message of its error."""
    try:
        result = run(
            TrainerConfig(steps=steps, lr=1e-2, batch_timeout_s=2, checkpoint_every=10, device="cpu"),
            AlgorithmConfig(),
            store=store,
            engines=[] if store is None else [SGLangEngine(engine_url)],
            model_path=model,
            run_dir=run_dir,
            groups=2,
            max_staleness=8,
            stop=threading.Event(),
        )
    except TrainingError as error:
        return str(error)
    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    return result.step, result.version, checkpoint and checkpoint.name


def keep_files_from_children() -> None:
    """Do not pass open files to child processes. PyTorch's shared-memory daemon (ipc on a CPU) runs as long
    as the engine, and would hold the pipe by which the parent notices that this process has ended."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            if int(name) > 2:
                os.set_inheritable(int(name), False)


def main(rank: int, port: int, model: str, reference: str, out: str, engine_url: str) -> None:
    """Train, save a checkpoint, stop within a step, run the training loop, publish, and train all layouts."""
    torch.set_num_threads(1)
    keep_files_from_children()
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": 2,
        "RANK": rank,
        "LOCAL_RANK": rank,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    folder = Path(out)
    register()
    dist.init_process_group(RECORDING)
    with ranks("cpu") as group:
        statistics, weights = train(Path(model), group)
        policy = load_policy(Path(model), group)
        optimizer = make_optimizer(policy, TrainerConfig(lr=1e-2))
        train_batch(policy, optimizer, batch(group), ALGORITHM, OPTIONS, ranks=group, version=0, seed=0)
        checkpoints = Checkpoints(folder / "checkpoints", group, wait=True)
        checkpoints.save({"policy": (policy, optimizer)}, TrainingProgress(1, 1))
        after_one = policy.full_state_dict()
        stopped = stop_within_a_step(Path(model), group)
        store = Store.open(folder / "run" / "store.db") if rank == 0 else None
        ended, waits, spans = watched_loop(Path(model), folder / "run", store, engine_url, 3)
        outcomes = [ended, loop(Path(model), folder / "run", store, engine_url, 2)]
        if store is not None:
            store.close()
        published = publish_by_each(Path(model), group, engine_url, folder / "published")
        slept = sleep_beside_a_slow_rank(Path(model), group, engine_url, folder / "asleep")
        layouts = train_layouts(Path(model), Path(reference), folder / "records")
        with ranks("cpu", replicas=2) as copies:
            offloaded = {
                ("shards", "optimizer"): train(Path(model), group, offload="optimizer"),
                ("shards", "all"): train(Path(model), group, offload="all"),
                ("copies", "all"): train(Path(model), copies, offload="all"),
            }
        torch.save(
            (
                statistics, weights, after_one, stopped, outcomes, layouts, published, slept, waits, spans,
                offloaded,
            ),
            folder / f"{rank}.pt",
        )  # fmt: skip
