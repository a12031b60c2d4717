"""The trial: one episode of the agent with a scripted model, before engine and trainer start.

It runs in a process of its own, which the supervisor ends when its time is over. The scripted model calls
the tools that it is offered and then answers in prose, so an agent that parses the model's output may fail
although nothing is wrong with it. The trial therefore ends a run only for reasons that no model can repair:
the agent or the data cannot be loaded, the agent fails before it has received a reply, gives no reward, or
blocks its event loop; or it fails in the same way in every one of several episodes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from areal_agents.client import AsyncClient
from areal_agents.config import Config
from areal_agents.core.rollout import Task
from areal_agents.errors import AgentError, ArealAgentsError
from areal_agents.launch.children import ChildDied, Children
from areal_agents.launch.context_length import engine_context, told_of_context
from areal_agents.launch.run_folder import RunFolder
from areal_agents.rollout.agent_variables import agent_variables
from areal_agents.rollout.config import job_of_agent
from areal_agents.whole_files import write_whole

EPISODES = 3
EPISODE_S = 20.0  # longest trial episode; a slower agent is not judged
LIMIT_S = 180.0  # longest trial, with the import of the agent and of the data
_POLL_S = 0.05
_STOP_S = 5.0
_WITHOUT = "; to start without a trial episode, set trial: false"


def run_trial(
    folder: RunFolder,
    *,
    say: Callable[[str], None],
    ablate_tool: bool = False,
    evaluates: bool = False,
    by: Sequence[str] = (),
) -> None:
    """Run the trial in a process of its own, and report its verdict.

    Args:
        folder: the folder of the run, with its configuration.
        say: called with a line of text.
        ablate_tool: whether the run evaluates the `ablation` agent too.
        evaluates: only load what an evaluation needs, and play no episode.
        by: fields that every held-out task must have.

    Raises:
        AgentError: the agent or the data cannot be used for training, or the trial died or was not ended
            in time.
    """
    folder.trial.unlink(missing_ok=True)
    started = time.monotonic()
    if not evaluates:
        say("playing a trial episode with a scripted model")
    options = [*(["--ablate-tool"] if ablate_tool else []), *(["--evaluates"] if evaluates else [])]
    options += [f"--by={name}" for name in by]
    with Children(stop_timeout_s=_STOP_S) as children:
        children.start(
            "trial",
            ["trial", "--folder", str(folder.root), *options],
            log=folder.log("trial"),
            environment={"TOKENIZERS_PARALLELISM": "false", **agent_variables()},
        )
        while not children.finished("trial"):
            _check(children)
            if time.monotonic() - started > LIMIT_S:
                raise AgentError(
                    f"the trial episode did not end within {LIMIT_S:g} s; see {folder.log('trial')}{_WITHOUT}"
                )
            time.sleep(_POLL_S)
        _check(children)
    verdict = json.loads(folder.trial.read_text())
    if verdict["error"]:
        raise AgentError(verdict["error"])
    if not evaluates:
        say(f"trial: {verdict['note']} ({time.monotonic() - started:.0f} s)")


def _check(children: Children) -> None:
    """Raise AgentError if the process of the trial has died."""
    try:
        children.check(may_finish=("trial",))
    except ChildDied as died:
        raise AgentError(
            f"{died}\nThe agent runs in this process, and may have ended it, for example with os._exit"
            f"{_WITHOUT}"
        ) from died


def play_trial(
    config: Config,
    folder: RunFolder,
    *,
    ablate_tool: bool = False,
    evaluates: bool = False,
    by: Sequence[str] = (),
) -> None:
    """Play the trial in this process, and write its verdict to the run folder. Arguments: see `run_trial`."""
    from areal_agents.rollout.data import load_tasks

    note = ""
    try:
        _load(config, ablate_tool=ablate_tool, by=by)
        if not evaluates:
            task = load_tasks(config.data, seed=config.seed).epoch(0)[0]
            note = _play(config, folder, task)
    except ArealAgentsError as error:
        _write(folder, error=str(error))
    else:
        _write(folder, note=note)


def check_parts(config: Config) -> None:
    """Load the agents, the reward function and the tasks of a run in this process, and play nothing.

    An agent whose episodes are jobs is not loaded: this machine may not reach their scheduler. What the
    user's modules print goes to standard error.

    Raises:
        ArealAgentsError: one of them cannot be loaded.
    """
    from areal_agents.rollout.data import load_tasks

    if not config.agent or config.data.episodes or config.data.traffic:
        return
    with redirect_stdout(sys.stderr):
        _load(config, ablate_tool=True, by=())
        load_tasks(config.data, seed=config.seed)


def _load(config: Config, *, ablate_tool: bool, by: Sequence[str]) -> None:
    """Load everything that the run will evaluate with, some of it hours later. Raises ArealAgentsError."""
    from areal_agents.evaluation.results import field_of_tasks
    from areal_agents.rollout.agents.agent import load_agent
    from areal_agents.rollout.rewarding import EpisodeFunction, RewardFunction
    from areal_agents.rollout.runner import held_out_tasks

    for agent in (config.agent, config.ablation if ablate_tool else None):
        if agent and job_of_agent(agent) is None:
            asyncio.run(load_agent(agent).close())
    if config.reward is not None:
        RewardFunction(config.reward)
    if config.eval is not None:
        tasks = {task.id: task.input for task in held_out_tasks(config.eval)}
        for name in by:
            field_of_tasks(tasks, name)
        if config.eval.answer:
            EpisodeFunction(config.eval.answer, what="answer function", key="eval.answer", time_s=1.0)


def _play(config: Config, folder: RunFolder, task: Task) -> str:
    """Play up to three episodes, and return a remark about them. Raises AgentError as `run_trial` says."""
    from areal_agents.doctor.serving import ObservedProxy, scripted_engine, serving
    from areal_agents.proxy.server import make_renderer
    from areal_agents.store import Store

    renderer = make_renderer(config.model, config.proxy)
    proxy_config = config.proxy.model_copy(update={"admin_key": None, "project_keys": (), "port": 0})
    model = Path(config.model)
    with (
        tempfile.TemporaryDirectory(prefix="areal-agents-trial-") as home,
        scripted_engine(model, renderer, context_length=engine_context(config, model)) as engine_url,
        Store.open(Path(home) / "store.db") as store,
    ):
        proxy = ObservedProxy("", store)
        with serving(proxy, engine_url, renderer, proxy_config):
            os.environ["OPENAI_BASE_URL"] = proxy.url + "/v1"  # as the rollout process sets it
            return asyncio.run(_judge(config, folder, proxy.url, task))


async def _judge(config: Config, folder: RunFolder, url: str, task: Task) -> str:
    from areal_agents.rollout.agents.agent import load_agent
    from areal_agents.rollout.agents.attempt import Attempt, open_attempt, run_rollout
    from areal_agents.rollout.agents.blocking import BlockingWatch
    from areal_agents.rollout.rewarding import RewardFunction

    limits = config.rollout.limits.model_copy(update={"time_s": min(EPISODE_S, config.rollout.limits.time_s)})
    spec = told_of_context(config, config.agent)
    agent = load_agent(spec, workers=1, logs=folder.episode_logs)
    function = RewardFunction(config.reward) if config.reward is not None else None
    must_reward = function is None and agent.must_reward and not config.rollout.outside_rewards
    errors: list[str] = []
    try:
        async with AsyncClient(url) as client:
            for _ in range(EPISODES):
                with BlockingWatch(lambda text: _end_blocked(folder, text)):
                    attempt = Attempt(task, "train")
                    opened = await open_attempt(client, attempt, limits=limits)
                    outcome = await run_rollout(
                        client,
                        agent,
                        task,
                        opened,
                        limits=limits,
                        must_reward=must_reward,
                        function=function,
                    )
                if outcome.error is None:
                    break
                state = await client.get_episode(opened.id)
                errors.append(outcome.error)
                if not state["turns"]:
                    raise AgentError(f"the agent fails before its first reply: {outcome.error}{_WITHOUT}")
                if outcome.is_unrewarded:
                    raise AgentError(f"{outcome.error}{_WITHOUT}")
    finally:
        await agent.close()
    scored = config.rollout.agent_error == "score"
    if len(errors) == EPISODES and len(set(errors)) == 1 and not scored:
        raise AgentError(
            f"{EPISODES} trial episodes with a scripted model failed in the same way: {errors[0]}. If the "
            "agent only fails because the scripted model answers in prose, set trial: false; if such errors "
            "are the policy's, set rollout.agent_error: score"
        )
    if len(errors) == EPISODES:
        return f"{EPISODES} episodes failed, which are scored in training: {errors[-1]}"
    if errors:
        return f"an episode failed, others did not: {errors[-1]}"
    if outcome.status == "truncated":
        return "the episode reached a limit, so nothing is known about its end"
    if not outcome.rewarded:
        return (
            "the command gave no reward; it must be posted within proxy.reward_timeout_s after it has ended"
        )
    both = f"; {outcome.both_rewarded} (docs/rewards.md)" if outcome.both_rewarded else ""
    return f"the episode was played and rewarded{both}"


def _end_blocked(folder: RunFolder, text: str) -> None:
    """End this process: its main thread cannot."""
    _write(folder, error=text + _WITHOUT)
    os._exit(0)


def _write(folder: RunFolder, *, error: str = "", note: str = "") -> None:
    write_whole(folder.trial, json.dumps({"error": error, "note": note}))
