"""The effects of a failing agent on its episode, its group and the machine, in each mode of running agents.

The run of a mode has a group for each way to fail: the first attempt of each group misbehaves (in the group
"dropped", the first two), and the others succeed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from failing_agents import FLOOD, chat
from mode_support import MODES_OF_PROGRAMS, containers, needs
from polling import until
from sandbox_cgroups import cgroups_of
from time_limits import LONGEST_S, TimeLimits

from areal_agents.client import AsyncClient
from areal_agents.process_control import RUN_MARK, end_leftovers
from areal_agents.proxy.calls import exchange
from areal_agents.proxy.episodes import housekeeping
from areal_agents.proxy.episodes.sessions import NO_MODEL_CALL
from areal_agents.rollout.config import DataConfig, RolloutConfig
from areal_agents.rollout.runner import run
from areal_agents.whole_files import write_whole

HERE = Path(__file__).parent
ADMIN_KEY = "admin-key-of-the-tests"
LIMIT_S = 150.0
RUN = f"the log of the rollout process of test process {os.getpid()}"
NO_CALL = "the agent made no model call; does its client use ep.base_url and ep.api_key?"
# The status of the attempt that misbehaves, and what its error contains; {exit} depends on the mode.
ENDS = {
    "raises": ("failed", "boom"),
    "exits": ("failed", "{exit}"),
    "hangs": ("truncated", None),
    "dropped": ("aborted", "its group no longer needs it"),
    "floods": ("finished", None),
    "forks": ("finished", None),
    "sockets": ("finished", None),
    "silent": ("failed", NO_CALL),
}
MODES: dict[str, tuple[Any, str]] = {
    "async function": (f"{HERE / 'failing_agents.py'}:as_coroutine", "the agent called sys.exit(3)"),
    "function in a worker": (f"{HERE / 'failing_agents.py'}:in_a_worker", "died (exit status 3)"),
    "node": ({"command": shlex.join(["node", str(HERE / "failing_agent.mjs")])}, "exited with status 3"),
    **dict.fromkeys(MODES_OF_PROGRAMS, (None, "exited with status 3")),
}


class LimitsOfHangs(TimeLimits):
    """The time limit of an attempt of the group "hangs" expires once that attempt is known to hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_waiting: Callable[[int], bool]) -> None:
        super().__init__(monkeypatch, lambda: False)
        self._is_waiting = is_waiting

    def timeout(self, delay_s: float) -> asyncio.Timeout:
        task = asyncio.current_task()
        group, _, index = task.get_name().rstrip("]").partition("[") if task else ("", "", "")
        if group != "hangs@0":
            return asyncio.timeout(LONGEST_S)
        return self.limit_until(lambda: self._is_waiting(int(index)))


def waiting(served: Any, group: str) -> set[int]:
    """The indexes in a group of the attempts that hang, as decided, after their only model call."""
    return {
        episode.index
        for episode in served.store.episodes(group_id=group)
        if served.store.load_episode(episode.id).turns and decided_for(served, episode.id)
    }


def decided_for(served: Any, episode: str) -> str:
    path = served.folder / "decisions" / episode
    return path.read_text() if path.exists() else ""


async def decide(served: Any, decisions: Path) -> None:
    """Write for each attempt how it misbehaves: the first attempt of each group does, or the first two."""
    decided: set[str] = set()
    left = {f"{how}@0": 2 if how == "dropped" else 1 for how in ENDS}
    while True:
        for episode in served.store.episodes(status="open"):
            if episode.id not in decided:
                decided.add(episode.id)
                misbehaves = left.get(episode.group_id, 0) > 0
                left[episode.group_id] = left.get(episode.group_id, 0) - misbehaves
                write_whole(decisions / episode.id, episode.group_id.partition("@")[0] * misbehaves)
        await asyncio.sleep(0.02)


def connections(url: str) -> tuple[int, int]:
    """Count the open connections in this process at the side of a proxy, and at the side of its clients."""
    port = int(url.rsplit(":", 1)[1])
    found = [each for each in psutil.Process().net_connections("tcp") if each.raddr]
    return sum(each.laddr.port == port for each in found), sum(each.raddr.port == port for each in found)


def sleeping(nap: str) -> bool:
    """Whether a process of this machine, in a sandbox or not, runs `sleep` for this time."""
    return any(
        found.info["cmdline"] == ["sleep", nap] and found.info["status"] != psutil.STATUS_ZOMBIE
        for found in psutil.process_iter(["cmdline", "status"])
    )


@pytest.mark.usefixtures("slurm_programs", "kubernetes_programs")
@pytest.mark.parametrize("mode", MODES)
async def test_an_agent_that_fails_in_any_way_leaves_nothing_behind(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    needs(mode)
    agent, exit_error = MODES[mode]
    decisions, temporary = scripted.folder / "decisions", scripted.folder / "temporary"
    decisions.mkdir()
    temporary.mkdir()
    if agent is None:
        agent = MODES_OF_PROGRAMS[mode](HERE / "failing_agents.py", scripted.folder, decisions)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv(RUN_MARK, RUN)
    LimitsOfHangs(monkeypatch, lambda index: index in waiting(scripted, "hangs@0"))
    nap = str(time.time_ns() % 10**9 + 10**9)  # seconds for which no other process sleeps
    tasks = scripted.folder / "tasks.jsonl"
    rows = [{"id": how, "decisions": str(decisions), "nap": nap} for how in ENDS]
    tasks.write_text("\n".join(map(json.dumps, rows)))
    children = psutil.Process().children(recursive=True)
    owners: list[str] = []

    async def drop() -> None:
        await until(lambda: len(waiting(scripted, "dropped@0")) == 2)
        owners.extend(path.name for path in temporary.glob("areal-agents-sandboxes-*/*"))
        assert bool(owners) == mode.endswith((" in process", " in bubblewrap"))
        assert bool(containers()) == mode.endswith(" in docker")
        async with AsyncClient(scripted.url, ADMIN_KEY) as client:
            await client.drop_group("dropped@0", "by hand")

    def are_ended(_step: int) -> bool:  # whether the dropped group's agents have ended
        left = scripted.store.episodes(group_id="dropped@0")
        return len(left) == 2 and all(found.status != "open" for found in left)

    groups = len(ENDS)
    config = RolloutConfig(groups=groups, group_size=2, concurrency=2 * groups, workers=5, max_staleness=0)
    async with (
        asyncio.timeout(LIMIT_S),
        scripted.trainer(groups=groups, steps=1, may_train=are_ended),
        asyncio.TaskGroup() as beside,
    ):
        deciding = beside.create_task(decide(scripted, decisions))
        dropping = beside.create_task(drop())
        await run(
            store=scripted.store,
            proxy_url=scripted.url,
            admin_key=ADMIN_KEY,
            agent=agent,
            data=DataConfig(path=str(tasks)),
            rollout=config,
            evaluation=None,
            steps=1,
            logs=scripted.folder / "logs",
        )
        await dropping
        deciding.cancel()

    for how, (status, error) in ENDS.items():
        check_group(scripted, how, status, error and error.format(exit=exit_error))
    # A group of the second epoch replaces the dropped one.
    assert scripted.store.group_counts()["trained"] == groups
    assert not scripted.store.episodes(status="open")
    # If an agent may wait for a place, only the runner enforces the time limit.
    episodes = [scripted.store.episode_row(found.id) for found in scripted.store.episodes()]
    is_limited = {"time_s" in episode.limits for episode in episodes}
    assert is_limited == {mode in ("async function", "function in a worker", "node", "command")}

    if mode == "async function":  # its children are ended with the rollout process
        assert sleeping(nap)
        end_leftovers(RUN_MARK, RUN)
    await until(lambda: not sleeping(nap))
    left = [found for found in psutil.Process().children(recursive=True) if found not in children]
    assert not [found for found in left if found.status() != psutil.STATUS_ZOMBIE]
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("episode")]
    # The common folder of the sandboxes of all owners stays.
    assert not [path for path in temporary.rglob("*") if not path.name.startswith("areal-agents-sandboxes-")]
    assert not [found for owner in owners for found in cgroups_of(owner)]
    assert not containers()
    # The proxy closes the connections that an agent leaves open. The clients' ends of an async function's
    # connections stay open until the rollout process exits.
    of_agents = 1000 if mode == "async function" else 0
    await until(lambda: connections(scripted.url) <= (0, of_agents))
    assert generations(scripted) == 0


class Clock:
    """Replaces the module `time` where the proxy compares times with its limits: the test sets it forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (exchange, housekeeping):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(housekeeping, "_SWEEP_S", 0.1)
    return clock


OUTSIDE = {
    "raises": ("failed", "boom"),
    "exits": ("failed", "idle for"),
    "hangs": ("truncated", None),
    "dropped": ("aborted", "by hand"),
    "floods": ("finished", None),
    "sockets": ("finished", None),
    "silent": ("failed", NO_MODEL_CALL),
}


@pytest.mark.parametrize("how", OUTSIDE)
async def test_a_program_outside_of_the_run_that_fails_leaves_nothing_open(
    serve_scripted: Any, clock: Clock, how: str
) -> None:
    """The program uses HTTP. The proxy can end its episodes and its streams, but not the program."""
    with serve_scripted(idle_timeout_s=3600.0) as served:
        async with AsyncClient(served.url, ADMIN_KEY) as client:
            await fail_outside(client, served, clock, how)
        assert not served.store.episodes(status="open")
        assert served.store.group_counts()["dropped" if how == "dropped" else "complete"] == 1
        await until(lambda: connections(served.url) == (0, 0))


async def fail_outside(client: AsyncClient, served: Any, clock: Clock, how: str) -> None:
    """Play a group of two, the first episode of which fails; check its end, and complete the group."""
    group = f"{how}@0"

    async def opened(index: int, **limits: float) -> Any:
        return await client.open_episode({"id": how}, group=group, group_size=2, index=index, limits=limits)

    async def ask(episode: Any, text: str = "Hi") -> int:
        response = await http.post(
            f"{episode.base_url}/chat/completions", json=chat(text), headers=key_of(episode)
        )
        return response.status_code

    def key_of(episode: Any) -> dict[str, str]:
        return {"Authorization": f"Bearer {episode.api_key}"}

    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S, limits=httpx.Limits()) as http:
        episode = await opened(0, **({"time_s": 600.0} if how == "hangs" else {}))
        status, error = OUTSIDE[how]
        if how != "silent":
            assert await ask(episode) == 200
        if how == "raises":
            await client.fail(episode.id, "boom")
        elif how == "silent":
            assert (await client.finish(episode.id, rewards=[{"reward": 1.0}]))["status"] == "failed"
        elif how == "exits":  # it makes no further request
            clock.ahead_s = 4000.0
            await until(lambda: served.store.episode_row(episode.id).status != "open")
            clock.ahead_s = 0.0
        elif how == "hangs":  # it calls the model again after its time limit
            assert await ask(episode) == 200
            clock.ahead_s = 1000.0
            assert await ask(episode) != 200
            await client.finish(episode.id)
        elif how == "dropped":
            await client.drop_group(group, "by hand")
            await client.fail(episode.id, "by hand", aborted=True)
        elif how == "floods":
            assert set(await asyncio.gather(*(ask(episode, f"Call {n}") for n in range(FLOOD)))) == {200}
        elif how == "sockets":
            body = chat("slowly", stream=True)
            stream = http.stream(
                "POST", f"{episode.base_url}/chat/completions", json=body, headers=key_of(episode)
            )
            response = await stream.__aenter__()
            await anext(response.aiter_bytes())
            assert generations(served) == 1
        if status == "finished":
            await client.finish(episode.id, rewards=[{"reward": 1.0}])
        assert generations(served) == 0
        assert await ask(episode) == 409  # it is sealed
        if how != "dropped":
            for index in (0, 1) if status == "failed" else (1,):
                other = await opened(index)
                assert await ask(other) == 200
                await client.finish(other.id, rewards=[{"reward": 1.0}])
    found = served.store.episodes(group_id=group)[0]
    assert found.status == status
    assert found.error == error or (found.error or "").startswith(error or ".")


def generations(served: Any) -> int:
    """The number of generations that run in the engine."""
    with httpx.Client(trust_env=False) as http:
        return http.get(f"{served.engine_url}/server_info").json()["running"]


def check_group(served: Any, how: str, status: str, error: str | None) -> None:
    """Check that one or two attempts of a group misbehaved as expected, and that the others succeeded."""
    attempts = served.store.episodes(group_id=f"{how}@0")
    if how == "dropped":
        assert [(found.status, found.error) for found in attempts] == [(status, error)] * 2
        return
    live = [found for found in attempts if found.status in ("finished", "truncated")]
    assert len(live) == 2 and all(found.score is not None for found in live), attempts
    if status == "failed":
        (failed,) = [(found.status, found.error) for found in attempts if found not in live]
        assert failed[0] == status and error in failed[1], failed
        return
    assert len(attempts) == 2
    turns = sorted(len(served.store.load_episode(found.id).turns) for found in attempts)
    if how == "floods":
        assert turns == [1, FLOOD + 1]
    if status == "truncated":
        (cut,) = [found for found in attempts if found.status == status]
        assert cut.score == 0.25
