"""The Responses API through the real `openai` client."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest
from openai.types.responses import Response
from proxy_support import RunningProxy, schemas_in, tool_call
from pydantic import BaseModel

from areal_agents.core.completion import Completion

SEARCH: Any = {
    "type": "function",
    "name": "search",
    "description": "Search the corpus.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    "strict": False,
}
QUESTION = "Where is Lyon?"
THOUGHT = "<think>\nLyon is a city.\n</think>\n\n"
CALLS = THOUGHT + "Let me look.\n" + tool_call(query="Lyon") + "\n" + tool_call(query="Nice")


def turn_of(response: Response) -> str:
    return response.id.replace("resp_", "chatcmpl-")


def outputs_for(response: Response) -> list[Any]:
    """The results of the calls of a response."""
    calls = [item for item in response.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": call.call_id, "output": "France"} for call in calls]


def assert_continues(proxy: RunningProxy, episode: dict[str, Any], responses: list[Response]) -> None:
    """Check that each response is a turn on the exact tokens of the one before."""
    turns = proxy.tokens(episode)["turns"]
    ids = [turn_of(response) for response in responses]
    assert [turn["id"] for turn in turns] == ids
    assert [turn["parent"] for turn in turns] == [None, *ids[:-1]]
    for before, after in zip(proxy.engine.calls, proxy.engine.calls[1:], strict=False):
        known = np.concatenate([before.input_ids, before.completion.token_ids])
        assert (after.input_ids[: len(known)] == known).all()


def test_a_response_has_every_field_that_clients_rely_on(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: THOUGHT + "In France."
    episode = proxy.open_episode()
    answer = proxy.openai(episode).responses.create(model="gpt-5", input=QUESTION, instructions="Be brief.")
    Response.model_validate(answer.model_dump())
    assert (answer.object, answer.status, answer.model) == ("response", "completed", "gpt-5")
    assert answer.output_text == "In France." and answer.instructions == "Be brief."
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].summary[0].text == "Lyon is a city."
    [call] = proxy.engine.calls
    assert call.rid == turn_of(answer)
    assert answer.usage.input_tokens == len(call.input_ids)
    assert answer.usage.output_tokens == len(call.completion)
    assert answer.usage.total_tokens == len(call.input_ids) + len(call.completion)
    [turn] = proxy.tokens(episode)["turns"]
    assert [m["role"] for m in turn["new_messages"]] == ["system", "user"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("style", ["output", "previous", "references", "no ids"])
def test_a_tool_loop_continues_on_the_exact_tokens(proxy: RunningProxy, style: str, stream: bool) -> None:
    episode = proxy.open_episode()
    client = proxy.openai(episode)

    def ask(**body: Any) -> Response:
        body = {"model": "policy", "tools": [SEARCH], "instructions": "Be brief.", **body}
        if not stream:
            return client.responses.create(**body)
        with client.responses.stream(**body) as events:
            return events.get_final_response()

    proxy.engine.script = lambda call: CALLS
    first = ask(input=QUESTION)
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"query": "Lyon"}, {"query": "Nice"}]
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]

    proxy.engine.script = lambda call: THOUGHT + "In France."
    user = {"role": "user", "content": QUESTION}
    if style == "previous":
        second = ask(input=outputs_for(first), previous_response_id=first.id)
    else:
        items = [item.to_dict() for item in first.output]
        if style == "references":
            items = [{"type": "item_reference", "id": item["id"]} for item in items]
        elif style == "no ids":
            items = [{k: v for k, v in item.items() if k != "id"} for item in items]
        second = ask(input=[user, *items, *outputs_for(first)])
    assert second.output_text == "In France."
    assert_continues(proxy, episode, [first, second])
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens


def test_instructions_are_not_inherited(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    client = proxy.openai(episode)
    first = client.responses.create(model="policy", input=QUESTION, instructions="Be brief.")
    client.responses.create(
        model="policy", input="And Nice?", instructions="Be rude.", previous_response_id=first.id
    )
    _, turn = proxy.tokens(episode)["turns"]
    assert turn["parent"] is None and turn["forked_from"]["reason"]
    assert [(m["role"], m["content"]) for m in turn["new_messages"]] == [
        ("system", "Be rude."),
        ("user", QUESTION),
        ("assistant", "ok"),
        ("user", "And Nice?"),
    ]


def test_a_stream_is_the_whole_response_in_pieces(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: CALLS
    episode = proxy.open_episode()
    with proxy.openai(episode).responses.stream(model="policy", input=QUESTION, tools=[SEARCH]) as events:
        seen = list(events)
        final = events.get_final_response()
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert [event.type for event in seen[:2]] == ["response.created", "response.in_progress"]
    assert seen[-1].type == "response.completed"
    texts: dict[str, str] = {}
    for event in seen:
        if event.type.endswith(".delta"):
            texts[event.type] = texts.get(event.type, "") + event.delta
    assert texts["response.reasoning_summary_text.delta"] == "Lyon is a city."
    assert texts["response.output_text.delta"] == final.output_text == "Let me look."
    done = [event.item.id for event in seen if event.type == "response.output_item.done"]
    assert done == [item.id for item in final.output]
    [turn] = proxy.tokens(episode)["turns"]
    assert turn["id"] == turn_of(final)
    assert [call["id"] for call in turn["reply"]["tool_calls"]] == [
        item.call_id for item in final.output if item.type == "function_call"
    ]


def test_a_cut_response_is_incomplete(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: "In France, in the south east."
    client = proxy.openai(proxy.open_episode())
    answer = client.responses.create(model="policy", input=QUESTION, max_output_tokens=2)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 2
    with client.responses.stream(model="policy", input=QUESTION, max_output_tokens=2) as events:
        assert [event.type for event in events][-1] == "response.incomplete"


def test_the_logprobs_of_the_text_are_those_of_the_engine(proxy: RunningProxy) -> None:
    client = proxy.openai(proxy.open_episode())
    answer = client.responses.create(model="policy", input=QUESTION, include=["message.output_text.logprobs"])
    found = answer.output[0].content[0].logprobs
    [call] = proxy.engine.calls
    assert [entry.logprob for entry in found] == pytest.approx(call.completion.logprobs.tolist())


class City(BaseModel):
    name: str


def test_a_schema_reaches_the_engine_as_a_grammar(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: '{"name": "Lyon"}'
    client = proxy.openai(proxy.open_episode())
    answer = client.responses.parse(model="policy", input=QUESTION, text_format=City)
    assert answer.output_parsed == City(name="Lyon")
    grammar = proxy.engine.calls[0].sampling.grammar
    assert grammar.kind == "structural_tag"
    assert [schema["required"] for schema in schemas_in(json.loads(grammar.text))] == [["name"]]


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_the_form_of_openais_errors(proxy: RunningProxy, stream: bool) -> None:
    client = proxy.openai(proxy.open_episode())

    def refused(**body: Any) -> Any:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**{"model": "policy", "input": QUESTION, "stream": stream, **body})
        return caught.value

    missing = refused(previous_response_id="resp_" + "0" * 24)
    assert (missing.code, missing.param) == ("previous_response_not_found", "previous_response_id")
    assert "not found." in missing.message
    assert refused(tools=[{"type": "local_shell"}]).param == "tools[0]"
    assert refused(tools=[{"type": "web_search"}], tool_choice="required").param == "tool_choice"
    assert refused(background=True).code == "unsupported_parameter"
    assert refused(input="Lyon " * 5000).code == "context_length_exceeded"


def test_an_episode_cannot_refer_to_a_response_of_another_episode(proxy: RunningProxy) -> None:
    first = proxy.openai(proxy.open_episode()).responses.create(model="policy", input=QUESTION)
    with pytest.raises(openai.BadRequestError) as caught:
        proxy.openai(proxy.open_episode()).responses.create(
            model="policy", input="And Nice?", previous_response_id=first.id
        )
    assert caught.value.code == "previous_response_not_found"


def test_a_call_without_a_key_finds_the_episode_of_the_response_that_it_names(proxy: RunningProxy) -> None:
    client = proxy.openai()
    first = client.responses.create(model="policy", input=QUESTION)
    second = client.responses.create(model="policy", input="And Nice?", previous_response_id=first.id)
    client.responses.create(
        model="policy",
        input=[{"role": "user", "content": "Nantes?"}, {"type": "item_reference", "id": second.output[0].id}],
    )
    before, after, _ = proxy.engine.calls
    known = np.concatenate([before.input_ids, before.completion.token_ids])
    assert (after.input_ids[: len(known)] == known).all()


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_takes_and_returns_text(proxy: RunningProxy, stream: bool) -> None:
    episode = proxy.open_episode()
    client = proxy.openai(episode)
    body: dict[str, Any] = {"model": "policy", "tools": [{"type": "custom", "name": "search"}]}

    def ask(given: list[Any]) -> Response:
        if not stream:
            return client.responses.create(**body, input=given)
        with client.responses.stream(**body, input=given) as events:
            return events.get_final_response()

    proxy.engine.script = lambda call: tool_call(input="SELECT 1")
    given: list[Any] = [{"role": "user", "content": QUESTION}]
    first = ask(given)
    [call] = first.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "search", "SELECT 1")
    proxy.engine.script = lambda call: "done"
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "1"}
    second = ask([*given, {**call.to_dict(), "id": None}, result])
    assert_continues(proxy, episode, [first, second])


def test_an_engine_failure_in_mid_stream_is_a_failed_response(proxy: RunningProxy) -> None:
    ids = proxy.engine.renderer.tokenizer.encode("In France, in the")
    aborted = Completion(ids, [-0.5] * len(ids), [0] * len(ids), "abort")
    proxy.engine.script = lambda call: aborted
    client = proxy.openai(proxy.open_episode())
    seen = list(client.responses.create(model="policy", input=QUESTION, stream=True))
    assert any(event.type == "response.output_text.delta" for event in seen)
    assert seen[-1].type == "response.failed" and seen[-1].response.status == "failed"
    assert seen[-1].response.error.code == "server_error" and seen[-1].response.error.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_of_a_namespace_is_called_and_replayed_by_both_names(
    proxy: RunningProxy, stream: bool
) -> None:
    episode = proxy.open_episode()
    client = proxy.openai(episode)
    lookup = {"type": "function", "name": "lookup", "parameters": {"type": "object"}}
    tools: list[Any] = [
        {
            "type": "namespace",
            "name": "atlas",
            "description": "Maps.",
            "tools": [lookup, {"type": "custom", "name": "note"}],
        },
        {"type": "namespace", "name": "mcp__geo__", "description": "", "tools": [lookup]},
        {"type": "web_search"},
    ]
    block = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    calls = [
        ("atlas__lookup", '{"query": "Lyon"}'),
        ("atlas__note", '{"input": "x"}'),
        ("mcp__geo__lookup", "{}"),
    ]
    proxy.engine.script = lambda call: "\n".join(block.format(*one) for one in calls)
    body: dict[str, Any] = {"model": "policy", "tools": tools}
    if stream:
        with client.responses.stream(input=QUESTION, **body) as events:
            first = events.until_done().get_final_response()
    else:
        first = client.responses.create(input=QUESTION, **body)
    named = [(item.type, item.namespace, item.name) for item in first.output]
    assert named == [
        ("function_call", "atlas", "lookup"),
        ("custom_tool_call", "atlas", "note"),
        ("function_call", "mcp__geo__", "lookup"),
    ]
    results = [
        {"type": item.type + "_output", "call_id": item.call_id, "output": "found"} for item in first.output
    ]
    replayed = [item.model_dump(exclude_none=True) for item in first.output]
    proxy.engine.script = lambda call: "Done."
    client.responses.create(input=[{"role": "user", "content": QUESTION}, *replayed, *results], **body)
    turns = proxy.tokens(episode)["turns"]
    assert turns[1]["parent"] == turns[0]["id"]
