"""Replays a recorded episode: runs the agent against the recorded replies, without a model.

The agent calls a real proxy, whose scripted engine returns the recorded tokens. The first request that
differs from the recorded one is what has changed in the agent, its tools or its data since the episode was
played.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from areal_agents.client import AsyncClient
from areal_agents.core.completion import TokenIds
from areal_agents.core.messages import Message, first_difference
from areal_agents.core.rollout import EpisodeStatus, RecordedEpisode, Split
from areal_agents.core.trajectory import Turn
from areal_agents.doctor.serving import ObservedProxy, serving
from areal_agents.proxy.config import ProxyConfig
from areal_agents.rendering import ChatRenderer
from areal_agents.rollout.agents.agent import load_agent
from areal_agents.rollout.agents.attempt import Attempt, Outcome, open_attempt, run_rollout
from areal_agents.rollout.config import AgentSpec, LimitsConfig, RewardConfig
from areal_agents.rollout.rewarding import RewardFunction
from areal_agents.store import Store
from areal_agents.testing import ScriptedApp, ScriptedCall, ScriptedReply, running

CONTEXT = 262_144  # tokens; whether a prompt fits the model's own context was decided when it was recorded
NO_REPLY = "the recording has no further reply: the agent makes more calls than the recorded one"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first request that differs from the recorded one.

    Attributes:
        call: the number of the recorded call, from 1.
        message: the number of the first message that differs, from 1; None if only the tools differ.
        recorded, replayed: the message then and now; None where there is none.
    """

    call: int
    message: int | None
    recorded: Message | None
    replayed: Message | None


@dataclass(frozen=True, slots=True)
class Replay:
    """What became of a replay.

    Attributes:
        recorded_calls, replayed_calls: the numbers of calls.
        difference: None if every call was the recorded one.
        recorded_rewards, replayed_rewards: the rewards of the episode, by name.
        error: why the replayed episode failed; None if it did not.
        recorded_status: how the recorded episode ended. One that was aborted or failed, or is open, was cut
            off: it has no rewards to compare, and the agent may go on after its last call.
    """

    episode: str
    recorded_calls: int
    replayed_calls: int
    difference: Difference | None
    recorded_rewards: Mapping[str, float]
    replayed_rewards: Mapping[str, float]
    error: str | None
    recorded_status: EpisodeStatus

    @property
    def was_cut_off(self) -> bool:
        """Whether the recorded episode ended before its agent did."""
        return self.recorded_status not in ("finished", "truncated")

    @property
    def is_same(self) -> bool:
        """Whether the calls are those of the recording and, unless it was cut off, the rewards too."""
        if self.difference is not None or self.recorded_calls != self.replayed_calls:
            return False
        return self.was_cut_off or (self.recorded_rewards == self.replayed_rewards and self.error is None)


def replay(
    recorded: RecordedEpisode,
    *,
    model: Path,
    renderer: ChatRenderer,
    agent: AgentSpec,
    limits: LimitsConfig,
    reward: RewardConfig | None,
    proxy: ProxyConfig,
    split: Split,
) -> Replay:
    """Run an agent on the task of a recorded episode, with its replies.

    Args:
        model: the folder of the model whose tokens were recorded, for its tokenizer.

    Raises:
        AgentError, RewardError: the agent, or the reward function, cannot be loaded.
        ValueError: the recording has no call.
    """
    turns = [turn for turn in recorded.turns if not turn.discarded]
    if not turns:
        raise ValueError(f"episode {recorded.id} has no recorded call to replay")
    app = ScriptedApp.from_folder(
        model, _Recording(recorded, turns), keep=0, with_text=False, context_length=CONTEXT
    )
    settings = proxy.model_copy(
        update={"admin_key": None, "project_keys": (), "port": 0, "host": "127.0.0.1"}
    )
    with (
        tempfile.TemporaryDirectory(prefix="areal-agents-replay-") as home,
        running(app) as engine_url,
        Store.open(Path(home) / "store.db") as store,
    ):
        served = ObservedProxy("", store)
        with serving(served, engine_url, renderer, settings):
            episode_id, outcome = asyncio.run(
                _play(served.url, recorded, agent, limits, reward, split, Path(home))
            )
        replayed = store.load_episode(episode_id)
    return Replay(
        episode=recorded.id,
        recorded_calls=len(turns),
        replayed_calls=len(replayed.turns),
        difference=_first_difference(recorded, turns, replayed),
        recorded_rewards=_rewards(recorded),
        replayed_rewards=_rewards(replayed),
        error=outcome.error,
        recorded_status=recorded.status,
    )


async def _play(
    url: str,
    recorded: RecordedEpisode,
    spec: AgentSpec,
    limits: LimitsConfig,
    reward: RewardConfig | None,
    split: Split,
    home: Path,
) -> tuple[str, Outcome]:
    function = RewardFunction(reward) if reward is not None else None
    agent = load_agent(spec, workers=1, logs=home / "logs")
    try:
        async with AsyncClient(url) as client:
            opened = await open_attempt(client, Attempt(recorded.task, split), limits=limits)
            outcome = await run_rollout(
                client, agent, recorded.task, opened, limits=limits, function=function
            )
            return opened.id, outcome
    finally:
        await agent.close()


class _Recording:
    """The script of an engine that returns recorded tokens.

    A call gets the reply to the recorded call with the same prompt, and if there is none, the next reply that
    was not given yet; so calls that an agent makes at the same time may arrive in any order.
    """

    def __init__(self, recorded: RecordedEpisode, turns: Sequence[Turn]) -> None:
        self._left = [(recorded.forest.prompt_ids(turn.id), turn) for turn in turns]
        self._lock = threading.Lock()

    def __call__(self, call: ScriptedCall) -> ScriptedReply:
        with self._lock:
            if not self._left:
                return ScriptedReply(error=NO_REPLY, error_status=400)
            found = next((i for i, (ids, _) in enumerate(self._left) if _equal(ids, call.input_ids)), 0)
            _, turn = self._left.pop(found)
        # A reply that the request's limit had cut is cut by it again.
        return ScriptedReply(token_ids=tuple(int(token) for token in turn.completion.token_ids))


def _equal(first: TokenIds, second: TokenIds) -> bool:
    return len(first) == len(second) and bool(np.array_equal(first, second))


def _first_difference(
    recorded: RecordedEpisode, turns: Sequence[Turn], replayed: RecordedEpisode
) -> Difference | None:
    """Return the first replayed call that is none of the recorded ones, beside the first of those left."""
    left = list(enumerate(turns, start=1))
    for turn in replayed.turns:
        now = _request(replayed, turn)
        same = next((i for i, (_, other) in enumerate(left) if _same(_request(recorded, other), now)), None)
        if same is not None:
            left.pop(same)
        elif left:
            number, other = left[0]
            return _difference(number, _request(recorded, other), now)
    return None


def _request(episode: RecordedEpisode, turn: Turn) -> tuple[list[Message], str]:
    """Return the conversation that a call was made with, and the digest of its tools."""
    path = [turn]
    while (parent := path[-1].parent) is not None:
        path.append(episode.forest[parent])
    messages: list[Message] = []
    for earlier in reversed(path):
        messages += [*earlier.new_messages, earlier.reply]
    return messages[:-1], turn.tools_id


def _same(first: tuple[list[Message], str], second: tuple[list[Message], str]) -> bool:
    return first[1] == second[1] and first_difference(first[0], second[0]) is None


def _difference(number: int, then: tuple[list[Message], str], now: tuple[list[Message], str]) -> Difference:
    index = first_difference(then[0], now[0])
    if index is None:
        return Difference(number, None, None, None)
    before, after = (messages[index] if index < len(messages) else None for messages in (then[0], now[0]))
    return Difference(number, index + 1, before, after)


def _rewards(episode: RecordedEpisode) -> dict[str, float]:
    return {reward.name: reward.value for reward in episode.rewards if reward.scope == "episode"}
