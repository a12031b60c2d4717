"""The chat dialect through the real `openai` client."""

from __future__ import annotations

import json
import threading
from functools import partial
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from proxy_support import SEARCH, RunningProxy, tool_call

USER = {"role": "user", "content": "Where is Lyon?"}


def with_arguments(message: dict[str, Any], arguments: Any) -> dict[str, Any]:
    """Return the message with other arguments in its tool calls."""
    calls = [{**c, "function": {**c["function"], "arguments": arguments}} for c in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def test_a_reply_has_every_field_that_clients_rely_on(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: "In France."
    answer = proxy.openai(proxy.open_episode()).chat.completions.create(model="gpt-4o", messages=[USER])
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.created > 1.7e9
    assert answer.model == "gpt-4o"
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "In France.",
        "stop",
    )
    assert choice.message.tool_calls is None
    call = proxy.engine.calls[0]
    assert answer.usage.prompt_tokens == len(call.input_ids)
    assert answer.usage.completion_tokens == len(call.completion)
    assert answer.usage.total_tokens == len(call.input_ids) + len(call.completion)
    assert call.rid == answer.id


async def test_the_key_alone_identifies_the_episode_of_the_async_client(proxy: RunningProxy) -> None:
    """The base_url need not name the episode if the key does."""
    episode = proxy.open_episode()
    async with AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=episode["key"], max_retries=0) as client:
        answer = await client.chat.completions.create(model="policy", messages=[USER])
    assert [turn["id"] for turn in proxy.tokens(episode)["turns"]] == [answer.id]


def test_parallel_tool_calls_are_returned_and_their_results_continue_the_turn(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    client = proxy.openai(episode)
    proxy.engine.script = lambda call: (
        "Let me look.\n" + tool_call(query="Lyon") + "\n" + tool_call(query="Nice")
    )
    first = client.chat.completions.create(model="policy", messages=[USER], tools=[SEARCH])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and message.content == "Let me look."
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [
        {"query": "Lyon"},
        {"query": "Nice"},
    ]
    assert len({call.id for call in message.tool_calls}) == 2

    proxy.engine.script = lambda call: "France"
    results = [{"role": "tool", "tool_call_id": call.id, "content": "France"} for call in message.tool_calls]
    client.chat.completions.create(
        model="policy", messages=[USER, message.to_dict(), *results], tools=[SEARCH]
    )
    before, after = proxy.engine.calls
    known = np.concatenate([before.input_ids, before.completion.token_ids])
    assert (after.input_ids[: len(known)] == known).all()
    turns = proxy.tokens(episode)["turns"]
    assert turns[1]["parent"] == turns[0]["id"] and turns[1]["forked_from"] is None
    assert [m["role"] for m in turns[1]["new_messages"]] == ["tool", "tool"]
    assert [m["name"] for m in turns[1]["new_messages"]] == ["search", "search"]


@pytest.mark.parametrize(
    "replay",
    [
        pytest.param(lambda m: m, id="as sent"),
        pytest.param(lambda m: {**m, "content": ""}, id="empty content"),
        pytest.param(lambda m: {k: v for k, v in m.items() if k != "content"}, id="no content"),
        pytest.param(lambda m: {**m, "content": []}, id="no parts"),
        pytest.param(lambda m: {**m, "annotations": None, "audio": None, "index": 3}, id="extra fields"),
        pytest.param(lambda m: with_arguments(m, '{ "query":"Lyon" }'), id="arguments re-serialised"),
        pytest.param(lambda m: with_arguments(m, {"query": "Lyon"}), id="arguments parsed"),
    ],
)
def test_a_replayed_reply_is_recognised(proxy: RunningProxy, replay: Any) -> None:
    episode = proxy.open_episode()
    proxy.engine.script = lambda call: tool_call(query="Lyon")
    body: dict[str, Any] = {"messages": [USER], "tools": [SEARCH]}
    first = proxy.http.post(f"/e/{episode['key']}/v1/chat/completions", json=body).json()
    message = {k: v for k, v in first["choices"][0]["message"].items()}
    body["messages"] = [USER, replay(message), {"role": "tool", "content": "In France."}]
    assert proxy.http.post(f"/e/{episode['key']}/v1/chat/completions", json=body).status_code == 200
    turns = proxy.tokens(episode)["turns"]
    assert turns[1]["parent"] == turns[0]["id"]
    # The tool message has no id, so it is the result of the open call.
    assert turns[1]["new_messages"][0]["tool_call_id"] == message["tool_calls"][0]["id"]


def test_all_roles_and_forms_of_content_are_accepted(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"text": "brief."}]},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "nothing"}]},
        {"role": "user", "content": None},
    ]  # fmt: skip
    proxy.openai(episode).chat.completions.create(model="policy", messages=messages, tools=[SEARCH])
    recorded = proxy.tokens(episode)["turns"][0]["new_messages"]
    assert [(m["role"], m["content"]) for m in recorded] == [
        ("system", "Be brief."),
        ("user", "Hello"),
        ("assistant", ""),
        ("tool", "nothing"),
        ("user", ""),
    ]
    text = proxy.engine.renderer.tokenizer.decode(proxy.engine.calls[0].input_ids.tolist())
    assert text.startswith("<|im_start|>system\nBe brief.") and "developer" not in text


def test_reasoning_is_a_separate_field_that_may_be_sent_back_or_dropped(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    proxy.engine.script = lambda call: "<think>\nLyon is a city.\n</think>\n\n" + tool_call(query="Lyon")
    client = proxy.openai(episode)
    first = client.chat.completions.create(model="policy", messages=[USER], tools=[SEARCH]).choices[0].message
    assert first.reasoning_content == "Lyon is a city." and not first.content
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "France"}
    kept = first.to_dict()
    dropped = {k: v for k, v in kept.items() if k != "reasoning_content"}
    other = {**kept, "reasoning_content": "Something else."}
    for replayed in (kept, dropped, other):
        client.chat.completions.create(model="policy", messages=[USER, replayed, result], tools=[SEARCH])
    turns = proxy.tokens(episode)["turns"]
    assert [turn["parent"] for turn in turns] == [None, turns[0]["id"], turns[0]["id"], None]
    assert turns[3]["forked_from"]["reason"] == "edited"


def test_a_new_user_message_forks_where_the_template_strips_reasoning(proxy: RunningProxy) -> None:
    """A Qwen3 template drops earlier reasoning at a user message, as it would in any other server."""
    episode = proxy.open_episode()
    client = proxy.openai(episode)
    first = client.chat.completions.create(model="policy", messages=[USER]).choices[0].message
    messages = [USER, first.to_dict(), {"role": "user", "content": "And Nice?"}]
    client.chat.completions.create(model="policy", messages=messages)
    turns = proxy.tokens(episode)["turns"]
    assert turns[1]["parent"] is None
    assert turns[1]["forked_from"] == {
        "turn": turns[0]["id"],
        "reason": "template strips reasoning",
        "diverged_at": 2,
    }
    assert turns[1]["prompt_ids"] == proxy.engine.calls[1].input_ids.tolist()


def test_a_reply_that_the_client_made_up_starts_a_new_root(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    proxy.engine.script = lambda call: tool_call(query="Lyon")
    client = proxy.openai(episode)
    first = client.chat.completions.create(model="p", messages=[USER], tools=[SEARCH]).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "France"}
    made_up = {"role": "assistant", "content": "It is in Spain."}
    messages = [USER, first.to_dict(), result, made_up, {"role": "tool", "content": "Sure?"}]
    client.chat.completions.create(model="p", messages=messages, tools=[SEARCH])
    root, fork = proxy.tokens(episode)["turns"]
    assert fork["parent"] is None
    assert fork["forked_from"] == {"turn": root["id"], "reason": "edited", "diverged_at": 2}
    text = proxy.engine.renderer.tokenizer.decode(proxy.engine.calls[1].input_ids.tolist())
    assert "It is in Spain." in text and "France" in text


def test_tool_choice_none_keeps_the_prompt_and_withholds_the_calls(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    client = proxy.openai(episode)
    proxy.engine.script = lambda call: "Well. " + tool_call(query="Lyon")
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(
            model="p", messages=[USER], tools=[SEARCH], tool_choice=choice
        )
    assert (proxy.engine.calls[0].input_ids == proxy.engine.calls[1].input_ids).all()
    assert answer.choices[0].message.tool_calls is None and answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == "Well."


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        ({"mode": "auto", "tools": [SEARCH]}, None),
        ({"mode": "required", "tools": [SEARCH]}, None),
        ({"mode": "auto", "tools": []}, "send only the tools that may be called"),
        ({"mode": "required", "tools": [{"type": "function"}]}, "send only the tools that may be called"),
        ({"mode": "none", "tools": [SEARCH]}, 'must be "auto" or "required"'),
        ([SEARCH], "must be an object with mode and a list of tools"),
    ],
)
def test_allowed_tools_are_accepted_if_supported_and_else_refused(
    proxy: RunningProxy, allowed: Any, message: str | None
) -> None:
    proxy.engine.script = lambda call: tool_call(query="Lyon")
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    ask = partial(proxy.openai(proxy.open_episode()).chat.completions.create, model="p", messages=[USER])
    if message is None:
        assert len(ask(tools=[SEARCH], tool_choice=choice).choices[0].message.tool_calls) == 1
        return
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        ask(tools=[SEARCH], tool_choice=choice)
    assert refused.value.body["param"] == "tool_choice.allowed_tools"


def test_parallel_tool_calls_false_returns_one_call(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: tool_call(query="Lyon") + "\n" + tool_call(query="Nice")
    answer = proxy.openai(proxy.open_episode()).chat.completions.create(
        model="p", messages=[USER], tools=[SEARCH], parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls) == 1


def test_stop_strings_end_the_content_before_them(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: "one two STOP three"
    answer = proxy.openai(proxy.open_episode()).chat.completions.create(
        model="p", messages=[USER], stop=["STOP", "x"]
    )
    assert proxy.engine.calls[0].sampling.stop == ("STOP", "x")
    assert answer.choices[0].message.content == "one two "


def test_the_finish_reason_of_a_cut_off_reply_is_length(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: "word " * 50
    client = proxy.openai(proxy.open_episode())
    for field in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model="p", messages=[USER], **{field: 7})
        assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 7
    assert [call.sampling.max_new_tokens for call in proxy.engine.calls] == [7, 7]


def test_logprobs_are_those_of_the_engine(proxy: RunningProxy) -> None:
    answer = proxy.openai(proxy.open_episode()).chat.completions.create(
        model="p", messages=[USER], logprobs=True
    )
    completion = proxy.engine.calls[0].completion
    content = answer.choices[0].logprobs.content
    assert [item.logprob for item in content] == pytest.approx(completion.logprobs.tolist())
    assert b"".join(bytes(item.bytes) for item in content) == b"ok<|im_end|>"


def test_training_episodes_are_sampled_with_pinned_parameters(proxy: RunningProxy) -> None:
    asked: dict[str, Any] = {"temperature": 0.3, "top_p": 0.9, "presence_penalty": 0.5, "seed": 7}
    train, held_out = proxy.open_episode(), proxy.open_episode(split="eval", sampling={"temperature": 0})
    for episode in (train, held_out):
        proxy.openai(episode).chat.completions.create(
            model="p", messages=[USER], extra_body={"top_k": 5, "unknown": [1]}, **asked
        )
    pinned, granted = (call.sampling for call in proxy.engine.calls)
    assert (pinned.temperature, pinned.top_p, pinned.top_k, pinned.presence_penalty, pinned.seed) == (
        1,
        1,
        0,
        0,
        None,
    )
    assert (granted.temperature, granted.top_p, granted.top_k, granted.presence_penalty, granted.seed) == (
        0, 0.9, 5, 0.5, 7,
    )  # fmt: skip
    assert sorted(proxy.tokens(train)["turns"][0]["overrides"]) == sorted([*asked, "top_k"])
    assert proxy.tokens(held_out)["turns"][0]["overrides"] == ["temperature"]


def test_top_k_of_minus_one_means_off(proxy: RunningProxy) -> None:
    """Engines use -1 for off, so it is no override in training, and no error in an evaluation."""
    for split in ("train", "eval"):
        episode = proxy.open_episode(split=split)
        proxy.openai(episode).chat.completions.create(model="p", messages=[USER], extra_body={"top_k": -1})
        assert proxy.tokens(episode)["turns"][0]["overrides"] == []
    assert [call.sampling.top_k for call in proxy.engine.calls] == [0, 0]


def test_models_lists_the_policy(proxy: RunningProxy) -> None:
    assert [model.id for model in proxy.openai().models.list()] == ["policy"]
    assert [model.id for model in proxy.openai(proxy.open_episode()).models.list()] == ["policy"]


def test_a_wrong_key_is_the_clients_authentication_error(proxy: RunningProxy) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        proxy.openai(proxy.open_episode(), api_key="ep-wrong").chat.completions.create(
            model="p", messages=[USER]
        )
    assert caught.value.code == "invalid_api_key"


def test_long_prompts_are_rendered_off_the_event_loop(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenising a long prompt must not stall the other episodes; a short one is not worth a thread."""
    renderer, threads = proxy.engine.renderer, []

    def render(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return type(renderer).render(renderer, *arguments, **options)

    monkeypatch.setattr(renderer, "render", render)
    client = proxy.openai(proxy.open_episode())
    for text in ("short", "word " * 800):
        client.chat.completions.create(model="p", messages=[{"role": "user", "content": text}])
    assert not threads[0].startswith("rendering") and threads[1].startswith("rendering")
