"""`areal-agents fork`: plays continuations of a recorded turn, from its exact tokens.

A fork is a new episode of the same task, in a separate store. It begins with copies of the recorded turns.
The agent starts again: its calls before the fork get the recorded replies, so it repeats its tool calls, and
the call of the fork is sampled from the recorded prompt (`proxy/calls/recorded_start.py`). The store of the
run is only read.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from areal_agents.client import AsyncClient, OpenedEpisode
from areal_agents.config import Config, save_config
from areal_agents.core.completion import Completion
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Turn
from areal_agents.doctor.serving import in_thread
from areal_agents.episode import ForkPoint
from areal_agents.errors import ConfigError, RenderingError, RequestError
from areal_agents.evaluation.policies import NamedPolicy, policy_of_run
from areal_agents.inference.clients import EngineClient, connect, protocol_of
from areal_agents.inspection.forks import (
    Continuation,
    ForkedTurn,
    Forks,
    continuation_of,
    first_leaving,
    metadata_of,
)
from areal_agents.inspection.sources import store_of_run
from areal_agents.launch.agent_jobs import refuse_jobs
from areal_agents.launch.agent_sandbox import check_sandbox
from areal_agents.launch.children import Children
from areal_agents.launch.context_length import told_of_context
from areal_agents.launch.engines import wait_for_engines
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.signals import interruptible
from areal_agents.launch.train import (
    chosen_endpoints,
    plan_of,
    start_engines,
    without_trainer,
)
from areal_agents.launch.waiting import WaitLines
from areal_agents.proxy.app import create_app
from areal_agents.proxy.auth import key_hash, new_episode_key
from areal_agents.proxy.calls.recorded_start import RecordedStart
from areal_agents.proxy.calls.sampling import BASE_SEED, PINS
from areal_agents.proxy.dialects.turn_ids import new_turn_id
from areal_agents.proxy.server import make_renderer
from areal_agents.rendering import ChatRenderer
from areal_agents.rollout.agents.agent import load_agent
from areal_agents.rollout.agents.attempt import run_rollout
from areal_agents.rollout.rewarding import RewardFunction
from areal_agents.rollout.seeds import episode_seed
from areal_agents.store import NewEpisode, Store

WRITE_S = 60.0  # longest wait for a write to the store
_STOPPED = "fork was stopped before this continuation had ended"


@dataclass(frozen=True, slots=True)
class Resampling:
    """How a turn is sampled again.

    Attributes:
        count: the number of continuations.
        seed: the seed from which the seeds of the continuations follow.
        temperature: the sampling temperature; None: that of the recorded calls.
        only_turn: whether only the turn is sampled, without the agent.
    """

    count: int
    seed: int = 0
    temperature: float | None = None
    only_turn: bool = False


def weights_of(run: Path, given: str | None, config: Config) -> tuple[NamedPolicy, int]:
    """Return the weights that continue an episode of a run, and their version; 0 if the version is unknown.

    Args:
        run: the run's folder, or a store file.
        given: final, best or the step of a checkpoint of the run, or another name as in `eval --model`; None:
            the final model of the run, else its newest checkpoint, else the model of the configuration.

    Raises:
        ConfigError: there are no such weights.
    """
    from areal_agents.config.models import model_folder
    from areal_agents.training.checkpoint.checkpoint import read_facts
    from areal_agents.training.checkpoint.files import complete_steps

    if given is None and run.is_dir():
        steps = complete_steps(run / "checkpoints")
        given = "final" if RunFolder(run).final_model.is_dir() else str(steps[-1]) if steps else None
    if given is None:
        return NamedPolicy(config.model, Path(config.model)), 0
    if given in ("final", "best") or given.isdecimal():
        if not run.is_dir():
            raise ConfigError(f"--policy: {run} is not the folder of a run, so it has no {given}")
        given = f"{run}@{given}"
    policy = policy_of_run(given)
    if policy is None:
        return NamedPolicy(given, Path(model_folder(given, Path.cwd()))), 0
    of, _, _ = given.rpartition("@")
    with store_of_run(RunFolder(Path(of))) as store:
        published = store.published_versions()
    if policy.checkpoint is None:
        return policy, published[-1].version if published else 0
    step = read_facts(policy.checkpoint)["step"]
    return policy, next((row.version for row in reversed(published) if row.step == step), 0)


def fork(
    config: Config,
    forked: ForkedTurn,
    policy: NamedPolicy,
    version: int,
    how: Resampling,
    *,
    out: RunFolder,
    say: Callable[[str], None],
) -> Forks:
    """Sample a turn again with an engine that is started for it, and let the agent go on.

    Args:
        config: the configuration of the run; `config.model` is the folder of the model that was recorded.
        forked: the turn.
        policy: the weights.
        version: the version that is recorded for the sampled tokens.
        how: how it is sampled.
        out: the folder of the forks.
        say: called with a line of text.

    Raises:
        ConfigError: the configuration does not permit a fork, or the weights have another tokenizer.
        AgentError, RewardError: the agent, or the reward function, cannot be loaded.
        ChildDied: the engine ended.
    """
    if config.engine.urls:
        raise ConfigError("fork samples with weights in an engine that it starts; leave engine.urls out")
    check_greedy(forked, how)
    check_sandbox(config)
    refuse_jobs(config, "fork")
    config = without_trainer(config)
    engine = config.engine.model_copy(update={"replicas": 1})
    config = config.model_copy(update={"engine": engine, "run_dir": str(out.root)})
    plan = plan_of(config, trains=False)
    with (
        out.locked(),
        interruptible(),
        chosen_endpoints(config) as endpoints,
        tempfile.TemporaryDirectory(prefix=".weights-", dir=out.root) as temporary,
    ):
        weights = policy.exported(Path(temporary) / "model")
        renderer = make_renderer(weights, config.proxy)
        _check_tokenizer(config, forked, renderer)
        served = config.model_copy(update={"model": str(weights)})
        save_config(config, out.config)
        save_config(served, Path(temporary) / "config.yaml")
        out.write_endpoints(endpoints)
        with Children(say=say) as children:
            start_engines(served, out, children, plan, "--config", f"{temporary}/config.yaml")
            urls = endpoints.engine_urls
            key = endpoints.engine_key
            wait_for_engines(served, urls, check=children.check, wait=WaitLines(say), warn=say, key=key)
            return play(
                urls[0],
                config,
                forked,
                how,
                renderer=renderer,
                policy=policy.name,
                version=version,
                out=out,
                engine_key=key,
            )


def check_greedy(forked: ForkedTurn, how: Resampling) -> None:
    """Raise ConfigError if all continuations would be the same."""
    temperature = forked.turn.sampling.temperature if how.temperature is None else how.temperature
    if how.count > 1 and temperature == 0:
        raise ConfigError(
            f"at temperature 0 all {how.count} continuations of turn {forked.number} would be the same; give "
            "--temperature, for example 1"
        )


def _check_tokenizer(config: Config, forked: ForkedTurn, renderer: ChatRenderer) -> None:
    """Raise ConfigError if the tokenizer of the weights decodes the recorded tokens to another text."""
    if not (Path(config.model) / "config.json").is_file():
        return  # the model that was recorded is gone
    ids = forked.episode.forest.prompt_ids(forked.turn.id).tolist()
    recorded = make_renderer(config.model, config.proxy).tokenizer
    if ids and max(ids) >= renderer.vocab_size or recorded.decode(ids) != renderer.tokenizer.decode(ids):
        raise ConfigError(
            "--policy: these weights have another tokenizer than the recorded model, so they cannot read its "
            "tokens"
        )


def play(
    engine_url: str,
    config: Config,
    forked: ForkedTurn,
    how: Resampling,
    *,
    renderer: ChatRenderer,
    policy: str,
    version: int,
    out: RunFolder,
    engine_key: str = "",
) -> Forks:
    """Play the continuations with a running engine, and return them with their results.

    The arguments are those of `fork`; `renderer` is that of the weights, `policy` their name, and
    `engine_key` the key of the engine.
    """
    connected = partial(connect, engine_url, protocol_of(config.engine.kind), key=engine_key)
    with Store.open(out.store, config.store.durability) as store:
        prepared = [
            _Fork.open(store, config, forked, how, number=number, policy=policy)
            for number in range(1, how.count + 1)
        ]
        asyncio.run(_set_version(connected, version))
        try:
            if how.only_turn:
                asyncio.run(_sample_turn(connected, store, forked, prepared, renderer))
            else:
                _run_agent(connected, store, config, forked, prepared, renderer, out)
        finally:
            for left in prepared:
                if store.episode_row(left.id).status == "open":
                    store.seal(left.id, "aborted", error=_STOPPED).result(timeout=WRITE_S)
        found = tuple(_result_of(store, forked, fork, renderer, only_turn=how.only_turn) for fork in prepared)
    return Forks(
        episode=forked.episode.id,
        turn=forked.number,
        policy=policy,
        seed=how.seed,
        temperature=forked.turn.sampling.temperature if how.temperature is None else how.temperature,
        recorded=forked.continuation(),
        continuations=found,
        store=str(out.store),
    )


async def _set_version(connected: Callable[[], EngineClient], version: int) -> None:
    engine = connected()
    try:
        await engine.set_version(version, abort_running=False)
    finally:
        await engine.aclose()


@dataclass(frozen=True, slots=True, eq=False)
class _Fork:
    """One fork, opened in the store with its copies of the recorded turns.

    Attributes:
        key: the key with which its agent calls.
        turns: the copies by their number in the recorded episode; the last is the one that is sampled again,
            which is not in the store.
        sampling: the parameters that the turn is sampled with.
    """

    number: int
    id: str
    key: str
    turns: Mapping[int, Turn]
    start: RecordedStart
    sampling: Mapping[str, Any]

    @classmethod
    def open(
        cls,
        store: Store,
        config: Config,
        forked: ForkedTurn,
        how: Resampling,
        *,
        number: int,
        policy: str,
    ) -> _Fork:
        turns = _copies({**forked.before, forked.number: forked.turn})
        given = list(turns.values())[:-1]
        id, key = f"episode-{secrets.token_hex(8)}", new_episode_key()
        sampling = _sampling(forked, how, config.proxy.lifted_pins)
        sampling[BASE_SEED] = episode_seed(how.seed, "fork", forked.episode.id, forked.number, number)
        new = NewEpisode(
            id=id,
            key_hash=key_hash(key),
            task=forked.episode.task,
            split="eval",
            metadata=metadata_of(forked, given=len(given), number=number, policy=policy, seed=how.seed),
            limits=forked.row.limits,
            sampling=sampling,
        )
        store.open_episode(new).result(timeout=WRITE_S)
        for turn in given:
            store.add_turn(id, turn).result(timeout=WRITE_S)
        return cls(number, id, key, turns, RecordedStart(turns), sampling)


def _copies(turns: Mapping[int, Turn]) -> dict[int, Turn]:
    """Return turns of one episode with new ids, which are unique in a store, and without routed experts."""
    ids = {turn.id: new_turn_id() for turn in turns.values()}

    def copy(turn: Turn) -> Turn:
        origin = turn.forked_from
        if origin is not None and origin.turn is not None:
            origin = replace(origin, turn=ids.get(origin.turn))
        return replace(
            turn,
            id=ids[turn.id],
            parent=None if turn.parent is None else ids[turn.parent],
            forked_from=origin,
            completion=replace(turn.completion, routed_experts=None),
        )

    return {number: copy(turn) for number, turn in turns.items()}


def _sampling(forked: ForkedTurn, how: Resampling, lifted: tuple[str, ...]) -> dict[str, Any]:
    """Return the sampling parameters of the fork: those under which the episode was recorded.

    Seeds that the agent requests would make all forks the same.
    """
    if forked.row.split == "train":
        chosen = {name: pin for name, pin in PINS.items() if name not in (*lifted, "logit_bias")}
    else:
        chosen = {name: value for name, value in forked.row.sampling.items() if name in PINS}
    chosen["seed"] = None
    if how.temperature is not None:
        chosen["temperature"] = how.temperature
    return chosen


def _run_agent(
    connected: Callable[[], EngineClient],
    store: Store,
    config: Config,
    forked: ForkedTurn,
    forks: list[_Fork],
    renderer: ChatRenderer,
    out: RunFolder,
) -> None:
    proxy = config.proxy.model_copy(
        update={"admin_key": None, "project_keys": (), "port": 0, "host": "127.0.0.1"}
    )
    engine = connected()
    app = create_app(
        store=store,
        engine=engine,
        renderer=renderer,
        config=proxy,
        starts={fork.id: fork.start for fork in forks},
    )
    with in_thread(app, engine, proxy) as url:
        os.environ["OPENAI_BASE_URL"] = url + "/v1"  # for agents with a client at module level
        asyncio.run(_continue(url, store, config, forked, forks, out))


async def _continue(
    url: str, store: Store, config: Config, forked: ForkedTurn, forks: list[_Fork], out: RunFolder
) -> None:
    rollout = config.rollout.for_engines(config.engine.sequences)
    function = RewardFunction(config.reward) if config.reward is not None else None
    workers = min(len(forks), rollout.workers)
    agent = load_agent(told_of_context(config, config.agent), workers=workers, logs=out.episode_logs)
    limits = rollout.limits.model_copy(update=dict(forked.row.limits))
    places = asyncio.Semaphore(min(len(forks), agent.capacity or len(forks), rollout.concurrency))
    point = _fork_point(forked)

    async def play_one(fork: _Fork, client: AsyncClient) -> None:
        opened = OpenedEpisode(fork.id, fork.key, f"{url}/e/{fork.key}/v1")
        async with places:
            try:
                await run_rollout(
                    client,
                    agent,
                    forked.episode.task,
                    opened,
                    limits=limits,
                    agent_error_reward=rollout.reward_of_agent_errors,
                    function=function,
                    fork=point,
                )
            except RequestError as error:
                await asyncio.wrap_future(store.seal(fork.id, "failed", error=str(error)))

    try:
        async with AsyncClient(url) as client, asyncio.TaskGroup() as group:
            for fork in forks:
                group.create_task(play_one(fork, client))
    finally:
        await agent.close()


def _fork_point(forked: ForkedTurn) -> ForkPoint:
    messages = forked.episode.forest.history(forked.turn.id)
    results = {
        message.tool_call_id: message.content
        for turn in (*forked.before.values(), forked.turn)
        for message in turn.new_messages
        if message.role == "tool" and message.tool_call_id
    }
    return ForkPoint(forked.episode.id, forked.number, [message.to_chat() for message in messages], results)


async def _sample_turn(
    connected: Callable[[], EngineClient],
    store: Store,
    forked: ForkedTurn,
    forks: list[_Fork],
    renderer: ChatRenderer,
) -> None:
    """Sample the turn alone, from its exact prompt, and end the forks."""
    engine = connected()
    ids = forked.episode.forest.prompt_ids(forked.turn.id)
    tools = _called_tools(forked)

    async def sample(fork: _Fork) -> None:
        turn = fork.turns[forked.number]
        temperature = fork.sampling.get("temperature")
        params = replace(
            turn.sampling,
            seed=fork.sampling[BASE_SEED],
            temperature=turn.sampling.temperature if temperature is None else temperature,
            routed_experts_from=None,
        )
        completion = await engine.generate(turn.id, ids, params)
        try:
            reply = renderer.parse(ids, completion.token_ids, tools)
        except RenderingError:  # shown as it was sampled
            reply = Message("assistant", renderer.tokenizer.decode(completion.token_ids.tolist()))
        sampled = replace(turn, completion=completion, reply=reply, sampling=params)
        await asyncio.wrap_future(store.add_turn(fork.id, sampled))
        await asyncio.wrap_future(store.seal(fork.id, "finished"))

    try:
        async with asyncio.TaskGroup() as group:
            for fork in forks:
                group.create_task(sample(fork))
    finally:
        await engine.aclose()


def _called_tools(forked: ForkedTurn) -> list[dict[str, Any]]:
    """Return the tools that the episode called where the same ones were offered; tools are not recorded."""
    names = {
        call.name: None
        for turn in forked.episode.turns
        if turn.tools_id == forked.turn.tools_id
        for call in turn.reply.tool_calls
    }
    parameters = {"type": "object", "properties": {}}
    return [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in names]


def _result_of(
    store: Store, forked: ForkedTurn, fork: _Fork, renderer: ChatRenderer, *, only_turn: bool
) -> Continuation:
    """Return an ended fork, compared with the recorded turn, or with all that followed unless `only_turn`."""
    row, episode = store.episode_row(fork.id), store.load_episode(fork.id)
    given = len(fork.turns) - 1
    turns = [turn for turn in episode.turns[given:] if not turn.discarded]
    error = fork.start.difference or row.error
    if not turns:
        error = error or (
            f"the agent ended after {fork.start.repeated} of the {given} recorded calls before turn "
            f"{forked.number}"
        )
        return continuation_of(fork.number, episode, turns, status=row.status, error=error, leaves=None)
    recorded = [turn for turn in forked.episode.turns[forked.number - 1 :] if not turn.discarded]
    compared = recorded[:1] if only_turn else recorded
    return continuation_of(
        fork.number,
        episode,
        turns,
        status=row.status,
        error=error,
        leaves=first_leaving(compared, turns, number=forked.number),
        logprobs=_logprobs(turns[0].completion, renderer) if only_turn else (),
    )


def _logprobs(completion: Completion, renderer: ChatRenderer) -> list[tuple[str, float]]:
    """Return the text and the logprob of each sampled token."""
    sampled = zip(completion.token_ids.tolist(), completion.behavior_logprobs.tolist(), strict=True)
    return [(renderer.tokenizer.decode([token]), round(logprob, 4)) for token, logprob in sampled]
