from __future__ import annotations

import asyncio
import shutil
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from time_limits import TimeLimits

from areal_agents.client import AsyncClient
from areal_agents.core.rollout import RecordedEpisode, Task
from areal_agents.episode import Episode as Handle
from areal_agents.errors import AgentError, RequestError
from areal_agents.rollout.agents import attempt as rollout_attempt
from areal_agents.rollout.agents.agent import Agent, WaitsForPlace, load_agent
from areal_agents.rollout.agents.attempt import Attempt, FailureStreak, Outcome, open_attempt, run_rollout
from areal_agents.rollout.config import LimitsConfig
from areal_agents.sandbox.remote.hosts import SandboxHosts
from tests.sandbox.conftest import sandbox_host

AGENTS = Path(__file__).parent / "rollout_agents.py"
ADMIN_KEY = "admin-key-of-the-tests"


class Attempts:
    """Runs an agent once, in a group of one episode."""

    def __init__(self, served: Any, client: AsyncClient) -> None:
        self.served, self.client = served, client
        self._opened = 0

    async def __call__(
        self,
        agent: str | dict[str, Any] | Agent,
        task: dict[str, Any] | None = None,
        *,
        agent_error_reward: float | None = None,
        **limits: Any,
    ) -> tuple[Outcome, RecordedEpisode]:
        if isinstance(agent, str):
            agent = f"{AGENTS}:{agent}"
        loaded = load_agent(agent, workers=1) if isinstance(agent, str | dict) else agent
        self._opened += 1
        place = Attempt(Task("t", task or {}), "train", f"t@{self._opened}", 1, 0)
        set_limits = LimitsConfig(**{"time_s": 60.0, **limits})
        try:
            opened = await open_attempt(self.client, place, limits=set_limits)
            outcome = await run_rollout(
                self.client,
                loaded,
                place.task,
                opened,
                limits=set_limits,
                agent_error_reward=agent_error_reward,
            )
        finally:
            await loaded.close()
        return outcome, self.served.store.load_episode(opened.id)


@pytest.fixture
async def attempts(served: Any) -> AsyncIterator[Attempts]:
    async with AsyncClient(served.url, ADMIN_KEY) as client:
        yield Attempts(served, client)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What agents have reported so far, for example their rewards."""
    reports: list[dict[str, Any]] = []

    def noting(id: str, base_url: str, api_key: str, report: Callable[..., None], fork: Any) -> Handle:
        def both(path: str, body: dict[str, Any]) -> None:
            report(path, body)
            reports.append(body)

        return Handle(id, base_url, api_key, both, fork)

    monkeypatch.setattr(rollout_attempt, "Episode", noting)
    return reports


async def gone(pid: int) -> None:
    """Return when a process has ended; an orphan may stay a zombie where no process reaps it."""
    async with asyncio.timeout(60):
        while is_running(pid):
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def rewards(episode: RecordedEpisode) -> dict[str, float]:
    return {reward.name: reward.value for reward in episode.rewards}


@pytest.mark.parametrize("agent", ["good", "undecorated", "sync_good"])
async def test_a_good_agent_finishes_with_its_reward(attempts: Attempts, agent: str) -> None:
    outcome, episode = await attempts(agent)
    assert outcome == Outcome("finished", rewarded=True)
    assert rewards(episode)["return"] == 1.0 and len(episode.turns) == 1
    assert attempts.served.store.group_counts()["complete"] == 1


@pytest.mark.parametrize("agent", ["raises", "sync_parses"])
async def test_an_error_of_the_agent_can_be_scored_instead_of_failing_the_episode(
    attempts: Attempts, agent: str
) -> None:
    outcome, episode = await attempts(agent, agent_error_reward=-0.5)
    assert outcome == Outcome("truncated", rewarded=True)
    assert episode.status == "truncated" and rewards(episode)["agent_error"] == -0.5
    assert attempts.served.store.group_counts()["complete"] == 1


@pytest.mark.parametrize("agent", ["never_calls", "loses_the_connection", "says_it_failed", "is_lost"])
async def test_errors_that_the_policy_cannot_have_caused_are_not_scored(
    attempts: Attempts, agent: str
) -> None:
    outcome, episode = await attempts(agent, agent_error_reward=-0.5)
    assert (outcome.status, outcome.rewarded, episode.status) == ("failed", False, "failed")


@pytest.mark.parametrize(
    ("agent", "error"),
    [
        ("cancels_itself", r"the agent cancelled itself"),
        ("raises", r"KeyError: 'no such tool' \(.*rollout_agents.py, line \d+\)"),
        ("exits", r"called sys.exit\(3\)"),
        ("never_calls", "made no model call; does its client use ep.base_url"),
        ("not_a_number", "reward must be finite, got nan"),
        ("says_it_failed", "the tool server is down"),
        ("sync_raises", "SystemExit: enough"),
        ("sync_dies", r"worker process died \(exit status 7\)"),
    ],
)
async def test_errors_that_are_not_due_to_the_policy_fail_the_episode(
    attempts: Attempts, agent: str, error: str
) -> None:
    outcome, episode = await attempts(agent)
    assert (outcome.status, outcome.rewarded, episode.status) == ("failed", False, "failed")
    summary = attempts.served.store.episodes()[0]
    assert outcome.error == summary.error
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(outcome.error)


async def test_rewards_can_be_given_by_name_by_turn_and_by_calls_of_reward(attempts: Attempts) -> None:
    _, episode = await attempts("by_name")
    assert rewards(episode) == {"correct": 1.0, "style": 0.5} and episode.score == 1.5
    _, episode = await attempts("by_turn")
    given = {reward.target: reward.value for reward in episode.rewards}
    assert given == dict(zip([turn.id for turn in episode.turns], [0.25, 0.5], strict=True))
    _, episode = await attempts("rewards_itself")
    assert rewards(episode) == {"turn": 0.5, "return": 1.0}


async def test_an_agent_that_hangs_is_truncated_and_keeps_its_rewards(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch, reported: list[dict[str, Any]]
) -> None:
    TimeLimits(monkeypatch, lambda: reported)
    outcome, episode = await attempts("hangs")
    assert outcome == Outcome("truncated", rewarded=True)
    assert rewards(episode) == {"so far": 0.25} and len(episode.turns) == 1


async def test_an_agent_that_resists_its_cancellation_is_truncated_too(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch, reported: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr("areal_agents.rollout.agents.coroutine.CANCEL_GRACE_S", 0.1)
    TimeLimits(monkeypatch, lambda: reported)
    outcome, _ = await attempts("resists")
    assert outcome.status == "truncated"
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("episode")]


async def test_an_agent_that_hangs_before_its_first_model_call_fails(attempts: Attempts) -> None:
    outcome, _ = await attempts("hangs_before_calling", time_s=0.2)
    assert outcome == Outcome("failed", rewarded=False, error="the agent made no model call within 0.2 s")


async def test_a_worker_that_hangs_is_killed(
    attempts: Attempts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reported: list[dict[str, Any]]
) -> None:
    pid_file = tmp_path / "pid"
    TimeLimits(monkeypatch, lambda: reported and is_whole(pid_file))
    outcome, episode = await attempts("sync_hangs", {"pid_file": str(pid_file)})
    assert outcome.status == "truncated" and rewards(episode) == {"so far": 0.25}
    await gone(int(pid_file.read_text()))


def is_whole(pid_file: Path) -> bool:
    return pid_file.exists() and pid_file.read_text().endswith("\n")


async def test_reaching_a_limit_of_the_proxy_truncates_the_episode_even_if_the_agent_raises(
    attempts: Attempts,
) -> None:
    outcome, episode = await attempts("calls_until_refused", max_turns=2)
    assert outcome == Outcome("truncated", rewarded=True)
    assert len(episode.turns) == 2 and episode.score == 0.0


async def test_a_first_prompt_that_exceeds_the_limits_fails_the_episode(attempts: Attempts) -> None:
    outcome, episode = await attempts("good", context_tokens=2)
    assert outcome.error is not None
    assert "exceeds the limits of the episode; raise rollout.limits" in outcome.error
    assert episode.status == "failed" and not episode.turns


async def test_an_episode_whose_agent_gives_no_reward_stays_unrewarded(attempts: Attempts) -> None:
    outcome, episode = await attempts("unrewarded")
    assert outcome == Outcome("finished", rewarded=False)
    assert attempts.served.store.group_counts()["pending"] == 1


async def test_a_worker_serves_many_episodes(attempts: Attempts) -> None:
    agent = load_agent(f"{AGENTS}:sync_good", workers=1)
    limits = LimitsConfig()
    for index in range(3):
        place = Attempt(Task("t", {}), "train", "t@0", 3, index)
        opened = await open_attempt(attempts.client, place, limits=limits)
        assert (await run_rollout(attempts.client, agent, place.task, opened, limits=limits)).rewarded
    assert len(agent._all) == 1  # type: ignore[attr-defined]
    await agent.close()


async def test_concurrent_episodes_that_share_a_client_are_never_mixed_up(attempts: Attempts) -> None:
    done = await asyncio.gather(
        *(attempts("shares_a_client", {"text": f"I am number {number}"}) for number in range(20))
    )
    for number, (outcome, episode) in enumerate(done):
        assert outcome.status == "finished" and len(episode.turns) == 3
        said = {message.content for turn in episode.turns for message in turn.new_messages}
        assert {text for text in said if text.startswith("I am")} == {f"I am number {number}"}


COMMAND = """
    import json, os, sys, urllib.request
    from openai import OpenAI
    task = json.load(sys.stdin)
    assert task == json.loads(os.environ["AREAL_AGENTS_TASK"])
    assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]
    assert os.environ["ANTHROPIC_API_KEY"] == os.environ["OPENAI_API_KEY"]
    assert os.environ["GOOGLE_GEMINI_BASE_URL"] == os.environ["ANTHROPIC_BASE_URL"]
    assert os.environ["GEMINI_API_KEY"] == os.environ["OPENAI_API_KEY"]
    OpenAI().chat.completions.create(model="m", max_tokens=2, messages=[{"role": "user", "content": "Hi"}])
    root = os.environ["OPENAI_BASE_URL"].split("/e/")[0]
    request = urllib.request.Request(
        f"{root}/episodes/{os.environ['AREAL_AGENTS_EPISODE_ID']}/reward",
        json.dumps({"reward": task["reward"]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    urllib.request.urlopen(request)
"""


async def test_a_command_finds_its_episode_in_its_environment(attempts: Attempts, tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(textwrap.dedent(COMMAND))
    outcome, episode = await attempts({"command": f"{sys.executable} {script}"}, {"reward": 0.75})
    assert outcome == Outcome("finished", rewarded=True)
    assert rewards(episode) == {"return": 0.75} and len(episode.turns) == 1


@pytest.mark.parametrize("isolation", ["process", "bubblewrap"])
async def test_a_command_finds_its_episode_in_a_sandbox(
    attempts: Attempts, tmp_path: Path, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isolation == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed; make sandbox-tools installs it")
    monkeypatch.setenv("PASSED", "1")
    monkeypatch.setenv("WANDB_API_KEY", "a secret of the run")
    work = tmp_path / "work"
    work.mkdir()
    checks = "import os; assert 'WANDB_API_KEY' not in os.environ and os.environ['PASSED'] == '1'\n"
    (work / "agent.py").write_text(checks + textwrap.dedent(COMMAND) + "open('left', 'w').close()\n")
    command = f"{sys.executable} agent.py"
    spec = {
        "command": command,
        "isolation": isolation,
        "workdir": str(work),
        "limits": {"memory_mb": 1024},
        "pass_environment": ["PASSED"],
        "warm": 1,
    }
    outcome, episode = await attempts(spec, {"reward": 0.75})
    assert outcome == Outcome("finished", rewarded=True)
    assert rewards(episode) == {"return": 0.75} and len(episode.turns) == 1
    assert [path.name for path in work.iterdir()] == ["agent.py"]
    (work / "agent.py").write_text("x = b'x' * (2 << 30)")
    outcome, _ = await attempts(spec)
    assert outcome.error is not None and "(a process exceeded memory_mb: 1024)" in outcome.error
    (work / "agent.py").write_text("import time; time.sleep(3600)")
    outcome, _ = await attempts(spec, time_s=1.0)
    assert outcome.error == "the agent made no model call within 1 s"


class Waits:
    """An agent that waits for a place longer than its episodes may take, and then returns at once."""

    capacity = None
    must_reward = True

    async def prepare(self, task: Any, ep: Handle, time_s: float) -> None:
        await asyncio.sleep(0.3)

    async def run(self, task: Any, ep: Handle) -> float:
        return 1.0

    async def release(self, episode: str) -> None: ...

    async def close(self) -> None: ...


async def test_the_time_of_an_episode_begins_when_its_agent_has_a_place(attempts: Attempts) -> None:
    outcome, _ = await attempts(Waits(), time_s=0.2)
    assert outcome.error is not None and outcome.error.startswith("the agent made no model call; does")


async def test_the_proxy_does_not_count_the_time_of_an_agent_that_waits_for_a_place(
    attempts: Attempts,
) -> None:
    limits = LimitsConfig(time_s=0.2, max_turns=7)
    found = []
    for waits in (False, True):
        place = Attempt(Task("t", {}), "train")
        opened = await open_attempt(attempts.client, place, limits=limits, waits_for_place=waits)
        found.append(attempts.served.store.episode_row(opened.id).limits)
    assert found == [{"max_turns": 7, "time_s": 0.2}, {"max_turns": 7}]


async def test_a_command_finds_its_episode_on_a_sandbox_host(attempts: Attempts, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(textwrap.dedent(COMMAND))
    command = f"{sys.executable} agent.py"
    spec = {"command": command, "isolation": "process", "workdir": str(tmp_path), "warm": 1}
    async with sandbox_host() as address:
        agent = load_agent(spec, hosts=SandboxHosts(lambda: [address]))
        outcome, episode = await attempts(agent, {"reward": 0.75})
    assert outcome == Outcome("finished", rewarded=True)
    assert rewards(episode) == {"return": 0.75} and len(episode.turns) == 1


async def test_a_prepared_sandbox_that_is_not_used_frees_its_place() -> None:
    async with sandbox_host(places=1) as address:
        hosts = SandboxHosts(lambda: [address], place_s=10)
        agent = load_agent({"command": "true", "isolation": "process"}, hosts=hosts)
        assert isinstance(agent, WaitsForPlace)
        for episode in ("first", "second"):
            await agent.prepare({}, Handle(episode, "", ""), 60.0)
            await agent.release(episode)
        await agent.close()


async def test_a_decorated_agent_works_as_a_command(attempts: Attempts, tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    run = "asyncio.run(agents.good({'reward': 0.5}))"
    script.write_text(
        f"import asyncio, sys; sys.path.insert(0, {str(AGENTS.parent)!r})\n"
        f"import rollout_agents as agents\n{run}"
    )
    outcome, episode = await attempts({"command": f"{sys.executable} {script}"})
    assert outcome.rewarded and rewards(episode) == {"return": 0.5}


async def test_the_error_of_a_failed_command_says_why_it_failed(attempts: Attempts) -> None:
    outcome, _ = await attempts({"command": f"{sys.executable} -c \"raise SystemExit('no luck')\""})
    assert outcome.status == "failed" and outcome.error is not None
    assert outcome.error.endswith("exited with status 1: no luck")
    outcome, _ = await attempts({"command": "no-such-program"})
    assert outcome.error == "cannot start 'no-such-program': No such file or directory"


async def test_a_command_that_hangs_is_killed_with_its_children(
    attempts: Attempts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    TimeLimits(monkeypatch, lambda: is_whole(pid_file))
    outcome, _ = await attempts({"command": f"sh -c 'sleep 3600 & echo $! > {pid_file}; wait'"})
    assert outcome.status == "failed"
    await gone(int(pid_file.read_text()))


async def test_an_episode_ends_when_its_command_exits(attempts: Attempts) -> None:
    async with asyncio.timeout(30):  # half of the time that the process in the other session runs
        outcome, _ = await attempts({"command": "sh -c 'setsid sleep 60 & exit 0'"})
    assert outcome.error is not None and outcome.error.startswith("the agent made no model call;")


async def test_cancelling_leaves_the_episode_open_and_no_task_behind(attempts: Attempts) -> None:
    running = asyncio.create_task(attempts("hangs"))
    async with asyncio.timeout(30):
        while not (left := attempts.served.store.episodes(status="open")) or not left[0].turns:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running})
    assert running.cancelled()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("episode")]
    assert len(attempts.served.store.episodes(status="open")) == 1


async def test_a_second_episode_at_the_same_index_of_a_group_is_refused(attempts: Attempts) -> None:
    attempt = Attempt(Task("t", {}), "train", "t@0", 1, 0)
    await open_attempt(attempts.client, attempt, limits=LimitsConfig())
    with pytest.raises(RequestError, match="t@0") as refused:
        await open_attempt(attempts.client, attempt, limits=LimitsConfig())
    assert refused.value.status == 409


def test_a_short_outage_that_fails_many_episodes_is_tolerated(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((100.0, 100.1, 100.2, 159.9, 200.0, 230.0, 259.0, 260.0))
    monkeypatch.setattr(rollout_attempt.time, "monotonic", lambda: next(times))
    patience = FailureStreak(3, least_s=60.0)
    for _ in range(4):
        patience.note("the proxy is gone")
    patience.note(None)
    for _ in range(3):
        patience.note("the proxy is gone")
    with pytest.raises(AgentError, match="4 attempts in a row failed; the last error: the proxy is gone"):
        patience.note("the proxy is gone")
