"""Users of the stable version and of a candidate, and the run that trains on their conversations."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
from training_support import VOCAB

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.core.completion import SamplingParams, as_token_ids
from areal_agents.core.messages import Message
from areal_agents.core.rollout import Reward
from areal_agents.core.trajectory import Turn
from areal_agents.inference import SGLangEngine
from areal_agents.inference.pool import CurrentVersion, EnginePool, PoolLimits, canary_engines
from areal_agents.store import NewEpisode, Store
from areal_agents.store.rows import EndedEpisode
from areal_agents.training.canary.judging import CanaryRules
from areal_agents.training.config import TrainerConfig
from areal_agents.training.run import RunResult, run

SHARE, GROUPS = 0.5, 3
# The probability of a thumbs-up, by version: the first candidate is better, and the second is worse.
THUMBS = {0: 0.2, 1: 0.9, 2: 0.1, 3: 0.9}
RULES = CanaryRules(
    share=SHARE,
    steps=1,
    alpha=0.05,
    low=0.0,
    high=1.0,
    least_gain=0.0,
    most_conversations=10_000,
    undecided="roll_back",
    settle_s=0.0,
)


@contextmanager
def users(store_path: Path, urls: Sequence[str], thumbs: Mapping[int, float] = THUMBS) -> Iterator[None]:
    """Simulate users within the block, who rate each conversation by the version that served it.

    The users call the engines through a pool, and record their conversations, as the proxy does.
    """
    stop = threading.Event()
    failures: list[BaseException] = []

    def converse() -> None:
        try:
            asyncio.run(_converse(store_path, urls, thumbs, stop))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=converse)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert not failures, failures


async def _converse(
    path: Path, urls: Sequence[str], thumbs: Mapping[int, float], stop: threading.Event
) -> None:
    with Store.open(path) as store:

        def current() -> CurrentVersion | None:
            served = store.served_versions()
            if served is None:
                return None
            beside = served.candidate
            candidate = None if beside is None else CurrentVersion(beside.version, beside.path)
            return CurrentVersion(served.stable.version, served.stable.path, candidate=candidate)

        pool = EnginePool(
            [SGLangEngine(url, adapters=True, control_timeout_s=60) for url in urls],
            names=urls,
            current=current,
            without_trainer=lambda: nullcontext(False),
            limits=PoolLimits(probe_every_s=0.05, load_again_s=0.05, wait_s=60),
            canary=canary_engines(urls, SHARE),
            canary_share=SHARE,
        )
        rng = np.random.default_rng(0)
        sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
        try:
            while not stop.is_set():
                name = f"implicit-{secrets.token_hex(8)}"
                prompt = as_token_ids(rng.integers(2, VOCAB, 6))
                completion = await pool.generate(name, prompt, sampling, affinity=name)
                turn = Turn(
                    id=f"{name}-0",
                    parent=None,
                    new_messages=(Message("user", name),),
                    new_prompt_ids=prompt,
                    completion=completion,
                    reply=Message("assistant", "reply"),
                    sampling=sampling,
                )
                opened = NewEpisode(
                    name, secrets.token_hex(16), group_id=name, group_size=1, implicit_key=f"user/{name}"
                )
                is_up = rng.random() < thumbs[int(completion.versions[-1])]
                ended = EndedEpisode(opened, (turn,), (Reward("episode", "", "thumb", float(is_up)),))
                await asyncio.wrap_future(store.add_ended([ended]))
        finally:
            await pool.aclose()


def train(
    run_dir: Path,
    model: Path,
    urls: Sequence[str],
    *,
    steps: int = 2,
    rules: CanaryRules = RULES,
    stop: threading.Event | None = None,
) -> RunResult:
    """Start or resume the run, and train until it ends."""
    with Store.open(run_dir / "store.db") as store:
        return run(
            TrainerConfig(
                steps=steps,
                lr=1e-2,
                threads=1,
                trackers=(),
                keep_weights=6,
                record_tokens="none",
                lora={"rank": 2},
            ),
            AlgorithmConfig(preset="reinforce_pp", kl_in="none", minibatches=1),
            store=store,
            engines=[SGLangEngine(url, control_timeout_s=60) for url in urls],
            model_path=model,
            run_dir=run_dir,
            groups=GROUPS,
            max_staleness=None,
            stop=stop or threading.Event(),
            of_traffic=True,
            canary=rules,
            canary_engines=canary_engines(urls, SHARE),
        )
