"""Evaluations of an endpoint: a real OpenAI-compatible server takes the place of the policy."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from scripted_sampler import ScriptedSampler
from typer.testing import CliRunner

from areal_agents.cli import app
from areal_agents.core.rollout import Task
from areal_agents.errors import ConfigError, DataError
from areal_agents.evaluation.endpoint.journal import JOURNAL
from areal_agents.evaluation.endpoint.play import Endpoint, journal_of, play
from areal_agents.evaluation.played import played_in_journal
from areal_agents.rendering import ChatRenderer, Tokenizer
from areal_agents.rollout.config import DataConfig, EvalConfig, LimitsConfig, RewardConfig, RolloutConfig
from areal_agents.store import Store

sys.path.insert(0, str(Path(__file__).parents[1] / "proxy"))
from proxy_support import MODEL, RunningProxy, running_proxy  # noqa: E402

AGENTS = Path(__file__).parent / "endpoint_agents.py"
TASKS = [Task(f"t{n}", {"question": f"What is {n}?"}) for n in range(3)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    """A proxy, used as a server with chat completions; it always replies Lyon."""
    engine = ScriptedSampler(ChatRenderer.from_folder(MODEL))
    engine.script = lambda call: "Lyon"
    with running_proxy(tmp_path_factory.mktemp("server") / "store.db", engine) as proxy:
        yield proxy


async def played(server: RunningProxy, folder: Path, agent: str, tasks: list[Task], **changes: Any) -> None:
    evaluation = EvalConfig(data=DataConfig(path="unused"), attempts=2, temperature=1.0, concurrency=4)
    arguments = {
        "model": MODEL,
        "agent": f"{AGENTS}:{agent}",
        "rollout": RolloutConfig(retries=0),
        "evaluation": evaluation,
        "reward": None,
        "seed": 0,
        "logs": folder,
    }
    url = changes.pop("url", server.url)
    endpoint = Endpoint(f"{url}/v1", "some-model", changes.pop("key_variable", ""))
    await play(endpoint, folder, tasks, **{**arguments, **changes})


async def test_attempts_are_recorded_and_an_evaluation_continues(
    server: RunningProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "admin")
    await played(server, tmp_path, "agent", TASKS[:1], key_variable="SERVER_KEY")
    before = (tmp_path / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(before + b'{"task": {"id": "t2"')  # the process was killed while writing
    await played(server, tmp_path, "agent", TASKS, key_variable="SERVER_KEY")
    assert (tmp_path / JOURNAL).read_bytes().startswith(before)
    latest = journal_of(tmp_path).latest
    assert sorted(latest) == [(f"t{n}", k) for n in range(3) for k in range(2)]
    for entry in latest.values():
        result = entry.result
        assert (result.status, result.score, result.turns) == ("finished", 1.0, 2)
        assert result.sampled_tokens > 0 and result.prompt_tokens > result.sampled_tokens
        episode = entry.finished()
        assert [m["content"] for m in episode.messages] == [
            entry.task["input"]["question"],
            "Lyon",
            "Sure?",
            "Lyon",
        ]
        assert len(episode.branches) == 1
    with played_in_journal(tmp_path / JOURNAL) as found:
        assert found.is_complete(TASKS, 2) and not found.is_complete(TASKS, 3)
        assert [task.id for task in found.results(TASKS, 2, answers={}, by={})] == ["t0", "t1", "t2"]


def test_episodes_of_an_endpoint_can_be_imported_for_training(server: RunningProxy, tmp_path: Path) -> None:
    """Each reply is imported once, in the tokens of the trained model, with the tools of its request."""
    asyncio.run(played(server, tmp_path, "branching_agent", TASKS, split="train"))
    with open(tmp_path / JOURNAL, "ab") as file:
        file.write(b'{"task": {"id": "t0"')  # another entry is being written
    config = {"model": str(MODEL), "proxy": {"template_options": {"enable_thinking": False}}}
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    command = ["episodes", "import", str(tmp_path), "--config", str(tmp_path / "c.yaml"), "--into"]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "s.db"), "--min-reward", "1"])
    assert done.exit_code == 0, done.output
    assert "imported 12 conversations" in done.stdout and "left out 2 episodes" in done.stderr
    with Store.open(tmp_path / "s.db") as store:
        episodes = store.load_episodes([found.id for found in store.episodes(split="train")])
        with pytest.raises(DataError, match="4 of these episodes have been imported"):
            CliRunner().invoke(app, [*command, str(tmp_path / "s.db")], catch_exceptions=False)
    assert sorted(episode.score or 0 for episode in episodes) == [1, 1, 2, 2]
    tokenizer = Tokenizer.from_folder(MODEL)
    for episode in episodes:
        assert [turn.discarded for turn in episode.turns] == ["", "", "", "a message of the request", ""]
        assert {tokenizer.decode(t.completion.token_ids) for t in episode.turns} == {"Lyon<|im_end|>"}
        first, *_, with_open = episode.turns
        assert [turn.parent for turn in episode.turns[1:3]] == [first.id] * 2
        assert "open" in tokenizer.decode(episode.forest.prompt_ids(with_open.id))
        assert "open" not in tokenizer.decode(episode.forest.prompt_ids(first.id))


def test_episodes_of_an_evaluation_are_imported_only_on_request(server: RunningProxy, tmp_path: Path) -> None:
    asyncio.run(played(server, tmp_path, "asks_once", TASKS[:1]))
    command = ["episodes", "import", str(tmp_path), "--model", str(MODEL), "--into", str(tmp_path / "s.db")]
    with pytest.raises(DataError, match="all 2 conversations are of held-out tasks"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert CliRunner().invoke(app, [*command, "--held-out"]).exit_code == 0


async def test_limits_and_reward_functions_are_those_of_a_run(server: RunningProxy, tmp_path: Path) -> None:
    limits = RolloutConfig(retries=0, limits=LimitsConfig(max_turns=1))
    reward = RewardConfig(episode=f"{AGENTS}:told")
    await played(server, tmp_path, "agent", TASKS[:1], rollout=limits, reward=reward)
    results = [entry.result for entry in journal_of(tmp_path).latest.values()]
    assert [(r.status, r.turns, r.score) for r in results] == [("truncated", 1, 2.0)] * 2


async def test_another_api_fails_with_the_reason(server: RunningProxy, tmp_path: Path) -> None:
    await played(server, tmp_path, "responses_agent", TASKS[:1])
    results = [entry.result for entry in journal_of(tmp_path).latest.values()]
    assert all(r.status == "failed" and "chat completions only" in (r.error or "") for r in results)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"<html>log in</html>", "failed"),
        (b'{"choices": []}', "failed"),
        (b'{"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": "many"}}', "failed"),
        (b'{"choices": [{"message": {"role": "assistant", "content": "a\\ud800"}}]}', "finished"),
    ],
)
async def test_a_response_that_is_not_a_chat_completion_is_shown_and_any_reply_is_kept(
    server: RunningProxy, tmp_path: Path, answer: bytes, status: str
) -> None:
    with answering(answer) as url:
        await played(server, tmp_path, "asks_once", TASKS[:1], url=url)
    results = [entry.result for entry in journal_of(tmp_path).latest.values()]
    assert [result.status for result in results] == [status] * 2
    if status == "failed":
        assert all("answer is not a chat completion" in (result.error or "") for result in results)


@pytest.mark.parametrize("agent", ["asks_thrice", "streams_thrice"])
async def test_tokens_that_are_not_reported_are_estimated_and_limited(
    server: RunningProxy, tmp_path: Path, agent: str, caplog: pytest.LogCaptureFixture
) -> None:
    reply = "one two three four five"
    count = len(Tokenizer.from_folder(MODEL).encode(reply))
    limits = RolloutConfig(retries=0, limits=LimitsConfig(max_tokens=count + 1))
    whole = json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]})
    chunk = {"choices": [{"index": 0, "delta": {"content": reply}, "finish_reason": "stop"}]}
    answer = whole if agent == "asks_thrice" else f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    with answering(answer.encode()) as url:
        await played(server, tmp_path, agent, TASKS[:1], url=url, rollout=limits)
        results = [entry.result for entry in journal_of(tmp_path).latest.values()]
        assert [(r.status, r.turns, r.sampled_tokens) for r in results] == [("truncated", 2, 2 * count)] * 2
        assert all(result.tokens_estimated and result.prompt_tokens > 0 for result in results)
        assert sum("reports no usage" in record.message for record in caplog.records) == 1
        (tmp_path / "none").mkdir()
        with pytest.raises(ExceptionGroup) as raised:
            await played(server, tmp_path / "none", agent, TASKS[:1], url=url, model=tmp_path)
    assert raised.group_contains(
        ConfigError, match="no usage, and its tokens cannot be estimated: .* tokenizer"
    )


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (
            b"data: {}\n\ndata: upstream timed out\n\n",
            "it has a line that is not a chunk of a chat completion: 'upstream timed out'",
        ),
        (b"data: [1]\n\n", "it has a line that is not a chunk of a chat completion: '[1]'"),
        (b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n', "it ended before the reply did"),
        (
            b'data: {"usage": {"prompt_tokens": "x"}}\n\ndata: [DONE]\n\n',
            "its usage has no token counts",
        ),
    ],
)
async def test_a_stream_that_cannot_be_read_ends_with_the_reason(
    server: RunningProxy, tmp_path: Path, stream: bytes, reason: str
) -> None:
    with answering(stream) as url:
        await played(server, tmp_path, "streams_thrice", TASKS[:1], url=url)
    results = [entry.result for entry in journal_of(tmp_path).latest.values()]
    assert all(r.status == "failed" and f"stream cannot be read: {reason}" in str(r.error) for r in results)


async def test_a_stream_that_breaks_ends_with_the_reason(server: RunningProxy, tmp_path: Path) -> None:
    chunk = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    with answering(chunk, length=len(chunk) + 100) as url:
        await played(server, tmp_path, "streams_thrice", TASKS[:1], url=url)
    results = [entry.result for entry in journal_of(tmp_path).latest.values()]
    assert all(r.status == "failed" and "stream cannot be read: peer closed" in str(r.error) for r in results)


@contextmanager
def answering(answer: bytes, length: int | None = None) -> Iterator[str]:
    """Run a server that sends `answer` to every request, with a content length of `length`; yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", str(length or len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


async def test_an_endpoint_that_refuses_the_key_ends_the_evaluation(
    server: RunningProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="the environment has no SERVER_KEY"):
        await played(server, tmp_path, "agent", TASKS, key_variable="SERVER_KEY")
    monkeypatch.setenv("SERVER_KEY", "ep-wrong")
    with pytest.raises(ExceptionGroup) as raised:
        await played(server, tmp_path, "agent", TASKS, key_variable="SERVER_KEY")
    assert raised.group_contains(ConfigError, match="refuses the calls: 401")


def test_an_endpoint_must_be_a_url() -> None:
    with pytest.raises(ConfigError, match="--endpoint must be a URL"):
        Endpoint("localhost:8000/v1", "m")
