"""`areal-agents serve --workers 2` under kill -9, agents that call it continuously, and counts of the losses.

The agents record the replies and the acknowledgements that they receive. When the last agent has ended,
`count` compares their notes with the store, and the store with what the engine sampled.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from chaos_run_support import MODEL
from openai import APIConnectionError, APIStatusError, OpenAI

from areal_agents.core.rollout import RecordedEpisode
from areal_agents.core.trajectory import Turn
from areal_agents.store import Store
from areal_agents.testing import ScriptedApp, ScriptedCall, ScriptedReply, ServedCall

PROXY_ROLES = ("worker", "supervisor")
TRIES = 14  # attempts of each call; with the pauses of the OpenAI client they take about 90 s
TURNS = 3
STOP_S = 30.0
_MARK = "CHAOS_PROXY"
_WORKER = b"areal_agents.proxy.workers.process"


class Talkative:
    """A script in which every reply is different, so that a reply identifies its sample."""

    def __init__(self) -> None:
        self._samples = itertools.count()

    def __call__(self, call: ScriptedCall) -> ScriptedReply:
        number = next(self._samples)
        return ScriptedReply(
            f"sample {number} of the harbour", delay_s=0.1 + number % 7 / 10, chunk_delay_s=0.01
        )


@dataclass(slots=True)
class ChaosProxy:
    """A proxy with two workers, which keeps its port and its store when it is restarted.

    Attributes:
        deaths: the roles killed so far.
        failures: exit codes of supervisors that ended without being killed.
    """

    root: Path
    engine_url: str
    port: int
    deaths: list[str] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    _supervisor: subprocess.Popen[bytes] | None = None

    @property
    def store(self) -> Path:
        """The store's file."""
        return self.root / "store.db"

    @property
    def output(self) -> Path:
        """The file with the output of all processes."""
        return self.root / "output.txt"

    @property
    def url(self) -> str:
        """The URL, which stays the same across restarts."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def serves(self) -> bool:
        """Whether the proxy answers."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=2).is_success
        return False

    def see_to(self) -> None:
        """Start the supervisor if it is not running, as a service manager does."""
        if self._supervisor is not None and (code := self._supervisor.poll()) is None:
            return
        if self._supervisor is not None and code != -signal.SIGKILL:
            self.failures.append(code)
        self.root.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "areal_agents.cli", "serve", "--model", str(MODEL), "--workers", "2"]
        command += ["--port", str(self.port), "--engine-url", self.engine_url, "--store", str(self.store)]
        command += ["reasoning=keep"]  # so that an episode is one trajectory
        with open(self.output, "ab") as output:
            environment = {**os.environ, _MARK: str(self.root)}
            self._supervisor = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def kill(self, role: str, rng: random.Random) -> bool:
        """Send SIGKILL to one process of a role; return whether there was one that had not ended yet."""
        assert self._supervisor is not None
        if role == "supervisor":
            self._supervisor.kill()
            self._supervisor.wait()
        else:
            found = [process for process in self.processes() if _WORKER in _read(process, "cmdline")]
            if not found:
                return False
            try:
                os.kill(rng.choice(found), signal.SIGKILL)
            except ProcessLookupError:  # it has ended since it was found
                return False
        self.deaths.append(role)
        return True

    def processes(self) -> list[int]:
        """Return the ids of all processes of this proxy, across all restarts."""
        mark = f"{_MARK}={self.root}".encode()
        found = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return [process for process in found if mark in _read(process, "environ").split(b"\0")]

    def end(self) -> int:
        """Send SIGTERM to the supervisor and return its exit code; `processes` finds what is left."""
        assert self._supervisor is not None
        self._supervisor.terminate()
        return self._supervisor.wait(STOP_S)

    def destroy(self) -> None:
        """Kill all processes of this proxy."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self._supervisor is not None:
            self._supervisor.wait()


@dataclass(frozen=True, slots=True)
class Noted:
    """The replies and acknowledgements that an agent received for one episode.

    Attributes:
        replies: completion id → text, in order; rewards: the acknowledged rewards by name.
        is_finished: whether the end of the episode was acknowledged.
    """

    id: str
    replies: dict[str, str]
    rewards: dict[str, float]
    is_finished: bool


class Unanswered(Exception):
    """A call got no response within its attempts."""


class Refused(Exception):
    """A valid call was refused."""


@dataclass(slots=True)
class Agents:
    """Agents that play episodes one after another, each agent in its own thread.

    Attributes:
        is_over: set when no more episodes are to be opened.
        notes: one entry for each opened episode; retries: number of requests that were repeated.
        never_answered, refused: descriptions of the calls that failed in this way and ended an episode.
    """

    url: str
    is_over: threading.Event = field(default_factory=threading.Event)
    notes: list[Noted] = field(default_factory=list)
    retries: int = 0
    never_answered: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def play(self, number: int) -> None:
        """Run one agent. Its connections are shared by all its episodes."""
        with httpx.Client(timeout=60) as http:
            for count in itertools.count():
                if self.is_over.is_set():
                    return
                try:
                    self._episode(http, f"agent {number}, episode {count}")
                except Unanswered as error:
                    self.never_answered.append(str(error))
                except Refused as error:
                    self.refused.append(str(error))

    def _episode(self, http: httpx.Client, task: str) -> None:
        opened = self._post(http, "/episodes", {"task": {"id": task}})
        replies: dict[str, str] = {}
        rewards: dict[str, float] = {}
        is_finished = False
        try:
            client = OpenAI(
                base_url=opened["base_url"], api_key=opened["key"], max_retries=TRIES - 1, http_client=http
            )
            messages: list[Any] = [{"role": "user", "content": task}]
            for turn in range(TURNS):
                completion_id, text = self._ask(client, messages)
                replies[completion_id] = text
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{turn}?"}]
                given = {"reward": turn / 7, "name": f"turn {turn}"}
                self._post(http, f"/episodes/{opened['id']}/reward", given)
                rewards[f"turn {turn}"] = turn / 7
            self._post(http, f"/episodes/{opened['id']}/finish", {})
            is_finished = True
        finally:
            self.notes.append(Noted(opened["id"], replies, rewards, is_finished))

    def _ask(self, client: OpenAI, messages: Sequence[Any]) -> tuple[str, str]:
        try:
            raw = client.chat.completions.with_raw_response.create(model="policy", messages=list(messages))
        except APIConnectionError as error:
            raise Unanswered(f"{client.base_url}: {error.__cause__!r}") from error
        except APIStatusError as error:
            kind = Unanswered if error.status_code >= 429 else Refused
            raise kind(f"{client.base_url}: {error}") from error
        self.retries += raw.retries_taken
        answer = raw.parse()
        return answer.id, answer.choices[0].message.content or ""

    def _post(self, http: httpx.Client, path: str, body: Mapping[str, Any]) -> Any:
        said = ""
        for attempt in range(TRIES):
            try:
                answer = http.post(self.url + path, json=body)
            except httpx.TransportError as error:
                said = repr(error)
            else:
                if answer.is_success:
                    return answer.json()
                said = f"{answer.status_code} {answer.text}"
                if answer.status_code < 429:
                    raise Refused(f"{path}: {said}")
            self.retries += 1
            time.sleep(min(8.0, 0.5 * 2**attempt))
        raise Unanswered(f"{path}: {said}")


@dataclass(frozen=True, slots=True)
class ProxyCounts:
    """The damage of the kills; `faults` has the counts that must be 0 and are not.

    Attributes:
        deaths: number of kills by role; retries: number of requests that agents repeated.
        replies, rewards: number of replies that were received, and of rewards that were acknowledged.
        replies_lost: replies that the store does not have, or has with another content.
        turns_duplicated: recorded turns of finished episodes that answer no call.
        turns_forked: turns that do not continue the previous turn.
        turns_not_sampled: turns whose exact prompt and tokens are those of no generation of the engine.
        supervisor_failures: supervisors that ended without being killed.
    """

    deaths: dict[str, int]
    episodes: int
    replies: int
    rewards: int
    retries: int
    never_answered: int
    refused: int
    replies_lost: int
    rewards_lost: int
    episodes_not_finished: int
    turns_duplicated: int
    turns_forked: int
    turns_not_sampled: int
    supervisor_failures: int
    processes_left: int

    @property
    def faults(self) -> dict[str, int]:
        """The counts that must be 0 and are not."""
        names = (
            "never_answered", "refused", "replies_lost", "rewards_lost", "episodes_not_finished",
            "turns_duplicated", "turns_forked", "turns_not_sampled", "supervisor_failures", "processes_left",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names if getattr(self, name)}


def count(proxy: ChaosProxy, agents: Agents, exchanges: Sequence[ServedCall]) -> ProxyCounts:
    """Compare the agents' notes, the store and the engine's calls. The proxy and the agents have ended."""
    sampled = {(tuple(int(i) for i in exchange.input_ids), exchange.token_ids) for exchange in exchanges}
    found: Counter[str] = Counter()
    with Store.open(proxy.store) as store:
        for noted in agents.notes:
            found += _compared(noted, store.load_episode(noted.id), sampled)
    return ProxyCounts(
        deaths=dict(Counter(proxy.deaths)),
        episodes=len(agents.notes),
        replies=sum(len(noted.replies) for noted in agents.notes),
        rewards=sum(len(noted.rewards) for noted in agents.notes),
        retries=agents.retries,
        never_answered=len(agents.never_answered),
        refused=len(agents.refused),
        replies_lost=found["replies_lost"],
        rewards_lost=found["rewards_lost"],
        episodes_not_finished=found["episodes_not_finished"],
        turns_duplicated=found["turns_duplicated"],
        turns_forked=found["turns_forked"],
        turns_not_sampled=found["turns_not_sampled"],
        supervisor_failures=len(proxy.failures),
        processes_left=len(proxy.processes()),
    )


def _compared(
    noted: Noted, episode: RecordedEpisode, sampled: set[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Counter[str]:
    turns = {turn.id: turn for turn in episode.turns}
    held = {(reward.scope, reward.name): reward.value for reward in episode.rewards}
    parents = [None, *turns][: len(turns)]
    return Counter(
        replies_lost=sum(
            turn_id not in turns or turns[turn_id].reply.content != text
            for turn_id, text in noted.replies.items()
        ),
        rewards_lost=sum(held.get(("episode", name)) != value for name, value in noted.rewards.items()),
        episodes_not_finished=int(noted.is_finished and episode.status != "finished"),
        turns_duplicated=len(turns.keys() - noted.replies.keys()) if noted.is_finished else 0,
        turns_forked=sum(turn.parent != parent for turn, parent in zip(episode.turns, parents, strict=True)),
        turns_not_sampled=sum(_exchange(turn, turns) not in sampled for turn in episode.turns),
    )


def _exchange(turn: Turn, turns: Mapping[str, Turn]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the exact prompt and the exact sampled tokens of a turn."""
    pieces, node = [turn.new_prompt_ids], turn
    while node.parent is not None:
        node = turns[node.parent]
        pieces += [node.completion.token_ids, node.new_prompt_ids]
    prompt = tuple(int(i) for piece in reversed(pieces) for i in piece)
    return prompt, tuple(int(i) for i in turn.completion.token_ids)


def scripted_engine() -> ScriptedApp:
    """Return an engine that records every request, and never sends the same reply twice."""
    return ScriptedApp.from_folder(MODEL, Talkative())


def _read(process: int, name: str) -> bytes:
    try:
        return (Path("/proc") / str(process) / name).read_bytes()
    except OSError:  # the process has ended
        return b""
