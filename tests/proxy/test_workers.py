"""Several proxy processes on one store: whichever process a request reaches, its episode continues."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from proxy_support import MODEL, SEARCH
from relay_support import relay_to
from websockets.exceptions import InvalidStatus
from workers_support import Serving, is_running, wait_for, workers_of

from areal_agents.inference.ports import reserved_ports
from areal_agents.sockets import listen
from areal_agents.store import Store
from areal_agents.testing import ScriptedApp, ScriptedCall, ScriptedReply, running

SLOW = "take your time"


class Script:
    """Sends the chunks of a slow call a minute apart, or at once if it `hurries`; counts slow calls."""

    def __init__(self) -> None:
        self.slow_calls = 0
        self.hurries = False

    def __call__(self, call: ScriptedCall) -> ScriptedReply | str:
        if SLOW not in call.last_text:
            return "the harbour opens at six"
        self.slow_calls += 1
        return ScriptedReply("one two three four five", chunk_delay_s=0.0 if self.hurries else 60.0)


@dataclass
class Engine:
    """A scripted engine that serves."""

    app: ScriptedApp
    script: Script
    url: str


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    script = Script()
    app = ScriptedApp.from_folder(MODEL, script)
    with running(app) as url:
        yield Engine(app, script, url)


@pytest.fixture(scope="module")
def serving(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    started = Serving(engine.url, tmp_path_factory.mktemp("workers") / "store.db")
    try:
        yield started
    finally:
        assert started.end() == 0


def open_episode(url: str, **body: Any) -> dict[str, Any]:
    return httpx.post(f"{url}/episodes", json=body, timeout=60).raise_for_status().json()


def open_on(serving: Serving, index: int) -> dict[str, Any]:
    """Open an episode that a given worker owns."""
    for _ in range(20):
        opened = open_episode(serving.url)
        if worker_of(serving, opened) == index:
            return opened
    raise AssertionError("no episode fell to that worker")


def worker_of(serving: Serving, opened: dict[str, Any]) -> int:
    """Return the index of the worker that owns an episode."""
    with Store.open(serving.store) as store:
        return int(str(store.episode_row(opened["id"]).owner).split(".")[1])


def user(text: str) -> dict[str, str]:
    """Return a user's message."""
    return {"role": "user", "content": text}


class Talk:
    """A conversation that can be sent to any URL; the replies are appended to it."""

    def __init__(self, key: str = "", headers: dict[str, str] | None = None, first: str = "hello") -> None:
        self.path = f"/e/{key}/v1" if key else "/v1"
        self.headers = headers or {}
        self.messages: list[Any] = [{"role": "user", "content": first}]
        self.ids: list[str] = []

    def say(self, url: str) -> None:
        """Add one more turn, on a connection of its own."""
        answer = httpx.post(
            f"{url}{self.path}/chat/completions",
            json={"model": "p", "messages": self.messages, "tools": [SEARCH]},
            headers=self.headers,
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        body = answer.json()
        self.ids.append(body["id"])
        result = {
            "role": "tool",
            "content": f"result {len(self.ids)}",
        }  # after it, the template keeps the earlier messages
        self.messages += [body["choices"][0]["message"], result]


def check_exact(serving: Serving, episode_id: str, ids: Sequence[str]) -> None:
    """Check that the turns are one trajectory: each prompt begins with the earlier prompt and reply."""
    shown = httpx.get(f"{serving.url}/episodes/{episode_id}", params={"tokens": 1}, timeout=60).json()
    assert [turn["id"] for turn in shown["turns"]] == list(ids)
    assert [turn["parent"] for turn in shown["turns"]] == [None, *ids[:-1]]
    assert [turn["recorded_before"] for turn in shown["turns"]] == list(range(len(ids)))
    for earlier, later in zip(shown["turns"], shown["turns"][1:], strict=False):
        context = earlier["prompt_ids"] + earlier["token_ids"]
        assert later["prompt_ids"][: len(context)] == context


def test_no_worker_reads_the_body_of_a_cross_origin_request(serving: Serving) -> None:
    """Whichever worker accepts the connection answers at once, without waiting for the body."""
    address = urlsplit(serving.url)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
        "Origin: https://evil.example\r\nContent-Length: 100\r\n\r\n"
    )
    for _ in range(8):
        with socket.create_connection(
            (str(address.hostname), int(address.port or 0)), timeout=60
        ) as connection:
            connection.sendall(head.encode())
            assert connection.recv(4096).startswith(b"HTTP/1.1 403 ")


def test_the_workers_share_the_episodes(serving: Serving) -> None:
    with httpx.Client(base_url=serving.url, timeout=60) as client:
        opened = [client.post("/episodes", json={}).json() for _ in range(6)]
    assert sorted(worker_of(serving, item) for item in opened) == [0, 0, 0, 1, 1, 1]
    for item in opened:  # no URL names a worker
        root = f"{serving.url}/e/{item['key']}"
        assert item["base_url"] == f"{root}/v1"
        assert item["base_urls"] == {"openai": f"{root}/v1", "anthropic": root, "google": root}


def test_a_call_reaches_the_owner_of_its_episode_through_any_worker(serving: Serving) -> None:
    opened = open_on(serving, 0)
    talk = Talk(opened["key"])
    with Store.open(serving.store) as store:
        owner = store.episode_row(opened["id"]).owner
        for url in (serving.own[0], serving.own[1], serving.url, serving.url, serving.own[1]):
            talk.say(url)
        assert store.episode_row(opened["id"]).owner == owner and owner is not None
    check_exact(serving, opened["id"], talk.ids)
    models = httpx.get(f"{serving.own[1]}/e/{opened['key']}/v1/models", timeout=60)
    assert models.status_code == 200


def metrics_of(url: str) -> dict[str, float]:
    """Return the samples of /metrics, by name and labels. A 503, because a worker is too slow, is retried."""
    answers: list[httpx.Response] = []

    def is_whole() -> bool:
        answers.append(httpx.get(f"{url}/metrics", timeout=60))
        return answers[-1].status_code != 503

    wait_for(is_whole)
    families = text_string_to_metric_families(answers[-1].raise_for_status().text)
    return {
        f"{sample.name} {sorted(sample.labels.items())}": sample.value
        for family in families
        for sample in family.samples
    }


def test_every_worker_returns_the_metrics_of_all_workers(serving: Serving) -> None:
    before = metrics_of(serving.url)
    talks = [Talk(open_on(serving, index)["key"]) for index in (0, 1, 1)]
    for talk in talks:
        talk.say(serving.url)
    after = [metrics_of(url) for url in (serving.url, *serving.own)]
    assert after[0] == after[1] == after[2]

    def growth(name: str) -> float:
        return sum(after[0][key] - before.get(key, 0) for key in after[0] if key.startswith(name + " "))

    assert growth("areal_agents_calls_total") == growth("areal_agents_turns_total") == 3
    assert growth("areal_agents_call_duration_seconds_count") == 3
    tokens = "areal_agents_sampled_tokens_total [('use', 'training')]"
    assert after[0][tokens] - before.get(tokens, 0) == 3 * sampled(serving, talks[0].ids[0])
    assert growth("areal_agents_open_episodes") >= 3
    serves = [value for key, value in after[0].items() if key.startswith("areal_agents_engine_serving ")]
    assert serves == [1.0]  # one engine, and each worker sends it calls


def sampled(serving: Serving, turn_id: str) -> int:
    """Return the number of tokens that were sampled in a turn."""
    with Store.open(serving.store) as store:
        turns = store.turns_of(store.episode_of_turn(turn_id).id)
    return next(len(turn.completion) for turn in turns if turn.id == turn_id)


def test_metrics_that_lack_those_of_a_worker_are_not_returned(serving: Serving) -> None:
    pid = serving.pid(1)
    os.kill(pid, signal.SIGSTOP)
    try:
        answer = httpx.get(f"{serving.own[0]}/metrics", timeout=60)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert answer.status_code == 503
    assert (
        "worker 1 does not answer" in answer.text and answer.json()["error"]["code"] == "worker_unavailable"
    )
    wait_for(lambda: httpx.get(f"{serving.own[0]}/metrics", timeout=60).status_code == 200)


def connect(serving: Serving) -> HTTPConnection:
    """Open a connection to the public port, which is not reopened once it is closed."""
    connection = HTTPConnection(urlsplit(serving.url).netloc, timeout=60)
    connection.connect()
    connection.auto_open = 0
    return connection


def ask(connection: HTTPConnection, opened: dict[str, Any], text: str = "hello") -> str:
    """Make one call over a connection, and return the completion's id."""
    body = json.dumps({"messages": [user(text)]})
    connection.request("POST", f"/e/{opened['key']}/v1/chat/completions", body)
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == 200, content
    return str(json.loads(content)["id"])


def test_a_connection_is_passed_to_the_worker_of_its_episode(serving: Serving) -> None:
    """While one worker is stopped, every connection for an episode of the other one is served."""
    opened = [open_on(serving, 0), open_on(serving, 1)]
    with contextlib.ExitStack() as stack:
        held = [[stack.enter_context(contextlib.closing(connect(serving))) for _ in range(8)] for _ in opened]
        for item, connections in zip(opened, held, strict=True):
            for number, connection in enumerate(connections):
                ask(connection, item, f"first {number}")
        for index, (item, connections) in enumerate(zip(opened, held, strict=True)):
            stopped = serving.pid(1 - index)
            os.kill(stopped, signal.SIGSTOP)
            try:
                for number, connection in enumerate(connections):
                    ask(connection, item, f"second {number}")
            finally:
                os.kill(stopped, signal.SIGCONT)


def test_one_connection_carries_calls_of_several_episodes(serving: Serving) -> None:
    opened = [open_on(serving, 0), open_on(serving, 1)]
    with contextlib.closing(connect(serving)) as connection:
        ids = [ask(connection, opened[number % 2], f"call {number}") for number in range(8)]
        connection.request("GET", f"/episodes/{opened[0]['id']}")
        shown = json.loads(connection.getresponse().read())
    assert [turn["id"] for turn in shown["turns"]] == ids[::2]


@pytest.mark.parametrize("how", ["split in the key", "split in the head", "large", "chunked", "pipelined"])
def test_every_form_of_a_request_arrives_whole(serving: Serving, how: str) -> None:
    opened = [open_on(serving, 0), open_on(serving, 1)]
    for item in opened * 3:  # whichever worker accepts, one of the two episodes belongs to the other
        text = "sea " * (2**17 if how == "large" else 4)
        body = json.dumps({"messages": [user(text)], "max_tokens": 4}).encode()
        close = b"Connection: close\r\n"
        head = f"POST /e/{item['key']}/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n".encode()
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + close + b"\r\n"
        pieces = {
            "split in the key": (head[:20], head[20:] + close + length + body),
            "split in the head": (head, close + length, body),
            "large": (head + close + length + body,),
            "chunked": (head + close + chunked[:60], chunked[60:]),
            "pipelined": (head + length + body + health,),
        }[how]
        with socket.create_connection(("127.0.0.1", urlsplit(serving.url).port), timeout=60) as raw:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                raw.sendall(piece)
                time.sleep(0.02)  # so that each piece is read separately
            answered = b"".join(iter(lambda: raw.recv(2**16), b""))
        statuses = re.findall(rb"HTTP/1.1 (\d+)", answered)
        if how == "large":  # the whole text was read, and is longer than the context
            assert statuses == [b"400"] and b"context_length_exceeded" in answered
        else:
            assert statuses == ([b"200", b"200"] if how == "pipelined" else [b"200"]), answered


def test_refusals_are_the_same_in_every_worker(serving: Serving) -> None:
    opened = open_on(serving, 0)
    large = b" " * (33 * 2**20)
    for url in serving.own:
        for path, body, status, code in (
            ("/e/ep-nobody/v1/chat/completions", b"{}", 401, "invalid_api_key"),
            ("/v1/chat/completions", b"no JSON", 400, "invalid_json"),
            ("/v1/chat/completions", large, 413, "request_too_large"),
            (f"/e/{opened['key']}/v1/chat/completions", large, 413, "request_too_large"),
            (f"/e/{opened['key']}/v1/chat/completions", b"no JSON", 400, "invalid_json"),
            ("/episodes/nobody/finish", b"{}", 404, "not_found"),
        ):
            # In pieces, so that the length is not known beforehand.
            answer = httpx.post(url + path, content=iter([body[: 2**24], body[2**24 :]]), timeout=60)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), path


def test_a_forwarded_stream_arrives_whole(serving: Serving) -> None:
    opened = open_on(serving, 1)
    url = f"{serving.own[0]}/e/{opened['key']}/v1/chat/completions"
    body = {"model": "p", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == "the harbour opens at six"


@pytest.mark.parametrize("stream", [True, False])
def test_a_hang_up_of_a_forwarded_call_reaches_the_engine(
    serving: Serving, engine: Engine, stream: bool
) -> None:
    opened = open_on(serving, 1)
    url = f"{serving.own[0]}/e/{opened['key']}/v1/chat/completions"
    body = {"model": "p", "stream": stream, "messages": [{"role": "user", "content": SLOW}]}
    aborted, begun = len(engine.app.aborted), engine.script.slow_calls
    if stream:
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            next(answer.iter_lines())
    else:
        address = urlsplit(url)
        client = HTTPConnection(address.netloc)
        client.request("POST", address.path, json.dumps(body))
        wait_for(lambda: engine.script.slow_calls == begun + 1)
        client.close()
    wait_for(lambda: len(engine.app.aborted) == aborted + 1)
    shown = httpx.get(f"{serving.url}/episodes/{opened['id']}", timeout=60).json()
    assert shown["turns"] == [] and shown["status"] == "open"


def test_an_episode_is_finished_through_another_worker(serving: Serving) -> None:
    opened = open_on(serving, 0)
    talk = Talk(opened["key"])
    talk.say(serving.own[0])
    key = {"Authorization": f"Bearer {opened['key']}"}
    reward = {"rewards": [{"reward": 0.5}]}
    url = f"{serving.own[1]}/episodes/{opened['id']}/finish"
    done = httpx.post(url, json=reward, headers=key, timeout=60)
    assert (done.status_code, done.json()["status"]) == (200, "finished")
    for url in serving.own:  # the owner knows it too
        chat = f"{url}/e/{opened['key']}/v1/chat/completions"
        late = httpx.post(chat, json={"messages": talk.messages}, timeout=60)
        assert (late.status_code, late.json()["error"]["code"]) == (409, "episode_sealed")


def test_a_named_session_is_one_episode(serving: Serving) -> None:
    """This holds even if its first calls reach both workers at once."""
    headers = {"session-id": "s-1"}
    talks = [Talk(headers=headers, first=f"question {index}") for index in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda pair: pair[1].say(serving.own[pair[0] % 2]), enumerate(talks)))
    talks[0].say(serving.own[0])
    talks[0].say(serving.own[1])
    with Store.open(serving.store) as store:
        found = [store.episode_of_turn(turn_id) for talk in talks for turn_id in talk.ids]
        assert len({row.id for row in found}) == 1 and len(store.turns_of(found[0].id)) == 8
        turns = {turn.id: turn.parent for turn in store.turns_of(found[0].id)}
    first, second, third = talks[0].ids
    assert (turns[first], turns[second], turns[third]) == (None, first, second)


def test_a_conversation_without_a_name_continues_at_its_home(serving: Serving) -> None:
    for index in range(4):  # each worker is the home of some of them
        talk = Talk(first=f"conversation {index}")
        for url in (*serving.own, serving.url):
            talk.say(url)
        check_exact(serving, episode_of(serving, talk.ids[0]), talk.ids)


def test_a_previous_response_id_leads_to_its_episode(serving: Serving) -> None:
    previous: str | None = None
    ids: list[str] = []
    for url in (*serving.own, serving.own[0]):
        body = {"model": "p", "input": f"what about {len(ids)}?", "previous_response_id": previous}
        answer = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        previous = answer.json()["id"]
        ids.append("chatcmpl-" + previous.removeprefix("resp_"))
    assert len({episode_of(serving, turn_id) for turn_id in ids}) == 1


def test_calls_of_googles_api_reach_their_owner(serving: Serving) -> None:
    """They are routed by a key in the query, or by the messages and signatures of the conversation."""
    ids: list[str] = []
    contents: list[dict[str, Any]] = []
    for url in (*serving.own, serving.own[0]):
        contents.append({"role": "user", "parts": [{"text": f"what about Google {len(ids)}?"}]})
        answer = httpx.post(
            f"{url}/v1beta/models/p:generateContent", json={"contents": contents}, timeout=60
        ).json()
        contents.append(answer["candidates"][0]["content"])
        ids.append("chatcmpl-" + answer["responseId"].removeprefix("gen_"))
    assert len({episode_of(serving, turn_id) for turn_id in ids}) == 1
    for opened in (open_on(serving, 0), open_on(serving, 1)):
        for url in serving.own:
            path, query = f"{url}/v1/models/p:streamGenerateContent", {"key": opened["key"], "alt": "sse"}
            stream = httpx.post(path, params=query, json={"contents": "Where?"}, timeout=60)
            assert stream.status_code == 200 and stream.text.startswith("data: {"), stream.text
        shown = httpx.get(f"{serving.url}/episodes/{opened['id']}", timeout=60).json()
        assert len(shown["turns"]) == 2


def episode_of(serving: Serving, turn_id: str) -> str:
    with Store.open(serving.store) as store:
        return store.episode_of_turn(turn_id).id


def test_episodes_continue_after_kill_9_of_their_worker(serving: Serving) -> None:
    """At the public port the other worker takes over; at the dead worker's own port a call waits."""
    first, second = open_on(serving, 0), open_on(serving, 0)
    taken, waiting, nameless = Talk(first["key"]), Talk(second["key"]), Talk(first="who is it?")
    for talk in (taken, waiting):
        talk.say(serving.own[0])
    nameless.say(serving.url)
    pid = serving.pid(0)
    serving.kill(0)
    wait_for(lambda: not is_running(pid))
    taken.say(serving.url)
    waiting.say(serving.own[0])
    nameless.say(serving.own[1])
    with Store.open(serving.store) as store:
        owners = [str(store.episode_row(episode["id"]).owner) for episode in (first, second)]
    # Worker 1 took them over, or worker 0 itself if it was restarted first.
    assert not any(owner.endswith(".0.0") for owner in owners)
    for talk, url in ((taken, serving.own[0]), (waiting, serving.own[1]), (nameless, serving.own[0])):
        talk.say(url)
    check_exact(serving, first["id"], taken.ids)
    check_exact(serving, second["id"], waiting.ids)
    check_exact(serving, episode_of(serving, nameless.ids[0]), nameless.ids)


def test_connections_follow_an_episode_that_was_taken_over(serving: Serving) -> None:
    """The home of the episode forwards one call, and passes the connection on before the next one."""
    opened = open_on(serving, 0)
    pid = serving.pid(0)
    serving.kill(0)
    wait_for(lambda: not is_running(pid))
    ask_once = Talk(opened["key"])
    ask_once.say(serving.own[1])
    wait_for(lambda: serving.pid(0) != pid and httpx.get(f"{serving.own[0]}/health", timeout=60).is_success)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(contextlib.closing(connect(serving))) for _ in range(8)]
        for text in ("first", "second"):
            for number, connection in enumerate(held):
                ask(connection, opened, f"{text} {number}")
        stopped = serving.pid(0)
        os.kill(stopped, signal.SIGSTOP)
        try:
            for number, connection in enumerate(held):
                ask(connection, opened, f"third {number}")
        finally:
            os.kill(stopped, signal.SIGCONT)


def test_a_forwarded_call_survives_kill_9_of_the_owner(
    serving: Serving, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that received the call takes it over, on the exact tokens."""
    opened = open_on(serving, 1)
    talk = Talk(opened["key"])
    talk.say(serving.own[1])
    talk.messages[-1]["content"] = SLOW
    with ThreadPoolExecutor(1) as pool:
        begun = engine.script.slow_calls
        saying = pool.submit(talk.say, serving.own[0])
        wait_for(lambda: engine.script.slow_calls == begun + 1)
        monkeypatch.setattr(engine.script, "hurries", True)  # from now on
        serving.kill(1)
        saying.result(60)
    check_exact(serving, opened["id"], talk.ids)
    with Store.open(serving.store) as store:
        assert ".0." in str(store.episode_row(opened["id"]).owner)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("killed", [False, True])
def test_a_lost_first_answer_is_not_sampled_again(serving: Serving, named: bool, killed: bool) -> None:
    """The client's retry may reach the other worker, and both may have been killed in between."""

    def kill_all() -> None:
        for pid in [serving.pid(index) for index in range(2)]:
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: not is_running(pid))

    for index in range(3):  # each worker is the home of some of them
        question = f"where is it, {index}? {named} {killed}"
        headers = {"session-id": question} if named else {}
        with (
            relay_to(serving.own[0], on_cut=kill_all if killed and index == 0 else lambda: None) as relay,
            OpenAI(base_url=f"{relay.url}/v1", api_key="any", max_retries=2, timeout=60) as client,
        ):
            relay.later = serving.own[1]
            answer = client.chat.completions.create(
                model="p", messages=[{"role": "user", "content": question}], extra_headers=headers
            )
        assert relay.retry_counts == ["0", "1"]
        assert answer.id == json.loads(relay.lost[0])["id"]
        with Store.open(serving.store) as store:
            assert len(store.turns_of(store.episode_of_turn(answer.id).id)) == 1


def test_a_refused_first_call_leaves_no_episode_in_any_worker(serving: Serving) -> None:
    before = httpx.get(f"{serving.url}/episodes", timeout=60).json()["episodes"]
    for headers in ({}, {"session-id": "refused"}):
        for url in serving.own:
            body = {"messages": [{"role": "user", "content": "word " * 40_000}]}
            refused = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
            assert refused.status_code == 400, refused.text
    assert httpx.get(f"{serving.url}/episodes", timeout=60).json()["episodes"] == before


def test_sigterm_ends_all_processes_and_a_later_run_continues(engine: Engine, tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    talk = Talk()
    with workers_of(engine.url, store) as (serving, pids):
        opened = open_on(serving, 1)
        talk.path = f"/e/{opened['key']}/v1"
        talk.say(serving.own[1])
        serving.process.terminate()
        assert serving.process.wait(60) == 0
        assert not any(is_running(pid) for pid in pids)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{serving.own[0]}/health", timeout=60)
    assert list(tmp_path.glob("*.workers")) == []
    with workers_of(engine.url, store) as (serving, pids):
        talk.say(serving.own[0])
        talk.say(serving.own[1])
        check_exact(serving, opened["id"], talk.ids)
        serving.process.kill()
        wait_for(lambda: not any(is_running(pid) for pid in pids))


def test_urls_stay_valid_after_kill_9_of_the_supervisor(engine: Engine, tmp_path: Path) -> None:
    """The next supervisor starts at once, while workers of the killed one still wait for a running call."""
    store = tmp_path / "store.db"
    with (
        reserved_ports(1) as (port,),
        workers_of(engine.url, store, port=port) as (first, earlier),
        ThreadPoolExecutor(1) as pool,
    ):
        opened = [open_episode(first.url) for _ in range(4)]
        talks = [Talk(item["key"]) for item in opened]
        named, nameless = Talk(headers={"session-id": "s"}), Talk(first="who is it?")
        for talk in (*talks, named, nameless):
            talk.say(first.url)
        begun = engine.script.slow_calls
        url, body = f"{opened[0]['base_url']}/chat/completions", {"messages": [user(SLOW)]}
        waiting = pool.submit(httpx.post, url, json=body, timeout=60)
        wait_for(lambda: engine.script.slow_calls == begun + 1)
        first.process.kill()
        with workers_of(engine.url, store, port=port) as (second, _):
            assert not any(is_running(pid) for pid in earlier)  # no two processes have the same episode
            assert second.url == first.url
            for item, talk in zip(opened, talks, strict=True):
                talk.say(item["base_url"].removesuffix(talk.path))
                check_exact(second, item["id"], talk.ids)
            for talk in (named, nameless):
                talk.say(first.url)
                check_exact(second, episode_of(second, talk.ids[0]), talk.ids)
            lost = waiting.exception(60)
            assert isinstance(lost, httpx.TransportError) or waiting.result().status_code >= 500


@pytest.mark.parametrize(
    "counts", [(2, 3), (2, 1), *(pytest.param(counts, marks=pytest.mark.slow) for counts in ((3, 2), (1, 2)))]
)
def test_urls_stay_valid_when_the_number_of_workers_changes(
    engine: Engine, tmp_path: Path, counts: tuple[int, int]
) -> None:
    store = tmp_path / "store.db"
    with (
        reserved_ports(1) as (port,),
        workers_of(engine.url, store, port=port, workers=counts[0]) as (first, _),
    ):
        opened = [open_episode(first.url) for _ in range(6)]
        talks = [Talk(item["key"]) for item in opened]
        named, nameless = Talk(headers={"session-id": "s"}), Talk(first="who is it?")
        for talk in (*talks, named, nameless):
            talk.say(first.url)
        first.process.kill()
        with workers_of(engine.url, store, port=port, workers=counts[1]) as (second, _):
            for item, talk in zip(opened, talks, strict=True):
                talk.say(item["base_url"].removesuffix(talk.path))
                talk.say(item["base_url"].removesuffix(talk.path))
                check_exact(second, item["id"], talk.ids)
            for talk in (named, nameless):
                talk.say(first.url)
                check_exact(second, episode_of(second, talk.ids[0]), talk.ids)


def test_a_port_that_is_in_use_is_refused(engine: Engine, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "areal_agents.cli", "serve", "--model", str(MODEL), "--workers", "2"]
    command += ["--engine-url", engine.url, "--store", str(tmp_path / "s.db"), "--port"]
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*command, port], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and "cannot listen" in done.stderr


def test_a_worker_that_does_not_start_is_an_error(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # a model folder without a tokenizer
    command = [sys.executable, "-m", "areal_agents.cli", "serve", "--model", str(tmp_path), "--port", "0"]
    command += ["--engine-url", engine.url, "--store", str(tmp_path / "s.db"), "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and "ended before it served" in done.stderr
    assert str(tmp_path) in done.stderr and "Traceback" not in done.stderr


def test_a_websocket_is_refused_so_that_clients_continue_over_http(serving: Serving) -> None:
    for index in range(2):
        opened = open_on(serving, index)
        client = OpenAI(base_url=opened["base_url"], api_key=opened["key"], max_retries=0)
        with pytest.raises(InvalidStatus) as refusal:
            client.responses.connect().enter()
        assert refusal.value.response.status_code == 426
        assert b"several workers" in refusal.value.response.body
        assert client.responses.create(model="policy", input="When?").output_text
