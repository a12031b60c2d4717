"""Episodes over HTTP: how they are opened, rewarded, ended and grouped, their keys and their timeouts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import polling
import pytest
from openai import AsyncOpenAI
from proxy_support import SEARCH, RunningProxy, running_proxy, tool_call
from record_support import until
from scripted_sampler import ScriptedSampler
from store_queries import in_flight_episodes, lease_groups

from areal_agents.errors import EngineUnavailable
from areal_agents.rendering import ChatRenderer

USER = {"role": "user", "content": "Where is Lyon?"}


def ask(proxy: RunningProxy, episode: dict[str, Any]) -> str:
    """Make one model call, and return the id of its completion."""
    return proxy.openai(episode).chat.completions.create(model="p", messages=[USER]).id


def post(
    proxy: RunningProxy, path: str, body: dict[str, Any] | None = None, status: int = 200
) -> dict[str, Any]:
    """Make a control call, whose response must have `status`, and return its JSON."""
    response = proxy.http.post(path, json=body or {})
    assert response.status_code == status, response.text
    return response.json()


def test_an_episode_from_opening_to_its_end(proxy: RunningProxy) -> None:
    episode = proxy.open_episode(task={"id": "t1", "input": {"q": "Lyon?"}}, metadata={"run": 3})
    assert episode["base_url"] == f"{proxy.url}/e/{episode['key']}/v1" and episode["key"].startswith("ep-")
    completion = ask(proxy, episode)
    path = f"/episodes/{episode['id']}"
    post(proxy, f"{path}/reward", {"reward": 0.25, "completion_id": completion})
    post(proxy, f"{path}/reward", {"reward": True})
    post(proxy, f"{path}/reward", {"reward": {"style": 0.5, "return": 0.75}})  # the last write of a name wins
    state = {"id": episode["id"], "status": "finished", "turns": 1, "limit_reached": None}
    assert post(proxy, f"{path}/finish") == state
    assert post(proxy, f"{path}/finish")["status"] == "finished"  # a retried request changes nothing
    shown = proxy.http.get(path).json()
    assert (shown["status"], shown["score"], shown["metadata"]) == ("finished", 1.5, {"run": 3})
    assert shown["task"] == {"id": "t1", "input": {"q": "Lyon?"}}
    assert {(r["scope"], r["target"], r["name"], r["value"]) for r in shown["rewards"]} == {
        ("turn", completion, "return", 0.25), ("episode", "", "return", 0.75), ("episode", "", "style", 0.5),
    }  # fmt: skip
    assert "prompt_ids" not in shown["turns"][0]
    with_tokens = proxy.tokens(episode)["turns"][0]
    call = proxy.engine.calls[0]
    assert with_tokens["prompt_ids"] == call.input_ids.tolist()
    assert with_tokens["token_ids"] == call.completion.token_ids.tolist()
    assert with_tokens["logprobs"] == pytest.approx(call.completion.logprobs.tolist())
    assert with_tokens["versions"] == call.completion.versions.tolist()
    listed = {
        e["id"]: e for e in proxy.http.get("/episodes", params={"status": "finished"}).json()["episodes"]
    }
    assert listed[episode["id"]]["turns"] == 1 and listed[episode["id"]]["score"] == 1.5


def test_a_finish_request_may_include_rewards(proxy: RunningProxy) -> None:
    """The end and the rewards are one transaction: no episode is finished without its reward."""
    episode = proxy.open_episode(group="gsm8k/1@0", group_size=1)
    completion = ask(proxy, episode)
    path = f"/episodes/{episode['id']}/finish"
    post(proxy, path, {"rewards": [{"reward": "x"}]}, status=400)
    post(proxy, path, {"rewards": [1]}, status=400)
    post(proxy, path, {"rewards": [{"reward": 1, "completion_id": "none"}]}, status=404)
    assert proxy.tokens(episode)["status"] == "open"  # a refused reward does not end the episode
    rewards: list[Any] = [{"reward": 1}, {"reward": 0.5, "completion_id": completion}]
    assert post(proxy, path, {"rewards": rewards})["status"] == "finished"
    (leased,) = lease_groups(proxy.store, 1, step=0)
    assert leased.rollouts[0].episode.score == 1.5


def test_a_finish_request_may_require_a_model_call(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    path = f"/episodes/{episode['id']}/finish"
    body = {"require_turn": True, "rewards": [{"reward": 1}]}
    assert post(proxy, path, body, status=409)["error"]["code"] == "no_turn"
    shown = proxy.tokens(episode)
    assert shown["status"] == "open" and shown["rewards"] == []
    ask(proxy, episode)
    assert post(proxy, path, body)["turns"] == 1


def test_an_episode_without_a_model_call_fails_and_completes_no_group(proxy: RunningProxy) -> None:
    for ending in ({"rewards": [{"reward": 1}]}, {"truncated": True}):
        episode = proxy.open_episode(group="nobody/calls@0", group_size=1)
        path = f"/episodes/{episode['id']}"
        assert post(proxy, f"{path}/finish", ending)["status"] == "failed"
        shown = proxy.tokens(episode)
        assert shown["error"].startswith("the model was never called; does the agent's client use")
        assert shown["rewards"] == []
        assert post(proxy, f"{path}/reward", {"reward": 1}, status=409)["error"]["code"] == "conflict"
        assert "nobody/calls@0" in {group.id for group in proxy.store.open_groups()}


def test_a_sealed_episode_accepts_rewards_and_no_calls(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    ask(proxy, episode)
    post(proxy, f"/episodes/{episode['id']}/finish")
    with pytest.raises(openai.ConflictError) as caught:
        ask(proxy, episode)
    assert (
        caught.value.code == "episode_sealed" and caught.value.response.headers["x-should-retry"] == "false"
    )
    post(proxy, f"/episodes/{episode['id']}/fail", {"error": "late"}, status=409)
    post(proxy, f"/episodes/{episode['id']}/reward", {"reward": 1})
    assert proxy.tokens(episode)["score"] == 1


def test_a_failed_episode_keeps_its_error(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    assert post(proxy, f"/episodes/{episode['id']}/fail", {"error": "ValueError: no"})["status"] == "failed"
    assert proxy.tokens(episode)["error"] == "ValueError: no"
    post(proxy, f"/episodes/{episode['id']}/reward", {"reward": 1}, status=409)
    other = proxy.open_episode()
    assert post(proxy, f"/episodes/{other['id']}/fail", {"aborted": True})["status"] == "aborted"


@pytest.mark.parametrize("asked_again", [True, False])
def test_an_engine_failure_fails_the_episode_unless_the_call_succeeds_later(
    renderer: ChatRenderer, tmp_path: Path, asked_again: bool
) -> None:
    """An agent may ignore the error and finish with a result that says nothing about the policy."""
    answers: list[Any] = ["Lyon", EngineUnavailable("it is gone"), "in France"]
    engine = ScriptedSampler(renderer, script=lambda call: answers.pop(0))
    with running_proxy(tmp_path / "s.db", engine) as proxy:
        episode = proxy.open_episode()
        ask(proxy, episode)
        client = proxy.openai(episode).with_options(max_retries=0)
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="p", messages=[USER, USER])
        if asked_again:
            client.chat.completions.create(model="p", messages=[USER, USER])
        body = {"rewards": [{"reward": 1.0}], "require_turn": True}
        state = post(proxy, f"/episodes/{episode['id']}/finish", body)
        assert state["status"] == ("finished" if asked_again else "failed")
        if not asked_again:
            assert "the engine failed" in proxy.http.get(f"/episodes/{episode['id']}").json()["error"]


async def test_sealing_an_episode_aborts_its_running_calls(proxy: RunningProxy) -> None:
    proxy.engine.delay_s = 30
    episode = proxy.open_episode()
    async with AsyncOpenAI(base_url=episode["base_url"], api_key=episode["key"], max_retries=0) as client:
        running = asyncio.create_task(client.chat.completions.create(model="p", messages=[USER]))
        await polling.until(lambda: proxy.engine.calls or running.done())
        await asyncio.to_thread(post, proxy, f"/episodes/{episode['id']}/fail", {"aborted": True})
        with pytest.raises(openai.ConflictError):
            await running
    assert proxy.engine.cancelled == [proxy.engine.calls[0].rid] and proxy.tokens(episode)["turns"] == []


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"reward": None},
        {"reward": "1"},
        {"reward": {}},
        {"reward": {"a": None}},
        {"reward": [1]},
        {"reward": 1, "name": ""},
        {"reward": 1, "name": "n" * 201},
        {"reward": {"good": 1, "n" * 201: 1}},
        {"reward": 1, "scope": "turn"},
        {"reward": 1, "scope": "world"},
    ],
)
def test_an_invalid_reward_is_refused(proxy: RunningProxy, body: dict[str, Any]) -> None:
    episode = proxy.open_episode()
    error = post(proxy, f"/episodes/{episode['id']}/reward", body, status=400)["error"]
    assert error["param"] in ("reward", "name", "scope")


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_reward_that_is_not_finite_is_refused(proxy: RunningProxy, text: str) -> None:
    episode = proxy.open_episode()
    response = proxy.http.post(f"/episodes/{episode['id']}/reward", content=f'{{"reward": {text}}}')
    assert response.status_code == 400 and "finit" in response.json()["error"]["message"], response.text
    assert proxy.tokens(episode)["rewards"] == []


@pytest.mark.parametrize(
    "body",
    [
        {"reward": 1, "name": "truncated_reward"},
        {"reward": {"style": 1, "truncated_reward": 0.5}},
        {"reward": {"chatcmpl-a": 1}, "name": "truncated_reward"},
    ],
)
def test_the_name_of_the_default_reward_is_reserved(proxy: RunningProxy, body: dict[str, Any]) -> None:
    """Any other reward replaces the default, so a reward with the name of the default would be lost."""
    episode = proxy.open_episode()
    for path, given in (("reward", body), ("finish", {"rewards": [body]})):
        error = post(proxy, f"/episodes/{episode['id']}/{path}", given, status=400)["error"]
        assert "'truncated_reward' is reserved" in error["message"] and error["param"] == "name"
    shown = proxy.tokens(episode)
    assert shown["rewards"] == [] and shown["status"] == "open"


def test_rewards_are_given_to_completions_and_branches(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    first, second = ask(proxy, episode), ask(proxy, episode)
    path = f"/episodes/{episode['id']}/reward"
    post(proxy, path, {"reward": {first: 0.5, second: 0.25}})
    post(proxy, path, {"reward": 1, "completion_id": second, "scope": "branch"})
    assert {(r["scope"], r["target"]) for r in proxy.tokens(episode)["rewards"]} == {
        ("turn", first), ("turn", second), ("branch", second),
    }  # fmt: skip
    other = proxy.open_episode()
    post(proxy, f"/episodes/{other['id']}/reward", {"reward": 1, "completion_id": first}, status=404)


def test_unknown_episodes_and_groups_are_not_found(proxy: RunningProxy) -> None:
    for path in ("/episodes/none/finish", "/episodes/none/fail", "/groups/none/drop"):
        assert post(proxy, path, status=404)["error"]["code"] == "not_found"
    post(proxy, "/episodes/none/reward", {"reward": 1}, status=404)
    assert proxy.http.get("/episodes/none").status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"task": {}}, "task"),
        ({"task": ""}, "task"),
        ({"task": 3}, "task"),
        ({"task": {"id": "", "input": {}}}, "task.id"),
        ({"task": {"id": True, "q": 1}}, "task.id"),
        ({"task": {"id": "t", "input": 3}}, "task.input"),
        ({"split": "test"}, "split"),
        ({"group": 3}, "group"),
        ({"group": "g", "group_size": 0}, "group_size"),
        ({"group": "g", "index": "1"}, "index"),
        ({"limits": {"max_turn": 3}}, "limits"),
        ({"limits": {"max_turns": 0}}, "limits"),
        ({"sampling": {"temprature": 0}}, "sampling.temprature"),
        ({"sampling": {"temperature": "0"}}, "sampling.temperature"),
        ({"metadata": []}, "metadata"),
    ],
)
def test_an_invalid_request_to_open_an_episode_is_refused(
    proxy: RunningProxy, body: dict[str, Any], param: str
) -> None:
    assert post(proxy, "/episodes", body, status=400)["error"]["param"] == param


@pytest.mark.parametrize(
    ("task", "task_id", "task_input"),
    [
        ("lyon", "lyon", {}),
        ({"id": "lyon"}, "lyon", {}),
        ({"id": 7, "input": {"q": "Lyon?"}}, "7", {"q": "Lyon?"}),
        ({"id": 7, "q": "Lyon?"}, "7", {"id": 7, "q": "Lyon?"}),
        ({"q": "Lyon?"}, "cdd568047c705ae4", {"q": "Lyon?"}),
    ],
)
def test_a_task_may_be_given_in_any_of_its_forms(
    proxy: RunningProxy, task: Any, task_id: str, task_input: dict[str, Any]
) -> None:
    shown = proxy.tokens(proxy.open_episode(task=task))["task"]
    assert shown == {"id": task_id, "input": task_input}


def test_a_group_fills_completes_and_closes(proxy: RunningProxy) -> None:
    group = {"group": "lyon@0", "group_size": 3, "task": {"id": "lyon", "input": {}}}
    members = [proxy.open_episode(**group) for _ in range(3)]
    assert [member["index"] for member in members] == [0, 1, 2]
    post(proxy, "/episodes", group, status=409)
    post(proxy, "/episodes", {**group, "group_size": 4}, status=409)
    post(proxy, "/episodes", {**group, "task": {"id": "nice"}}, status=409)
    post(proxy, "/episodes", {**group, "split": "eval"}, status=409)

    post(proxy, f"/episodes/{members[1]['id']}/fail", {"error": "crash"})
    post(proxy, "/episodes", {**group, "index": 0}, status=409)
    members[1] = proxy.open_episode(**group, index=1)  # the retry takes the place of the failed episode
    for member in members:
        ask(proxy, member)
    post(proxy, f"/episodes/{members[0]['id']}/reward", {"reward": 1})
    post(proxy, f"/episodes/{members[0]['id']}/finish")
    post(proxy, f"/episodes/{members[1]['id']}/finish", {"truncated": True})  # scored with the default reward
    post(proxy, f"/episodes/{members[2]['id']}/finish")
    assert lease_groups(proxy.store, 1, step=0) == []
    post(proxy, f"/episodes/{members[2]['id']}/reward", {"reward": 0.5})  # rewards may come after the end
    post(proxy, "/episodes", group, status=409)
    post(proxy, f"/episodes/{members[1]['id']}/reward", {"reward": 0.125})  # replaces the default

    (leased,) = lease_groups(proxy.store, 1, step=0)
    assert [rollout.episode.score for rollout in leased.rollouts] == [1, 0.125, 0.5]
    error = post(proxy, f"/episodes/{members[0]['id']}/reward", {"reward": 0}, status=409)["error"]
    assert "leased" in error["message"]
    post(proxy, "/groups/lyon@0/drop", {"reason": "late"}, status=409)


def test_a_dropped_group_accepts_no_episodes(proxy: RunningProxy) -> None:
    group = {"group": "with/slash@0", "group_size": 2}
    proxy.open_episode(**group)
    before = in_flight_episodes(proxy.store)
    post(proxy, "/groups/with/slash@0/drop", {"reason": "run is over"})
    post(proxy, "/groups/with/slash@0/drop")
    post(proxy, "/episodes", group, status=409)
    assert in_flight_episodes(proxy.store) == before - 1


def test_concurrent_episodes_of_many_groups_are_recorded_separately(proxy: RunningProxy) -> None:
    """64 concurrent agents make up to three calls each; all turns are recorded in their own episodes."""
    proxy.engine.delay_s = 0.01
    rng = random.Random(0)
    proxy.engine.script = lambda call: tool_call(query="Lyon") if rng.random() < 0.7 else "France"

    async def agent(index: int, http: httpx.AsyncClient, openai_client: AsyncOpenAI) -> str:
        body = {"group": f"many-{index // 16}@0", "group_size": 16, "task": {"id": f"many-{index // 16}"}}
        episode = (await http.post("/episodes", json=body)).raise_for_status().json()
        client = openai_client.with_options(base_url=episode["base_url"], api_key=episode["key"])
        messages: list[Any] = [{"role": "user", "content": f"question {index}"}]
        for _ in range(3):
            answer = await client.chat.completions.create(model="p", messages=messages, tools=[SEARCH])
            messages.append(answer.choices[0].message.to_dict())
            for call in answer.choices[0].message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "France"})
            if not answer.choices[0].message.tool_calls:
                break
        (await http.post(f"/episodes/{episode['id']}/reward", json={"reward": index % 2})).raise_for_status()
        (await http.post(f"/episodes/{episode['id']}/finish")).raise_for_status()
        return str(episode["id"])

    async def main() -> list[str]:
        async with (
            httpx.AsyncClient(base_url=proxy.url, timeout=60) as http,
            AsyncOpenAI(base_url=proxy.url, api_key="x", max_retries=0) as client,
        ):
            return await asyncio.gather(*(agent(index, http, client) for index in range(64)))

    episodes = asyncio.run(main())
    groups = lease_groups(proxy.store, 4, step=9)
    assert [len(group.rollouts) for group in groups] == [16] * 4
    assert {r.episode.id for group in groups for r in group.rollouts} == set(episodes)
    turns = [turn for group in groups for r in group.rollouts for turn in r.episode.turns]
    assert {turn.id for turn in turns} == {call.rid for call in proxy.engine.calls}
    for group in groups:
        for rollout in group.rollouts:
            assert len(rollout.episode.forest.leaves()) == 1


@pytest.fixture(scope="module")
def guarded(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path = tmp_path_factory.mktemp("guarded") / "s.db"
    keys: dict[str, Any] = {"admin_key": "admin-secret", "project_keys": ("project-secret",)}
    headers = {"authorization": "Bearer admin-secret"}
    with running_proxy(path, ScriptedSampler(renderer), headers=headers, **keys) as running:
        yield running


def test_each_key_gives_access_only_to_what_it_should(guarded: RunningProxy) -> None:
    mine, other = guarded.open_episode(), guarded.open_episode()

    def status(method: str, path: str, key: str | None, header: str = "authorization") -> int:
        value = f"Bearer {key}" if header == "authorization" else str(key)
        with httpx.Client(base_url=guarded.url, timeout=60) as http:
            headers = {header: value} if key else {}
            body = {"messages": [USER]} if path.endswith("/chat/completions") else {}
            return http.request(
                method, path, headers=headers, json=body if method == "POST" else None
            ).status_code

    chat, in_mine = "/v1/chat/completions", f"/e/{mine['key']}/v1/chat/completions"
    assert status("POST", chat, None) == 401
    assert status("POST", chat, "wrong") == 401
    assert status("POST", chat, "ep-wrong") == 401
    assert status("POST", chat, "project-secret") == 200
    assert status("POST", chat, "admin-secret") == 200
    assert status("POST", chat, mine["key"]) == 200
    assert status("POST", chat, mine["key"], "x-api-key") == 200
    assert status("POST", in_mine, None) == 200
    assert status("POST", in_mine, mine["key"]) == 200
    assert status("POST", in_mine, other["key"]) == 401
    assert status("POST", in_mine, "project-secret") == 401
    assert status("POST", "/e/ep-wrong/v1/chat/completions", None) == 401
    assert status("GET", "/episodes", "project-secret") == 403
    assert status("GET", "/episodes", mine["key"]) == 403
    assert status("POST", "/episodes", None) == 401
    assert status("GET", f"/episodes/{mine['id']}", mine["key"]) == 200
    assert status("GET", f"/episodes/{mine['id']}", other["key"]) == 403
    assert status("GET", f"/episodes/{mine['id']}", "project-secret") == 403
    assert status("POST", f"/episodes/{other['id']}/finish", mine["key"]) == 403
    assert status("POST", f"/episodes/{mine['id']}/finish", mine["key"]) == 200
    assert status("GET", "/health", None) == 200


def test_a_project_key_rewards_its_own_implicit_episodes(guarded: RunningProxy) -> None:
    def completion(key: str) -> str:
        answer = guarded.openai(api_key=key).chat.completions.create(model="p", messages=[USER])
        return answer.id

    def status(key: str, completion_id: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        body = {"completion_id": completion_id, "reward": 1}
        return guarded.http.post("/rewards", json=body, headers=headers).status_code

    episode = guarded.open_episode()
    mine, of_admin, of_episode = (
        completion("project-secret"),
        completion("admin-secret"),
        ask(guarded, episode),
    )
    assert [status("project-secret", id) for id in (mine, of_admin, of_episode)] == [200, 403, 403]
    assert [status(episode["key"], id) for id in (mine, of_episode)] == [403, 200]
    assert [status("admin-secret", id) for id in (mine, of_admin, of_episode)] == [200, 200, 200]
    assert status("wrong", mine) == 401


def test_keys_are_not_stored(guarded: RunningProxy) -> None:
    episode = guarded.open_episode()
    ask(guarded, episode)
    files = Path(str(guarded.store.url).removeprefix("sqlite:///")).parent.iterdir()
    assert not any(episode["key"].encode() in file.read_bytes() for file in files)
    assert episode["key"] not in guarded.http.get(f"/episodes/{episode['id']}").text


def implicit_episodes(proxy: RunningProxy) -> list[dict[str, Any]]:
    """The summaries of the implicit episodes, oldest first."""
    listed = proxy.http.get("/episodes").json()["episodes"]
    return [episode for episode in listed if episode["id"].startswith("implicit-")]


def test_conversations_without_an_episode_key_become_implicit_episodes(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    engine = ScriptedSampler(renderer, script=lambda call: tool_call(query="Lyon"))
    with running_proxy(tmp_path / "s.db", engine) as proxy:
        client = proxy.openai()

        def conversation(question: str) -> Iterator[str]:
            messages: list[Any] = [{"role": "user", "content": question}]
            while True:
                answer = client.chat.completions.create(model="p", messages=messages, tools=[SEARCH])
                call = answer.choices[0].message.tool_calls[0]
                messages += [
                    answer.choices[0].message,
                    {"role": "tool", "tool_call_id": call.id, "content": "r"},
                ]
                yield answer.id

        first, second = conversation("a"), conversation("b")
        ids = [next(first), next(second), next(first), next(second), next(first)]
        assert [episode["turns"] for episode in implicit_episodes(proxy)] == [3, 2]
        rewarded = post(proxy, "/rewards", {"completion_id": ids[3], "reward": 1})
        assert rewarded["id"] == implicit_episodes(proxy)[1]["id"]
        assert [episode["score"] for episode in implicit_episodes(proxy)] == [None, 1]
        post(proxy, "/rewards", {"completion_id": "chatcmpl-none", "reward": 1}, status=404)
        post(proxy, "/rewards", {"reward": 1}, status=400)
        assert engine.calls[0].sampling.temperature == 1
        client.chat.completions.create(model="p", messages=[USER], temperature=0.5)
        assert engine.calls[-1].sampling.temperature == 0.5  # not for training: sampled as requested


@pytest.mark.parametrize(
    "named",
    [
        {"extra_headers": {"session-id": "s1"}},
        {"extra_headers": {"X-Claude-Code-Session-Id": "s1"}},
        {"extra_body": {"prompt_cache_key": "s1"}},
    ],
)
def test_a_session_name_joins_unrelated_conversations_in_one_episode(
    renderer: ChatRenderer, tmp_path: Path, named: dict[str, Any]
) -> None:
    with running_proxy(tmp_path / "s.db", ScriptedSampler(renderer)) as proxy:
        for question in ("a", "b", "c"):
            messages = [{"role": "user", "content": question}]
            proxy.openai().chat.completions.create(model="p", messages=messages, **named)
        proxy.openai(api_key="somebody else").chat.completions.create(model="p", messages=[USER], **named)
        assert [episode["turns"] for episode in implicit_episodes(proxy)] == [3, 1]


def test_implicit_episodes_continue_after_a_restart_and_end_when_idle(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    engine = ScriptedSampler(renderer, script=lambda call: tool_call(query="Lyon"))
    messages: list[Any] = [USER]
    for _ in range(2):
        with running_proxy(tmp_path / "s.db", engine) as proxy:
            answer = proxy.openai().chat.completions.create(model="p", messages=messages, tools=[SEARCH])
            call = answer.choices[0].message.tool_calls[0]
            messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "r"}]
            assert [episode["turns"] for episode in implicit_episodes(proxy)] == [len(messages) // 2]
    with running_proxy(tmp_path / "s.db", engine, implicit_idle_s=0.2) as proxy:
        until(lambda: implicit_episodes(proxy)[0]["status"] == "finished")
        assert [episode["status"] for episode in implicit_episodes(proxy)] == ["finished"]
        proxy.openai().chat.completions.create(model="p", messages=messages, tools=[SEARCH])
        assert len(implicit_episodes(proxy)) == 2


def test_unrewarded_and_idle_episodes_fail_after_their_timeouts(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The places of both in their groups are free for retries."""
    engine, group = ScriptedSampler(renderer), {"group": "g", "group_size": 1}
    with running_proxy(tmp_path / "unrewarded.db", engine, reward_timeout_s=0.2) as proxy:
        unrewarded = proxy.open_episode(**group)
        ask(proxy, unrewarded)
        post(proxy, f"/episodes/{unrewarded['id']}/finish")
        until(lambda: proxy.tokens(unrewarded)["status"] == "failed")
        assert proxy.tokens(unrewarded)["error"].startswith("no_reward")
        proxy.open_episode(**group, index=0)
    with running_proxy(tmp_path / "unused.db", engine, idle_timeout_s=0.2) as proxy:
        # The same limit applies to a group without open episodes, which this test must not wait for.
        monkeypatch.setattr(proxy.store, "abandoned_groups", lambda: [])
        unused = proxy.open_episode(**group)
        until(lambda: proxy.tokens(unused)["status"] == "failed")
        assert proxy.tokens(unused)["error"].startswith("idle")
        proxy.open_episode(**group, index=0)


def test_rewards_out_of_range_and_deeply_nested_tasks_are_refused(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    refused = proxy.http.post(f"/episodes/{episode['id']}/reward", json={"reward": 1e308})
    assert refused.status_code == 400 and "from -1e+12 to 1e+12" in refused.json()["error"]["message"]
    deep = "[" * 300 + "]" * 300
    refused = proxy.http.post("/episodes", content=f'{{"task": {{"input": {{"x": {deep}}}}}}}')
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("finish", {"truncated": "false"}, "truncated must be true or false"),
        ("finish", {"truncated": [0]}, "truncated must be true or false"),
        ("finish", {"require_turn": "no"}, "require_turn must be true or false"),
        ("fail", {"aborted": 1}, "aborted must be true or false"),
        ("reward", {"reward": {"": 1.0}}, "must not be empty"),
        ("reward", {"reward": {"chatcmpl-" + "0" * 24: 1.0, "style": 0.5}}, "'style' is a name"),
    ],
)
def test_ambiguous_bodies_are_refused(
    proxy: RunningProxy, path: str, body: dict[str, Any], message: str
) -> None:
    episode = proxy.open_episode()
    ask(proxy, episode)
    answer = post(proxy, f"/episodes/{episode['id']}/{path}", body, status=400)
    assert message in answer["error"]["message"].replace('"', "'")
    assert proxy.tokens(episode)["status"] == "open" and proxy.tokens(episode)["rewards"] == []


@pytest.mark.parametrize("sampling", [{"temperature": -5}, {"top_p": 7}, {"min_p": 3}, {"seed": -1}])
def test_sampling_out_of_range_is_refused_when_the_episode_is_opened(
    proxy: RunningProxy, sampling: dict[str, float]
) -> None:
    answer = post(proxy, "/episodes", {"split": "eval", "sampling": sampling}, status=400)
    assert next(iter(sampling)) in answer["error"]["message"]


def test_a_trailing_slash_is_not_redirected_and_a_repeated_filter_is_refused(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    found = proxy.http.post(f"/e/{episode['key']}/v1/chat/completions/", json={})
    assert found.status_code == 404 and "location" not in found.headers
    assert proxy.http.get("/episodes?split=eval&split=train").status_code == 400
