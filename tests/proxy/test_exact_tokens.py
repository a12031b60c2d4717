"""The invariant that training relies on, for random conversations with the real client.

Every sampled token is recorded once, with its logprob and version, and every root-to-leaf path is the last
prompt that the engine received plus the completion that it returned.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from proxy_support import SEARCH, RunningProxy, running_proxy, tool_call
from record_support import awkward_replies, check_invariant
from scripted_sampler import ScriptedSampler

from areal_agents.rendering import ChatRenderer


def converse(client: OpenAI, rng: random.Random, calls: int) -> None:
    """Play an agent with tools that sometimes asks another question, branches, or edits its history."""
    histories: list[list[dict[str, Any]]] = [[{"role": "user", "content": f"question {rng.randrange(99)}"}]]
    if rng.random() < 0.5:
        histories[0].insert(0, {"role": "system", "content": "Answer."})
    for _ in range(calls):
        history = rng.choice(histories[-2:])
        body: dict[str, Any] = {"tools": [SEARCH]} if rng.random() < 0.9 else {}
        if rng.random() < 0.3:
            body["max_tokens"] = rng.randrange(1, 20)
        reply = client.chat.completions.create(model="policy", messages=history, **body).choices[0].message
        longer = [*history, replayed(rng, reply.to_dict())]
        for call in reply.tool_calls or ():
            longer.append({"role": "tool", "tool_call_id": call.id, "content": f"result {rng.randrange(9)}"})
        if not reply.tool_calls or rng.random() < 0.1:
            longer.append({"role": "user", "content": f"and {rng.randrange(99)}?"})
        if rng.random() < 0.1:
            index = rng.randrange(len(longer))
            longer[index] = {"role": "user", "content": "edited"}
            while index + 1 < len(longer) and longer[index + 1]["role"] == "tool":
                del longer[index + 1]  # the results of the removed calls
        histories.append(longer)


def replayed(rng: random.Random, message: dict[str, Any]) -> dict[str, Any]:
    """Change an assistant message as frameworks do before they send it back."""
    out = {key: value for key, value in message.items() if value is not None or rng.random() < 0.5}
    if rng.random() < 0.5:
        out.pop("reasoning_content", None)
    if rng.random() < 0.3 and out.get("content"):
        out["content"] = [{"type": "text", "text": out["content"]}]
    return out


@pytest.mark.parametrize("seed", range(12))
def test_random_conversations_are_recorded_exactly(proxy: RunningProxy, seed: int) -> None:
    rng = random.Random(seed)
    proxy.engine.script = awkward_replies(rng, proxy.engine.renderer)
    episode = proxy.open_episode()
    with proxy.openai(episode) as client:
        converse(client, rng, calls=14)
    check_invariant(proxy.store, episode["id"], proxy.engine.calls)


def test_a_well_behaved_tool_loop_is_one_trajectory(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    messages: list[Any] = [{"role": "user", "content": "Where?"}]
    with proxy.openai(episode) as client:
        for index in range(10):
            proxy.engine.script = lambda call, index=index: tool_call(query=f"q{index}")
            proxy.engine.version = index
            reply = (
                client.chat.completions.create(model="p", messages=messages, tools=[SEARCH])
                .choices[0]
                .message
            )
            messages += [
                reply,
                {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": f"r{index}"},
            ]
    assert check_invariant(proxy.store, episode["id"], proxy.engine.calls) == 9
    (trajectory,) = proxy.store.load_episode(episode["id"]).forest.trajectories()
    assert sorted(set(trajectory.versions.tolist())) == [-1, *range(10)]


def test_siblings_with_equal_content_are_distinguished_by_their_call_ids(proxy: RunningProxy) -> None:
    """Samples of one prompt may be equal; the client continues the one whose call ids it sends back."""
    episode = proxy.open_episode()
    proxy.engine.script = lambda call: tool_call(query="Lyon")
    question = {"role": "user", "content": "Where?"}
    with proxy.openai(episode) as client:
        replies = [
            client.chat.completions.create(model="p", messages=[question], tools=[SEARCH]) for _ in range(3)
        ]
        for reply in replies:
            message = reply.choices[0].message
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "France"}
            client.chat.completions.create(model="p", messages=[question, message, result], tools=[SEARCH])
    turns = proxy.tokens(episode)["turns"]
    assert [turn["parent"] for turn in turns[3:]] == [reply.id for reply in replies]
    check_invariant(proxy.store, episode["id"], proxy.engine.calls)


def test_a_change_of_tools_starts_a_new_root(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    proxy.engine.script = lambda call: tool_call(query="Lyon")
    question = {"role": "user", "content": "Where?"}
    with proxy.openai(episode) as client:
        message = (
            client.chat.completions.create(model="p", messages=[question], tools=[SEARCH]).choices[0].message
        )
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "France"}
        other = {"type": "function", "function": {**SEARCH["function"], "name": "find"}}
        client.chat.completions.create(model="p", messages=[question, message, result], tools=[SEARCH, other])
    fork = proxy.tokens(episode)["turns"][1]["forked_from"]
    assert fork["reason"] == "tools changed" and fork["diverged_at"] == 2
    check_invariant(proxy.store, episode["id"], proxy.engine.calls)


async def test_concurrent_branches_are_recorded_as_a_tree(proxy: RunningProxy) -> None:
    """Parallel sub-agents are recorded as branches of a tree, not as one linear history."""
    episode = proxy.open_episode()
    proxy.engine.delay_s = 0.005
    proxy.engine.script = lambda call: tool_call(query=f"q{len(proxy.engine.calls)}")
    label = {"x-episode-label": "scout"}

    async def agent(client: AsyncOpenAI, messages: list[Any], turns: int) -> None:
        for _ in range(turns):
            reply = await client.chat.completions.create(
                model="p", messages=messages, tools=[SEARCH], extra_headers=label
            )
            message = reply.choices[0].message
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "r"}
            messages = [*messages, message.to_dict(), result]
        if turns > 2:  # two agents continue from the same point
            await asyncio.gather(*(agent(client, messages, 2) for _ in range(2)))

    async with AsyncOpenAI(base_url=episode["base_url"], api_key=episode["key"], max_retries=0) as client:
        questions = [[{"role": "user", "content": f"q{index % 3}"}] for index in range(6)]
        await asyncio.gather(*(agent(client, question, 3) for question in questions))
    assert check_invariant(proxy.store, episode["id"], proxy.engine.calls) == 6 * (3 + 2 * 2) - 6
    recorded = proxy.store.load_episode(episode["id"])
    assert len(recorded.forest.leaves()) == 12
    assert {turn.label for turn in recorded.turns} == {"scout"}


def test_the_first_value_of_a_repeated_header_is_used(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    body = {"messages": [{"role": "user", "content": "hi"}]}
    labels = [("X-Episode-Label", "first"), ("x-episode-label", "second")]
    answer = proxy.http.post(f"/e/{episode['key']}/v1/chat/completions", json=body, headers=labels)
    assert answer.status_code == 200
    assert [turn.label for turn in proxy.store.turns_of(episode["id"])] == ["first"]


@pytest.mark.parametrize("seed", range(4))
def test_a_restarted_proxy_continues_with_the_exact_tokens(
    renderer: ChatRenderer, tmp_path: Path, seed: int
) -> None:
    """With the store and key of an earlier process, the conversation is continued, not rendered again."""
    rng = random.Random(100 + seed)
    engine = ScriptedSampler(renderer)
    engine.script = awkward_replies(rng, renderer)
    messages: list[Any] = [{"role": "user", "content": "Where?"}]
    with running_proxy(tmp_path / "store.db", engine) as first:
        episode = first.open_episode()
    for index in range(4):
        with running_proxy(tmp_path / "store.db", engine) as proxy:
            moved = {**episode, "base_url": f"{proxy.url}/e/{episode['key']}/v1"}
            with proxy.openai(moved) as client:
                converse(client, rng, calls=3)
                engine.script = lambda call, index=index: tool_call(query=f"q{index}")
                reply = client.chat.completions.create(model="p", messages=messages, tools=[SEARCH])
                engine.script = awkward_replies(rng, renderer)
            message = reply.choices[0].message
            messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "r"}]
            check_invariant(proxy.store, episode["id"], engine.calls)
            turns = {turn["id"]: turn for turn in proxy.tokens(moved)["turns"]}
            path = [reply.id]
            while turns[path[-1]]["parent"] is not None:
                path.append(turns[path[-1]]["parent"])
            assert len(path) == index + 1
