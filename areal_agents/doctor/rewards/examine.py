"""Plays tasks with players that do none of the work, and collects what the run's own rewards give them.

The agent, the proxy and the reward function are those of the run; only the model is replaced, by the script
of a player. Episodes are played one after another, because the scripted engine sees prompts only and so does
not know whose they are.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_agents.client import AsyncClient
from areal_agents.core.reward_values import RewardValue
from areal_agents.core.rollout import Task
from areal_agents.doctor.rewards.editor import editor_of_tests
from areal_agents.doctor.rewards.facts import facts_of
from areal_agents.doctor.rewards.findings import findings_of
from areal_agents.doctor.rewards.grader import GraderProcess
from areal_agents.doctor.rewards.players import Player, answer_of, players_for
from areal_agents.doctor.rewards.report import Grade, PlayerGrades, RewardReport
from areal_agents.doctor.serving import ObservedProxy, serving
from areal_agents.doctor.tiny_model import write_tiny_model
from areal_agents.errors import ConfigError, RewardError
from areal_agents.proxy.config import ProxyConfig
from areal_agents.rendering import ChatRenderer
from areal_agents.rewards import FinishedEpisode
from areal_agents.rollout.agents.agent import Agent, load_agent
from areal_agents.rollout.agents.attempt import Attempt, open_attempt, run_rollout
from areal_agents.rollout.agents.blocking import interrupted_if_blocked
from areal_agents.rollout.config import AgentSpec, LimitsConfig, RewardConfig
from areal_agents.rollout.rewarding import RewardFunction
from areal_agents.store import Store
from areal_agents.testing import Script, ScriptedApp, ScriptedCall, ScriptedReply, running

_CONTEXT_LENGTH = 262_144
NO_REWARD = "no reward was given"
GIVE_UP_AFTER = 3  # episodes one after another that took all of their time


def examine_rewards(
    tasks: Sequence[Task],
    *,
    most_tasks: int,
    agent: AgentSpec,
    reward: RewardConfig | None,
    limits: LimitsConfig,
    proxy: ProxyConfig,
    group_size: int,
    answer_field: str | None = None,
    timeout_s: float = 60.0,
    say: Callable[[str], None] = lambda _: None,
) -> RewardReport:
    """Play tasks with every player, and report on the rewards.

    Args:
        tasks: the data set, in the order of an epoch.
        most_tasks: how many of them are played.
        agent: the run's agent, as `load_agent` takes it.
        reward: the run's reward function, if it has one apart from the agent.
        limits: limits of an episode; its time limit is at most `timeout_s`.
        proxy: the proxy's configuration, for the rewards that it gives itself.
        group_size: episodes of a group.
        answer_field: the field of a task that holds its answer; None: see `players.ANSWER_FIELDS`.
        say: called with a line of progress.

    Raises:
        ConfigError: no task has the answer field that is named.
        AgentError: the agent cannot be loaded.
        RewardError: the reward function cannot be loaded.
    """
    if answer_field is not None and all(answer_of(task, answer_field) is None for task in tasks):
        raise ConfigError(f"no task has a field {answer_field!r}; the first has {sorted(tasks[0].input)}")
    function = _TimedFunction(reward) if reward is not None else None
    limits = limits.model_copy(update={"time_s": min(timeout_s, limits.time_s)})
    with tempfile.TemporaryDirectory(prefix="areal-agents-doctor-") as home:
        folder = write_tiny_model(Path(home))
        renderer = ChatRenderer.from_folder(folder)
        workdir = agent.get("workdir", "") if isinstance(agent, Mapping) and "cli" in agent else ""
        editor = editor_of_tests(workdir, Path(home)) if workdir else None
        players = tuple(players_for(tasks, answer_field, renderer, has_workdir=editor is not None))
        stage = _Stage()
        engine = ScriptedApp.from_folder(
            folder, stage, context_length=_CONTEXT_LENGTH, keep=0, with_text=False
        )
        with Store.open(Path(home) / "store.db") as store, running(engine) as url:
            observed = ObservedProxy("", store)
            with serving(observed, url, renderer, proxy):
                loaded = load_agent(agent, workers=1)
                reward_time_s = reward.time_s if reward is not None else math.inf
                table = _Table(loaded, editor, stage, function, limits, reward_time_s, proxy.truncated_reward)
                grades = asyncio.run(table.play(observed.url, tasks[:most_tasks], players, say))
    played = tuple(
        PlayerGrades(player.name, player.what, player.knows, player.guesses, tuple(of_player))
        for player, of_player in zip(players, grades, strict=True)
    )
    facts = facts_of(played, group_size=group_size)
    return RewardReport(played, facts, findings_of(played, facts, reward, given_up=table.given_up))


class _Stage:
    """The script of the engine: that of the player whose episode is played now, and what it was asked."""

    def __init__(self) -> None:
        self._script: Script | None = None
        self._marks: tuple[str, ...] = ()
        self._said: tuple[str, ...] = ()
        self.names_form = False

    def enter(self, player: Player, script: Script) -> None:
        """Begin an episode."""
        self._script, self._marks, self._said = script, player.marks, player.said
        self.names_form = False

    def __call__(self, call: ScriptedCall) -> ScriptedReply | str:
        assert self._script is not None, "an agent calls the model only in its episodes"
        prompt = call.prompt_text
        self.names_form |= all(mark in prompt for mark in self._marks)
        self.names_form |= any(text in prompt.lower() for text in self._said)
        return self._script(call)


class _TimedFunction(RewardFunction):
    """The run's reward function in a process of its own; it is called twice for each episode, and remembers
    times and values."""

    def __init__(self, config: RewardConfig) -> None:
        super().__init__(config)
        self._process = GraderProcess(config)
        self.begin()

    def begin(self) -> None:
        """Forget the last episode."""
        self.failed = False
        self.again: float | None = None
        self.seconds: float | None = None

    async def of_episode(self, episode: FinishedEpisode) -> RewardValue:
        """See RewardFunction.of_episode."""
        try:
            await self._process.start()
            started = time.perf_counter()
            try:
                value = await self._process.of_episode(episode)
            finally:
                self.seconds = time.perf_counter() - started
            again = await self._process.of_episode(episode)
        except RewardError:
            self.failed = True
            raise
        if again != value:
            self.again = _total(again)
        return value

    async def close(self) -> None:
        """End its process."""
        await self._process.close()


def _total(value: RewardValue) -> float:
    return float(sum(value.values())) if isinstance(value, Mapping) else float(value)


@dataclass(slots=True)
class _Table:
    """What all players play with.

    Attributes:
        given_up: why no further episodes were played; "" if all were.
    """

    agent: Agent
    editor: Agent | None  # changes the tests of a task's folder
    stage: _Stage
    function: _TimedFunction | None
    limits: LimitsConfig
    reward_time_s: float
    truncated_reward: float
    given_up: str = ""

    async def play(
        self, url: str, tasks: Sequence[Task], players: Sequence[Player], say: Callable[[str], None]
    ) -> list[list[Grade]]:
        """Return the grades of each player, and end the agents.

        An agent or a reward function that hangs would take hours, so after `GIVE_UP_AFTER` such episodes no
        further ones are played.
        """
        grades: list[list[Grade]] = [[] for _ in players]
        late = 0
        try:
            async with AsyncClient(url) as client:
                for number, task in enumerate(tasks, 1):
                    say(f"task {number} of {len(tasks)}: {task.id}")
                    for player, of_player in zip(players, grades, strict=True):
                        if (script := player.script(task)) is not None:
                            self.stage.enter(player, script)
                            of_player.append(grade := await self._grade(client, task, player))
                            late = late + 1 if self._took_all_its_time(grade) else 0
                            if late == GIVE_UP_AFTER:
                                self.given_up = (
                                    f"{late} episodes one after another took all of their time, the last one "
                                    f"{grade.episode_s:.1f} s"
                                )
                                return grades
        finally:
            await self.agent.close()
            if self.editor is not None:
                await self.editor.close()
            if self.function is not None:
                await self.function.close()
        return grades

    def _took_all_its_time(self, grade: Grade) -> bool:
        reward_was_late = grade.grader_failed and (grade.grade_s or 0.0) >= self.reward_time_s
        return reward_was_late or grade.episode_s >= self.limits.time_s

    async def _grade(self, client: AsyncClient, task: Task, player: Player) -> Grade:
        limits, function = self.limits, self.function
        agent = self.editor if player.edits_tests and self.editor is not None else self.agent
        if player.max_tokens is not None:
            least = min(player.max_tokens, limits.max_completion_tokens or player.max_tokens)
            limits = limits.model_copy(update={"max_completion_tokens": least})
        if function is not None:
            function.begin()
        started = time.perf_counter()
        opened = await open_attempt(client, Attempt(task, "train"), limits=limits)
        with interrupted_if_blocked():
            outcome = await run_rollout(client, agent, task, opened, limits=limits, function=function)
        taken = time.perf_counter() - started
        score = (await client.get_episode(opened.id))["score"] if outcome.error is None else None
        if score is None and outcome.status == "truncated":
            score = self.truncated_reward
        return Grade(
            task=task.id,
            score=score,
            error="" if score is not None else (outcome.error or NO_REWARD).replace(opened.api_key, "***"),
            grader_failed=function is not None and function.failed,
            again=function.again if function is not None else None,
            grade_s=function.seconds if function is not None else None,
            episode_s=taken,
            names_form=self.stage.names_form,
            both_rewarded=outcome.both_rewarded,
        )
