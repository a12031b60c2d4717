"""A real engine samples recorded turns again from their exact tokens, and agents continue from there."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspection_support import MODEL, running_proxy, tool_call
from rich.console import Console
from scripted_sampler import ScriptedSampler
from typer.testing import CliRunner

from areal_agents.cli import app
from areal_agents.client import AsyncClient
from areal_agents.config import Config, load_config
from areal_agents.core.rollout import RecordedEpisode, Task
from areal_agents.errors import AgentError, ConfigError
from areal_agents.inference import running_engine
from areal_agents.inspection.fork_table import print_forks
from areal_agents.inspection.forks import ForkedTurn, Forks, forked_turn
from areal_agents.launch.fork import Resampling, play
from areal_agents.launch.run_folder import RunFolder
from areal_agents.rendering import ChatRenderer
from areal_agents.rollout.agents.agent import load_agent
from areal_agents.rollout.agents.attempt import Attempt, open_attempt, run_rollout
from areal_agents.rollout.config import LimitsConfig
from areal_agents.store import Store

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from docs_support import block  # noqa: E402

AGENTS = Path(__file__).parent / "forked_agents.py"
LIMITS = LimitsConfig(time_s=60, max_completion_tokens=40)


@dataclass
class Recording:
    """Episodes of a scripted model, by the name of the agent, and an engine that continues them."""

    folder: Path
    episodes: dict[str, str]
    engine_url: str
    renderer: ChatRenderer

    def config(self, agent: str) -> Config:
        return load_config(self.folder / "config.yaml", [f"agent={self.spec(agent)}"])

    def spec(self, agent: str) -> str:
        return f"{self.folder}/documented.py:agent" if agent == "documented" else f"{AGENTS}:{agent}"

    def turn(self, number: int, agent: str = "agent") -> ForkedTurn:
        with Store.open(self.folder / "store.db") as store:
            return forked_turn(store, self.episodes[agent], str(number))

    def fork(
        self, forked: ForkedTurn, agent: str, out: Path, *, count: int = 2, **how: Any
    ) -> tuple[Forks, list[RecordedEpisode]]:
        (out / "logs").mkdir(parents=True, exist_ok=True)
        found = play(
            self.engine_url,
            self.config(agent),
            forked,
            Resampling(count, **how),
            renderer=self.renderer,
            policy="m",
            version=7,
            out=RunFolder(out),
        )
        with Store.open(out / "store.db") as store:
            return found, [store.load_episode(c.episode) for c in found.continuations]

    @property
    def searches(self) -> int:
        return len((self.folder / "ran").read_text().splitlines())


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    folder = tmp_path_factory.mktemp("forks")
    renderer = ChatRenderer.from_folder(MODEL)
    engine = ScriptedSampler(renderer)
    task = Task("t", {"question": "Where is Lyon?", "ran": str(folder / "ran")})

    async def record(url: str, agent: str) -> str:
        async with AsyncClient(url) as client:
            opened = await open_attempt(client, Attempt(task, "train"), limits=LIMITS)
            outcome = await run_rollout(client, load_agent(agent), task, opened, limits=LIMITS)
            assert outcome.error is None
            return opened.id

    (folder / "documented.py").write_text(block("docs/inspecting.md", "async def agent").text)
    episodes: dict[str, str] = {}
    searched = (tool_call(query="Lyon"), "Lyon.")
    made = Recording(folder, episodes, "", renderer)
    with running_proxy(folder / "store.db", engine) as proxy:
        for agent, texts in (
            ("agent", searched),
            ("documented", searched),
            ("two_at_once", ("Rhone", "Var")),
        ):
            replies = iter(texts)
            engine.script = lambda call, replies=replies: next(replies)
            episodes[agent] = asyncio.run(record(proxy.url, made.spec(agent)))
    (folder / "tasks.jsonl").write_text('{"question": "Where is Lyon?"}\n')
    (folder / "config.yaml").write_text(
        f"model: {MODEL}\nagent: {AGENTS}:agent\ndata: {{path: tasks.jsonl}}\n"
        "trainer: {steps: 1}\nrollout: {workers: 2}\n"
    )
    with running_engine(MODEL) as made.engine_url:
        yield made


def new_calls(episodes: list[RecordedEpisode]) -> int:
    """The number of tool calls in replies that were sampled after a copied turn."""
    return sum(len(turn.reply.tool_calls) for episode in episodes for turn in episode.turns[1:])


def test_a_fork_has_the_recorded_tokens_and_continues_with_new_ones(
    recording: Recording, tmp_path: Path
) -> None:
    forked, before = recording.turn(2), recording.searches
    found, episodes = recording.fork(forked, "agent", tmp_path, count=3, temperature=3.0)
    first, second = forked.episode.turns
    for continuation, episode in zip(found.continuations, episodes, strict=True):
        assert continuation.error is None and continuation.turns == len(episode.turns) - 1 >= 1
        given, sampled, *_ = episode.turns
        assert given.id != first.id and given.reply == first.reply
        np.testing.assert_array_equal(given.completion.behavior_logprobs, first.completion.behavior_logprobs)
        np.testing.assert_array_equal(
            episode.forest.prompt_ids(sampled.id), forked.episode.forest.prompt_ids(second.id)
        )
        assert set(sampled.completion.versions.tolist()) == {7} and sampled.sampling.temperature == 3.0
        assert len(sampled.completion) <= 40  # the limits of the recorded episode
        logprobs = [float(turn.completion.behavior_logprobs.sum()) for turn in episode.turns[1:]]
        assert continuation.logprob == pytest.approx(sum(logprobs), abs=1e-4)
        assert continuation.score == episode.score
    assert len({c.logprob for c in found.continuations}) > 1  # their seeds differ
    assert found.mean_score == pytest.approx(np.mean([c.score for c in found.continuations]))
    assert found.recorded.score == forked.episode.score and found.recorded.turns == 1
    # The recorded tool call was not run again; only calls after the fork may have been.
    assert recording.searches - before == new_calls(episodes)


def test_the_same_seed_samples_the_same_tokens_and_another_seed_does_not(
    recording: Recording, tmp_path: Path
) -> None:
    def sampled(folder: str, seed: int, agent: str = "agent") -> list[list[int]]:
        out = tmp_path / folder
        _, episodes = recording.fork(recording.turn(1), agent, out, seed=seed, temperature=3.0)
        return [episode.turns[0].completion.token_ids.tolist() for episode in episodes]

    assert sampled("a", 3) == sampled("b", 3, "synchronous") != sampled("c", 4)


@pytest.mark.parametrize("number", [1, 2])
def test_the_prompt_is_never_rendered_again(recording: Recording, tmp_path: Path, number: int) -> None:
    forked = recording.turn(number)
    turns = list(forked.episode.turns[:number])
    odd = np.concatenate(
        [turns[-1].new_prompt_ids, turns[-1].new_prompt_ids[-1:]]
    )  # no template renders this
    turns[-1] = replace(turns[-1], new_prompt_ids=odd)
    changed = ForkedTurn(forked.row, replace(forked.episode, turns=tuple(turns), rewards=()), number)
    _, (episode,) = recording.fork(changed, "agent", tmp_path, count=1)
    np.testing.assert_array_equal(episode.turns[number - 1].new_prompt_ids, odd)


def test_a_synchronous_agent_that_streams_can_be_forked(recording: Recording, tmp_path: Path) -> None:
    forked, before = recording.turn(2), recording.searches
    found, episodes = recording.fork(forked, "synchronous", tmp_path)
    assert [c.error for c in found.continuations] == [None, None]
    assert recording.searches - before == new_calls(episodes)


def test_an_agent_can_restore_the_messages_of_the_fork_itself(recording: Recording, tmp_path: Path) -> None:
    found, episodes = recording.fork(recording.turn(2), "restores", tmp_path)
    assert [c.error for c in found.continuations] == [None, None]
    assert all(episode.turns[1].parent == episode.turns[0].id for episode in episodes)


def test_the_agent_of_the_documentation_can_be_forked(recording: Recording, tmp_path: Path) -> None:
    found, _ = recording.fork(recording.turn(2, "documented"), "documented", tmp_path)
    assert [c.error for c in found.continuations] == [None, None]


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (
            "searches_again",
            "the request of turn 2 differs from the recorded one: message 3 was tool 'In France, ",
        ),
        ("other_tools", "the request of turn 1 differs from the recorded one: the tools that it offers"),
        ("two_at_once", "the request of turn 1 differs from the recorded one: "),
        ("stops", "the agent ended after 1 of the 1 recorded calls before turn 2"),
    ],
)
def test_a_difference_before_the_fork_is_an_error(
    recording: Recording, tmp_path: Path, agent: str, message: str
) -> None:
    found, episodes = recording.fork(recording.turn(2), agent, tmp_path)
    for continuation, episode in zip(found.continuations, episodes, strict=True):
        assert message in (continuation.error or "")
        assert len(episode.turns) == 1 and continuation.turns == 0
    assert found.mean_score is None
    print_forks(found, Console(file=(shown := io.StringIO()), width=400))
    assert message in shown.getvalue() and "mean score" not in shown.getvalue()


def test_continuations_that_did_not_end_are_aborted(recording: Recording, tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="missing"):
        recording.fork(recording.turn(2), "missing", tmp_path)
    with Store.open(tmp_path / "store.db") as store:
        assert [episode.status for episode in store.episodes()] == ["aborted", "aborted"]


def test_an_agent_with_concurrent_calls_can_be_forked(recording: Recording, tmp_path: Path) -> None:
    forked = recording.turn(2, "two_at_once")
    found, episodes = recording.fork(forked, "two_at_once", tmp_path, temperature=3.0)
    assert [c.error for c in found.continuations] == [None, None]
    for episode in episodes:
        assert [turn.new_messages for turn in episode.turns] == [t.new_messages for t in forked.episode.turns]
        assert episode.turns[0].reply == forked.episode.turns[0].reply


def test_a_turn_can_be_sampled_without_the_agent(recording: Recording, tmp_path: Path) -> None:
    forked = recording.turn(1)
    found, episodes = recording.fork(forked, "agent", tmp_path, only_turn=True, temperature=1.0)
    for continuation, episode in zip(found.continuations, episodes, strict=True):
        (turn,) = episode.turns
        assert episode.status == "finished" and continuation.score is None
        np.testing.assert_array_equal(turn.new_prompt_ids, forked.turn.new_prompt_ids)
        shown = [logprob for _, logprob in continuation.logprobs]
        assert shown == pytest.approx(turn.completion.behavior_logprobs.tolist(), abs=1e-3)
        texts = "".join(text for text, _ in continuation.logprobs)
        assert texts == recording.renderer.tokenizer.decode(turn.completion.token_ids.tolist())


def test_the_command_records_the_continuations(recording: Recording, tmp_path: Path) -> None:
    given = [
        "fork", recording.episodes["agent"], "--turn", recording.turn(2).turn.id, "-k", "2",
        "--run", str(recording.folder / "store.db"), "--config", str(recording.folder / "config.yaml"),
        "--out", str(tmp_path / "out"), "--json",
    ]  # fmt: skip
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    found = json.loads(done.output.splitlines()[-1])
    assert found["turn"] == 2 and found["temperature"] == 1.0
    assert [c["number"] for c in found["continuations"]] == [1, 2]
    assert not list((tmp_path / "out").glob(".weights-*"))
    with Store.open(tmp_path / "out" / "store.db") as store:
        forks = store.episodes(metadata={"forked_from": recording.episodes["agent"], "turn": 2})
    assert [(e.id, e.split, e.group_id) for e in forks] == [
        (c["episode"], "eval", None) for c in found["continuations"]
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--turn", "3"], "has the turns 1 to 2, got 3"),
        (
            ["--turn", "2", "--temperature", "0"],
            "at temperature 0 all 8 continuations of turn 2 would be the same",
        ),
        (["--turn", "2", "--policy", "best"], "is not the folder of a run"),
        (["--turn", "2", "engine.kind=sglang", "engine.urls=[http://127.0.0.1:1]"], "leave engine.urls out"),
    ],
)
def test_an_invalid_fork_is_refused(
    recording: Recording, tmp_path: Path, more: list[str], message: str
) -> None:
    given = [
        "fork", recording.episodes["agent"], "--run", str(recording.folder / "store.db"),
        "--config", str(recording.folder / "config.yaml"), "--out", str(tmp_path / "out"), *more,
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, given, catch_exceptions=False)
    assert not (tmp_path / "out").exists()
