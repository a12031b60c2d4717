"""The Messages API through the real `anthropic` client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import numpy as np
import pytest
from anthropic import Anthropic, AsyncAnthropic
from proxy_support import RunningProxy, schemas_in, tool_call

from areal_agents.core.completion import Completion
from areal_agents.errors import EngineUnavailable

USER = {"role": "user", "content": "Where is Lyon?"}
SEARCH = {
    "name": "search",
    "description": "Search the corpus.",
    "input_schema": {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    },
}
THOUGHT_AND_CALL = "<think>\nI should look.\n</think>\n\nLet me look.\n" + tool_call(query="Lyon")


def client_of(proxy: RunningProxy, episode: dict[str, Any] | None = None) -> Anthropic:
    """The real client, on an episode's path or on the bare proxy."""
    path = f"/e/{episode['key']}" if episode else ""
    key = episode["key"] if episode else "any"
    return Anthropic(base_url=proxy.url + path, api_key=key, max_retries=0)


def ask(client: Anthropic, *messages: Any, **fields: Any) -> anthropic.types.Message:
    return client.messages.create(
        **{"model": "claude-x", "max_tokens": 200, "messages": messages or [USER], **fields}
    )


def result(message: anthropic.types.Message, text: str = "In France.") -> dict[str, Any]:
    """The user's message that answers every call of a reply."""
    blocks = [block for block in message.content if block.type == "tool_use"]
    content = [{"type": "tool_result", "tool_use_id": block.id, "content": text} for block in blocks]
    return {"role": "user", "content": content}


def assert_continued(proxy: RunningProxy, episode: dict[str, Any]) -> None:
    """The last prompt begins with the exact tokens of the first call."""
    before, after = proxy.engine.calls
    known = np.concatenate([before.input_ids, before.completion.token_ids])
    assert (after.input_ids[: len(known)] == known).all()
    turns = proxy.tokens(episode)["turns"]
    assert turns[1]["parent"] == turns[0]["id"] and turns[1]["forked_from"] is None


def test_a_reply_has_every_field(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    proxy.engine.script = lambda call: "In France."
    answer = ask(client_of(proxy, episode), system="Be brief.")
    call = proxy.engine.calls[0]
    turn = proxy.tokens(episode)["turns"][0]
    assert answer.id == "msg_" + turn["id"].removeprefix("chatcmpl-")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "claude-x")
    assert [(block.type, block.text) for block in answer.content] == [("text", "In France.")]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.input_tokens == len(call.input_ids)
    assert answer.usage.cache_read_input_tokens == 0
    assert answer.usage.output_tokens == len(call.completion)
    assert [(m["role"], m["content"]) for m in turn["new_messages"]] == [
        ("system", "Be brief."),
        ("user", "Where is Lyon?"),
    ]


async def test_the_async_client_needs_only_the_key_of_the_episode(proxy: RunningProxy) -> None:
    """The base_url need not name the episode if the key does, as x-api-key or as a bearer token."""
    for name in ("api_key", "auth_token"):
        episode = proxy.open_episode()
        async with AsyncAnthropic(base_url=proxy.url, max_retries=0, **{name: episode["key"]}) as client:
            await client.messages.create(model="x", max_tokens=9, messages=[USER])
            await client.beta.messages.create(model="x", max_tokens=9, messages=[USER], betas=["some-beta"])
        assert len(proxy.tokens(episode)["turns"]) == 2


def test_replayed_thinking_and_tool_calls_continue_on_the_exact_tokens(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    client = client_of(proxy, episode)
    proxy.engine.script = lambda call: THOUGHT_AND_CALL
    first = ask(client, tools=[SEARCH])
    thinking, text, use = first.content
    assert (thinking.type, thinking.thinking) == ("thinking", "I should look.")
    turn_hex = first.id.removeprefix("msg_")
    assert thinking.signature == f"areal-{turn_hex}"
    assert (text.type, text.text) == ("text", "Let me look.")
    assert (use.type, use.name, use.input) == ("tool_use", "search", {"query": "Lyon"})
    assert first.stop_reason == "tool_use"

    proxy.engine.script = lambda call: "<think>\nGood.\n</think>\n\nFrance."
    second = ask(client, USER, {"role": "assistant", "content": first.content}, result(first), tools=[SEARCH])
    assert [block.type for block in second.content] == ["thinking", "text"]
    assert_continued(proxy, episode)
    known = len(proxy.engine.calls[0].input_ids) + len(proxy.engine.calls[0].completion)
    assert second.usage.cache_read_input_tokens == known
    assert second.usage.input_tokens == len(proxy.engine.calls[1].input_ids) - known
    recorded = proxy.tokens(episode)["turns"][1]["new_messages"]
    assert [(m["role"], m["name"], m["tool_call_id"]) for m in recorded] == [("tool", "search", use.id)]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_re_serialised_reply_is_recognised(proxy: RunningProxy, streamed: bool) -> None:
    """A reply without its thinking, dumped to dicts and marked for a cache, is still the recorded turn."""
    episode = proxy.open_episode()
    client = client_of(proxy, episode)
    proxy.engine.script = lambda call: THOUGHT_AND_CALL
    if streamed:
        with client.messages.stream(model="x", max_tokens=200, messages=[USER], tools=[SEARCH]) as stream:
            first: Any = stream.get_final_message()
    else:
        first = ask(client, tools=[SEARCH])
    blocks = [block.model_dump() for block in first.content if block.type != "thinking"]
    blocks[-1]["cache_control"] = {"type": "ephemeral"}
    ask(client, USER, {"role": "assistant", "content": blocks}, result(first), tools=[SEARCH])
    assert_continued(proxy, episode)


@pytest.mark.parametrize(
    "reply",
    ["In France.", THOUGHT_AND_CALL, "", tool_call(query="é") + "\n" + tool_call(query="Nice")],
)
def test_a_stream_accumulates_to_the_whole_answer(proxy: RunningProxy, reply: str) -> None:
    proxy.engine.script = lambda call: reply
    whole = ask(client_of(proxy, proxy.open_episode()), tools=[SEARCH])
    episode = proxy.open_episode()
    with client_of(proxy, episode).messages.stream(
        model="claude-x", max_tokens=200, messages=[USER], tools=[SEARCH]
    ) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(texts) == "".join(block.text for block in whole.content if block.type == "text")
    found, expected = (as_compared(m) for m in (message, whole))
    assert found == expected
    turn = proxy.tokens(episode)["turns"][0]
    assert message.id == "msg_" + turn["id"].removeprefix("chatcmpl-")


def as_compared(message: anthropic.types.Message) -> dict[str, Any]:
    """Return the message without the fields that differ in every call."""
    out = message.model_dump(exclude={"id"})
    for block in out["content"]:
        block.pop("parsed_output", None)
        for name in ("id", "signature"):
            block.pop(name, None)
    return out


def test_a_raw_stream_has_the_events_in_order(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: THOUGHT_AND_CALL
    events = list(ask(client_of(proxy, proxy.open_episode()), tools=[SEARCH], stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    started = [e.content_block.type for e in events if e.type == "content_block_start"]
    assert started == ["thinking", "text", "tool_use"]
    deltas = [e.delta.type for e in events if e.type == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
    ]
    assert events[-2].usage.output_tokens == len(proxy.engine.calls[0].completion)


def test_count_tokens_counts_the_prompt_and_records_no_turn(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    client = client_of(proxy, episode)
    count = client.messages.count_tokens(model="x", system="Be brief.", messages=[USER], tools=[SEARCH])
    ask(client, system="Be brief.", tools=[SEARCH])
    assert count.input_tokens == len(proxy.engine.calls[0].input_ids)
    beta = client.beta.messages.count_tokens(model="x", messages=[USER])
    assert 0 < beta.input_tokens < count.input_tokens
    assert len(proxy.tokens(episode)["turns"]) == 1


def test_a_stop_sequence_is_reported(proxy: RunningProxy) -> None:
    ids = proxy.engine.renderer.tokenizer.encode("In France. END")
    proxy.engine.script = lambda call: completion_of(ids)
    answer = ask(client_of(proxy, proxy.open_episode()), stop_sequences=["never", " END"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " END")
    assert [block.text for block in answer.content] == ["In France."]
    assert proxy.engine.calls[0].sampling.stop == ("never", " END")


def completion_of(ids: list[int]) -> Completion:
    """Return the completion of an engine that stopped at a stop string."""
    return Completion(ids, [-0.5] * len(ids), [0] * len(ids), "stop")


def test_a_reply_that_is_cut_off_stops_with_max_tokens(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: "one two three four five six"
    answer = ask(client_of(proxy, proxy.open_episode()), max_tokens=2)
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 2


def test_tool_choice_none_withholds_calls(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: "Hm.\n" + tool_call(query="Lyon")
    answer = ask(client_of(proxy, proxy.open_episode()), tools=[SEARCH], tool_choice={"type": "none"})
    assert [block.type for block in answer.content] == ["text"] and answer.stop_reason == "end_turn"


def test_errors_are_in_anthropics_form(proxy: RunningProxy) -> None:
    client = client_of(proxy, proxy.open_episode())

    def refused(kind: type[anthropic.APIStatusError], call: Any) -> dict[str, Any]:
        with pytest.raises(kind) as caught:
            call()
        body: Any = caught.value.body
        assert body["type"] == "error"
        return body["error"]

    image = {"role": "user", "content": [{"type": "image", "source": {}}]}
    error = refused(anthropic.BadRequestError, lambda: ask(client, image))
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("messages.0.content.0: ") and "'image'" in error["message"]
    long = {"role": "user", "content": "word " * 5000}
    error = refused(anthropic.BadRequestError, lambda: ask(client, long))
    tokens = client.messages.count_tokens(model="x", messages=[long]).input_tokens
    assert error["message"] == f"prompt is too long: {tokens} tokens > 4096 maximum"
    stranger = Anthropic(base_url=f"{proxy.url}/e/nobody", api_key="nobody", max_retries=0)
    error = refused(anthropic.AuthenticationError, lambda: ask(stranger))
    assert error["type"] == "authentication_error"


def test_a_sealed_episode_refuses_in_anthropics_form(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    client = client_of(proxy, episode)
    ask(client)
    assert proxy.http.post(f"/episodes/{episode['id']}/finish", json={}).status_code == 200
    with pytest.raises(anthropic.ConflictError) as caught:
        ask(client)
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


def test_a_malformed_body_is_refused_in_anthropics_form(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    for path in ("messages", "messages?beta=true", "messages/count_tokens"):
        response = proxy.http.post(f"/e/{episode['key']}/v1/{path}", content=b"{")
        assert response.status_code == 400 and response.json()["type"] == "error", path


def test_an_implicit_episode_is_continued_by_the_conversation(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: THOUGHT_AND_CALL
    client = client_of(proxy)
    question = {"role": "user", "content": "Where is the implicit Lyon?"}
    first = ask(client, question, tools=[SEARCH])
    ask(client, question, {"role": "assistant", "content": first.content}, result(first), tools=[SEARCH])
    before, after = proxy.engine.calls
    known = np.concatenate([before.input_ids, before.completion.token_ids])
    assert (after.input_ids[: len(known)] == known).all()


def test_a_required_tool_and_a_schema_constrain_the_engine(proxy: RunningProxy) -> None:
    client = client_of(proxy, proxy.open_episode())
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    ask(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    proxy.engine.script = lambda call: tool_call(query="Lyon")
    ask(client, tools=[SEARCH], tool_choice={"type": "tool", "name": "search"})
    shaped, called = (call.sampling.grammar for call in proxy.engine.calls)
    assert shaped.kind == "structural_tag" and schema in schemas_in(json.loads(shaped.text))
    assert called is not None and "search" in called.text


def test_an_engine_that_fails_is_reported_in_the_stream(proxy: RunningProxy) -> None:
    """Once the stream is open, an error can only be sent as an event; before that, it is an HTTP status."""
    proxy.engine.script = lambda call: EngineUnavailable("gone")
    client = client_of(proxy, proxy.open_episode())
    with pytest.raises(anthropic.APIStatusError) as caught:
        list(ask(client, stream=True))
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "overloaded_error"


def test_a_tool_runner_that_uses_threads_sends_the_whole_conversation(proxy: RunningProxy) -> None:
    @anthropic.beta_tool
    def search(query: str) -> str:
        """Search the corpus."""
        return "In France."

    episode = proxy.open_episode()
    texts = iter([THOUGHT_AND_CALL, "It is in France."])
    proxy.engine.script = lambda call: next(texts)
    runner = client_of(proxy, episode).beta.messages.tool_runner(
        model="claude-x", max_tokens=200, tools=[search], messages=[USER]
    )
    last = runner.until_done()
    assert last.content[-1].text == "It is in France."
    assert_continued(proxy, episode)


def test_a_thread_is_refused_with_the_error_that_the_sdk_expects(proxy: RunningProxy) -> None:
    client = client_of(proxy, proxy.open_episode())
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    with pytest.raises(anthropic.BadRequestError, match="send the whole conversation") as refused:
        ask(client, extra_body={"thread": thread})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert refused.value.body["error"]["details"] == details  # type: ignore[index]
    assert not proxy.engine.calls
