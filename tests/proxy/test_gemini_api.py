"""Google's Gemini API through the real `google-genai` client."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from google import genai
from google.genai import errors, types
from proxy_support import RunningProxy, schemas_in, tool_call

from areal_agents.core.completion import Completion
from areal_agents.errors import EngineUnavailable
from areal_agents.proxy.dialects.turn_ids import turn_id_of

QUESTION = "Where is Lyon?"
SEARCH = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="search",
            description="Search the corpus.",
            parameters=types.Schema(
                type=types.Type.OBJECT,
                properties={"query": types.Schema(type=types.Type.STRING)},
                required=["query"],
            ),
        )
    ]
)
THOUGHT_AND_CALL = "<think>\nI should look.\n</think>\n\nLet me look.\n" + tool_call(query="Lyon")
TWO_CALLS = tool_call(query="é") + "\n" + tool_call(query="Nice")


def client_of(proxy: RunningProxy, episode: dict[str, Any] | None = None, **options: Any) -> genai.Client:
    """Return the real client, with the path of an episode or of the proxy itself."""
    path = f"/e/{episode['key']}" if episode else ""
    http_options = types.HttpOptions(base_url=proxy.url + path, **options)
    return genai.Client(api_key=episode["key"] if episode else "any", http_options=http_options)


def ask(client: genai.Client, *contents: Any, **config: Any) -> types.GenerateContentResponse:
    return client.models.generate_content(
        model="gemini-x",
        contents=list(contents) or QUESTION,
        config=types.GenerateContentConfig(**config) if config else None,
    )


def pieces(client: genai.Client, *contents: Any, **config: Any) -> list[types.GenerateContentResponse]:
    return list(
        client.models.generate_content_stream(
            model="gemini-x",
            contents=list(contents) or QUESTION,
            config=types.GenerateContentConfig(**config) if config else None,
        )
    )


def parts_of(answer: types.GenerateContentResponse) -> list[types.Part]:
    [candidate] = answer.candidates or []
    assert candidate.content is not None and candidate.content.role == "model"
    return list(candidate.content.parts or [])


def finish_of(answer: types.GenerateContentResponse) -> str | None:
    [candidate] = answer.candidates or []
    return candidate.finish_reason.value if candidate.finish_reason else None


def assert_continued(proxy: RunningProxy, turns: list[dict[str, Any]]) -> None:
    """Check that every prompt begins with the exact tokens of the call before it."""
    for before, after in zip(proxy.engine.calls, proxy.engine.calls[1:], strict=False):
        known = np.concatenate([before.input_ids, before.completion.token_ids])
        assert (after.input_ids[: len(known)] == known).all()
    assert len(turns) == len(proxy.engine.calls) > 1
    for before, after in zip(turns, turns[1:], strict=False):
        assert after["parent"] == before["id"] and after["forked_from"] is None


def test_a_reply_has_every_field(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    proxy.engine.script = lambda call: "In France."
    answer = ask(client_of(proxy, episode), system_instruction="Be brief.")
    call = proxy.engine.calls[0]
    [turn] = proxy.tokens(episode)["turns"]
    assert turn_id_of(answer.response_id) == turn["id"] and answer.model_version == "gemini-x"
    [part] = parts_of(answer)
    assert part.text == "In France." == answer.text
    assert part.thought_signature == b"areal-" + turn["id"].removeprefix("chatcmpl-").encode()
    assert finish_of(answer) == "STOP"
    usage = answer.usage_metadata
    assert usage is not None and usage.prompt_token_count == len(call.input_ids)
    assert usage.candidates_token_count == len(call.completion)
    assert usage.total_token_count == len(call.input_ids) + len(call.completion)
    assert [(m["role"], m["content"]) for m in turn["new_messages"]] == [
        ("system", "Be brief."),
        ("user", QUESTION),
    ]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_chat_that_calls_functions_continues_on_the_exact_tokens(
    proxy: RunningProxy, streamed: bool
) -> None:
    """With automatic function calling, the SDK runs the functions, and sends back no thoughts and no ids."""

    def search(query: str) -> str:
        """Search the corpus."""
        return f"{query}: in France"

    episode = proxy.open_episode()
    replies = iter([THOUGHT_AND_CALL, TWO_CALLS, "Both are in France.", "Yes: still."])
    proxy.engine.script = lambda call: next(replies)
    client = client_of(proxy, episode)  # a client that is garbage-collected is closed
    chat = client.chats.create(
        model="gemini-x", config=types.GenerateContentConfig(tools=[search], system_instruction="Be brief.")
    )
    texts = []
    for question in (QUESTION, "Really?"):
        if streamed:
            texts.append("".join(piece.text or "" for piece in chat.send_message_stream(question)))
        else:
            texts.append(chat.send_message(question).text or "")
    assert texts == [("Let me look." if streamed else "") + "Both are in France.", "Yes: still."]
    *turns, last = proxy.tokens(episode)["turns"]
    results = [[(m["role"], m["content"], m["name"]) for m in turn["new_messages"]] for turn in turns[1:]]
    assert results == [
        [("tool", '{"result": "Lyon: in France"}', "search")],
        [
            ("tool", '{"result": "é: in France"}', "search"),
            ("tool", '{"result": "Nice: in France"}', "search"),
        ],
    ]
    calls = [call["id"] for turn in turns for call in turn["reply"].get("tool_calls", ())]
    answered = [m["tool_call_id"] for turn in turns[1:] for m in turn["new_messages"]]
    assert answered == calls and len(calls) == 3
    # The template drops earlier reasoning at a new question, which therefore starts a new root.
    assert last["forked_from"]["reason"] == "template strips reasoning"
    del proxy.engine.calls[-1]
    assert_continued(proxy, turns)


def test_thoughts_are_sent_if_they_are_requested(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: THOUGHT_AND_CALL
    shown = types.ThinkingConfig(include_thoughts=True)
    for streamed in (False, True):
        client = client_of(proxy, proxy.open_episode())
        for config, kinds in (
            ({"thinking_config": shown}, ["thought", "text", "call"]),
            ({}, ["text", "call"]),
        ):
            if streamed:
                parts = [
                    part for piece in pieces(client, tools=[SEARCH], **config) for part in parts_of(piece)
                ]
            else:
                parts = parts_of(ask(client, tools=[SEARCH], **config))
            found = ["call" if p.function_call else "thought" if p.thought else "text" for p in parts]
            assert list(dict.fromkeys(found)) == kinds
            thoughts = "".join(part.text or "" for part in parts if part.thought)
            assert thoughts == ("I should look." if config else "")
            [call] = [part for part in parts if part.function_call]
            assert call.thought_signature and call.function_call.args == {"query": "Lyon"}


def test_a_reply_is_recognised_by_its_signature_or_ids(proxy: RunningProxy) -> None:
    """A reply comes back with or without ids and signatures, in one content or in one content per part."""
    proxy.engine.script = lambda call: "<think>\nHm.\n</think>\n\nTwo.\n" + TWO_CALLS
    shown = types.ThinkingConfig(include_thoughts=True)

    def without(part: types.Part, *names: str) -> types.Part:
        call = part.function_call
        if call is not None and "id" in names:
            part = part.model_copy(update={"function_call": call.model_copy(update={"id": None})})
        return part.model_copy(update={"thought_signature": None}) if "signature" in names else part

    for dropped in ((), ("id",), ("signature",), ("id", "signature")):
        for apart in (False, True):
            episode = proxy.open_episode()
            proxy.engine.calls.clear()
            client = client_of(proxy, episode)
            first = ask(client, tools=[SEARCH], thinking_config=shown)
            replayed = [without(part, *dropped) for part in parts_of(first)]
            contents = [[part] for part in replayed] if apart else [replayed]
            results = [
                types.Part(
                    function_response=types.FunctionResponse(
                        id=None if "id" in dropped else part.function_call.id,
                        name="search",
                        response={"output": part.function_call.args["query"]},  # type: ignore[index]
                    )
                )
                for part in replayed
                if part.function_call
            ]
            ask(
                client,
                types.UserContent(QUESTION),
                *[types.ModelContent(parts) for parts in contents],
                types.UserContent(results),
                tools=[SEARCH],
            )
            turns = proxy.tokens(episode)["turns"]
            assert_continued(proxy, turns)
            assert [m["content"] for m in turns[1]["new_messages"]] == ["é", "Nice"]


@pytest.mark.parametrize("reply", ["In France.", THOUGHT_AND_CALL, "", TWO_CALLS, "a\u2028b\x85c\nd"])
def test_the_pieces_of_a_stream_add_up_to_the_whole_response(proxy: RunningProxy, reply: str) -> None:
    proxy.engine.script = lambda call: reply
    whole = ask(client_of(proxy, proxy.open_episode()), tools=[SEARCH])
    found = pieces(client_of(proxy, proxy.open_episode()), tools=[SEARCH])

    def compared(answers: list[types.GenerateContentResponse]) -> tuple[str, list[Any]]:
        parts = [part for answer in answers for part in parts_of(answer)]
        calls = [(p.function_call.name, p.function_call.args) for p in parts if p.function_call]
        return "".join(part.text or "" for part in parts), calls

    assert compared(found) == compared([whole])
    assert [finish_of(piece) for piece in found] == [None] * (len(found) - 1) + [finish_of(whole)]
    assert found[-1].usage_metadata == whole.usage_metadata
    assert len({piece.response_id for piece in found}) == 1


def test_a_stream_without_sse_is_one_array(proxy: RunningProxy) -> None:
    """The key is in the query; with `alt=sse`, the stream has events instead."""
    proxy.engine.script = lambda call: "<think>\nA hidden thought.\n</think>\n\nIn France."
    episode = proxy.open_episode()
    path = "/v1beta/models/org/gemini-x:streamGenerateContent"
    body = {"contents": [{"parts": [{"text": QUESTION}]}]}
    response = proxy.http.post(path, params={"key": episode["key"]}, json=body)
    assert response.headers["content-type"] == "application/json"
    texts = [piece["candidates"][0]["content"]["parts"][0]["text"] for piece in response.json()]
    assert "".join(texts) == "In France." and len(texts) > 2
    events = proxy.http.post(path, params={"key": episode["key"], "alt": "sse"}, json=body)
    assert events.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in events.text.splitlines() if line]
    assert all(line.startswith("data: {") for line in lines) and len(lines) > 2
    assert json.loads(lines[-1][6:])["modelVersion"] == "org/gemini-x"


def test_the_key_is_accepted_in_the_path_in_headers_and_in_the_query(proxy: RunningProxy) -> None:
    """The key may be in the path, in Google's header, in the query or a bearer token, in each API version."""
    episode = proxy.open_episode()
    body = {"contents": QUESTION}
    for version in ("v1", "v1beta", "v1alpha"):
        path, key = f"/{version}/models/x:generateContent", episode["key"]
        for prefix, request in (
            (f"/e/{key}", {}),
            (f"/e/{key}", {"headers": {"x-goog-api-key": key}}),
            ("", {"headers": {"x-goog-api-key": key}}),
            ("", {"params": {"key": key}}),
            ("", {"headers": {"authorization": f"Bearer {key}"}}),
        ):
            assert proxy.http.post(prefix + path, json=body, **request).status_code == 200
        other = {"headers": {"x-goog-api-key": "another"}}
        refused = proxy.http.post(f"/e/{key}{path}", json=body, **other)
        assert refused.status_code == 401 and refused.json()["error"]["status"] == "UNAUTHENTICATED"
    assert len(proxy.tokens(episode)["turns"]) == 15


async def test_the_async_client_generates_streams_and_lists_models(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    async with client_of(proxy, episode, api_version="v1beta").aio as client:
        await client.models.generate_content(model="x", contents=QUESTION)
        chat = client.chats.create(model="x")
        async for _ in await chat.send_message_stream(QUESTION):
            pass
        assert [model.name for model in (await client.models.list()).page] == ["models/policy"]
    assert len(proxy.tokens(episode)["turns"]) == 2


def test_models_are_listed_in_googles_form(proxy: RunningProxy) -> None:
    client = client_of(proxy, proxy.open_episode())
    [model] = list(client.models.list())
    assert (model.name, model.input_token_limit) == ("models/policy", 4096)
    assert client.models.get(model="gemini-x").name == "models/gemini-x"


def test_counted_tokens_are_the_length_of_the_prompt(proxy: RunningProxy) -> None:
    """A whole request may be sent instead of only its contents."""
    episode = proxy.open_episode()
    client = client_of(proxy, episode)
    count = client.models.count_tokens(model="x", contents=QUESTION)
    ask(client)
    assert count.total_tokens == len(proxy.engine.calls[0].input_ids)
    request = {
        "model": "models/x",
        "contents": [{"parts": [{"text": QUESTION}]}],
        "system_instruction": {"parts": [{"text": "Be brief."}]},
    }
    path = f"/e/{episode['key']}/v1beta/models/x:countTokens"
    whole = proxy.http.post(path, json={"generateContentRequest": request}).json()
    ask(client, system_instruction="Be brief.")
    assert whole == {"totalTokens": len(proxy.engine.calls[1].input_ids)}
    assert len(proxy.tokens(episode)["turns"]) == 2


def test_sampling_parameters_and_several_candidates_are_supported(proxy: RunningProxy) -> None:
    config: dict[str, Any] = {
        "candidate_count": 2, "max_output_tokens": 50, "temperature": 0.5, "top_p": 0.9, "top_k": 40,
        "seed": 7, "stop_sequences": ["END"], "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "response_logprobs": True, "logprobs": 2,
    }  # fmt: skip
    episode = proxy.open_episode(split="eval")
    answer = ask(client_of(proxy, episode), **config)
    first, second = proxy.engine.calls
    sampling = first.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (
        50,
        0.5,
        0.9,
        40,
    )
    assert (sampling.stop, sampling.presence_penalty, sampling.frequency_penalty) == (("END",), 0.1, 0.2)
    assert (sampling.seed, second.sampling.seed, sampling.top_logprobs) == (7, 8, 2)
    assert [candidate.index for candidate in answer.candidates or []] == [0, 1]
    for candidate, call in zip(answer.candidates or [], (first, second), strict=True):
        result = candidate.logprobs_result
        assert result is not None and result.chosen_candidates is not None
        assert [token.token_id for token in result.chosen_candidates] == call.completion.token_ids.tolist()
        assert candidate.avg_logprobs == pytest.approx(float(call.completion.logprobs.mean()))
    streamed = pieces(client_of(proxy, proxy.open_episode()), **config)
    assert [candidate.finish_reason.value for candidate in streamed[-1].candidates or []] == ["STOP"] * 2
    training = proxy.open_episode()
    ask(client_of(proxy, training), temperature=0.5, top_k=40, seed=7)
    pinned = proxy.engine.calls[-1].sampling
    assert (pinned.temperature, pinned.top_k, pinned.seed) == (1.0, 0, None)
    assert set(proxy.tokens(training)["turns"][0]["overrides"]) == {"temperature", "top_k", "seed"}


def test_the_finish_reason_distinguishes_cut_off_and_stopped_replies(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: "one two three four five six"
    client = client_of(proxy, proxy.open_episode())
    assert finish_of(ask(client, max_output_tokens=2)) == "MAX_TOKENS"
    assert finish_of(pieces(client, max_output_tokens=2)[-1]) == "MAX_TOKENS"
    ids = proxy.engine.renderer.tokenizer.encode("In France. END")
    proxy.engine.script = lambda call: Completion(ids, [-0.5] * len(ids), [0] * len(ids), "stop")
    answer = ask(client, stop_sequences=[" END"])
    assert (answer.text, finish_of(answer)) == ("In France.", "STOP")


def test_a_forced_function_and_a_schema_constrain_the_engine(proxy: RunningProxy) -> None:
    client = client_of(proxy, proxy.open_episode())
    json_type: dict[str, Any] = {"response_mime_type": "application/json"}
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    ask(client, response_json_schema=city, **json_type)
    shaped = types.Schema(type=types.Type.OBJECT, properties={"city": types.Schema(type=types.Type.STRING)})
    ask(client, response_schema=shaped, **json_type)
    ask(client, **json_type)
    proxy.engine.script = lambda call: tool_call(query="Lyon")
    forced = types.FunctionCallingConfig(mode="ANY", allowed_function_names=["search"])  # type: ignore[arg-type]
    ask(client, tools=[SEARCH], tool_config=types.ToolConfig(function_calling_config=forced))
    grammars = [json.loads(call.sampling.grammar.text) for call in proxy.engine.calls]
    assert city in schemas_in(grammars[0]) and city in schemas_in(grammars[1])
    assert {"anyOf": [{"type": "object"}, {"type": "array"}]} in schemas_in(grammars[2])
    assert "search" in json.dumps(grammars[3])


def test_mode_none_withholds_calls(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: "Hm.\n" + tool_call(query="Lyon")
    never = types.FunctionCallingConfig(mode="NONE")  # type: ignore[arg-type]
    config = types.ToolConfig(function_calling_config=never)
    answer = ask(client_of(proxy, proxy.open_episode()), tools=[SEARCH], tool_config=config)
    assert [part.function_call for part in parts_of(answer)] == [None] and answer.text == "Hm."


def test_errors_are_in_googles_form(proxy: RunningProxy) -> None:
    client = client_of(proxy, proxy.open_episode())

    def refused(call: Any, code: int, status: str) -> dict[str, Any]:
        with pytest.raises(errors.ClientError) as caught:
            call()
        assert (caught.value.code, caught.value.status) == (code, status)
        return caught.value.details["error"]

    image = types.Part.from_bytes(data=b"x", mime_type="image/png")
    error = refused(lambda: ask(client, QUESTION, image), 400, "INVALID_ARGUMENT")
    assert "accepts only text, got a part with 'inlineData'" in error["message"]
    assert error["details"][0]["reason"] == "UNSUPPORTED_PARAMETER"
    assert error["details"][1]["fieldViolations"][0]["field"] == "contents[0].parts[1].inlineData"
    long = "word " * 5000
    error = refused(lambda: pieces(client, long), 400, "INVALID_ARGUMENT")
    tokens = client.models.count_tokens(model="x", contents=long).total_tokens
    assert error["message"] == (
        f"The input token count ({tokens}) exceeds the maximum number of tokens allowed (4096)."
    )
    result = types.Part.from_function_response(name="search", response={"output": "x"})
    error = refused(lambda: ask(client, types.UserContent(result)), 400, "INVALID_ARGUMENT")
    assert "no content before it has an unanswered functionCall" in error["message"]
    named = types.Part(function_response=types.FunctionResponse(id="c9", name="search", response={}))
    error = refused(lambda: ask(client, types.UserContent(named)), 400, "INVALID_ARGUMENT")
    assert "the result of the tool call 'c9'" in error["message"]
    stranger = client_of(proxy, {"key": "nobody"})
    refused(lambda: ask(stranger), 401, "UNAUTHENTICATED")
    wrong = proxy.http.post("/v1beta/models/x:embedContent", json={})
    assert wrong.status_code == 501 and wrong.json()["error"]["status"] == "UNIMPLEMENTED"
    nowhere = proxy.http.get("/v1beta/corpora")
    assert nowhere.status_code == 404 and nowhere.json()["error"]["status"] == "NOT_FOUND"
    assert proxy.http.post("/v1beta/models/x:generateContent", content=b"{").json()["error"]["code"] == 400


def test_an_engine_that_fails_is_reported(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: EngineUnavailable("gone")
    client = client_of(proxy, proxy.open_episode())
    for call in (ask, pieces):
        with pytest.raises(errors.ServerError) as caught:
            call(client)
        assert (caught.value.code, caught.value.status) == (503, "UNAVAILABLE")
        kinds = {
            detail["@type"].rpartition(".")[2]: detail for detail in caught.value.details["error"]["details"]
        }
        assert kinds["RetryInfo"]["retryDelay"] == "1s"


def test_an_implicit_episode_is_continued(proxy: RunningProxy) -> None:
    """The signature of the reply identifies the episode, without a key of the episode."""
    replies = iter(["It is far away.", "Yes."])
    proxy.engine.script = lambda call: next(replies)
    client = client_of(proxy)
    chat = client.chats.create(model="x")
    first = chat.send_message("Where is the implicit Lyon?")
    chat.send_message("Really?")
    turn_id = turn_id_of(first.response_id)
    rewarded = proxy.http.post("/rewards", json={"completion_id": first.response_id, "reward": 1.0})
    assert rewarded.status_code == 200
    [episode] = [e for e in proxy.http.get("/episodes").json()["episodes"] if e["turns"] == 2 and e["id"]][
        -1:
    ]
    turns = proxy.http.get(f"/episodes/{episode['id']}").json()["turns"]
    assert turns[0]["id"] == turn_id and len(turns) == 2
