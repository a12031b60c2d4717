"""The legacy completions dialect: how it reads prompts and writes whole and streamed responses."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types import Completion as SdkCompletion
from proxy_support import MODEL, RunningProxy

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.forest import Forest
from areal_agents.core.messages import Message, ToolCall
from areal_agents.core.trajectory import Turn
from areal_agents.errors import RequestError
from areal_agents.proxy.calls.request import CompletedTurn, ModelRequest
from areal_agents.proxy.dialects.base import ReadContext
from areal_agents.proxy.dialects.completions.dialect import Completions
from areal_agents.proxy.dialects.turn_ids import new_turn_id
from areal_agents.rendering import Tokenizer

DIALECT = Completions()
CONTEXT = ReadContext(max_messages=50, label="main", forest=Forest())
TOKENIZER = Tokenizer.from_folder(MODEL)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "davinci", "prompt": "Once", **fields}


def read(**fields: Any) -> ModelRequest:
    return DIALECT.read(body(**fields), CONTEXT)


def recorded(text: str, *, reason: Any = "stop", top_logprobs: Any = ()) -> CompletedTurn:
    """Return a completed turn with this reply, after 10 prompt tokens of which 4 were known."""
    ids = TOKENIZER.encode(text)
    turn = Turn(
        id=new_turn_id(),
        parent=None,
        new_messages=(Message("user", "Once"),),
        new_prompt_ids=list(range(10)),
        completion=Completion(ids, [-0.5] * len(ids), [0] * len(ids), reason, top_logprobs),
        reply=Message("assistant", text),
        sampling=SamplingParams(64),
    )
    return CompletedTurn(turn, 10, 1.8e9, 4)


@pytest.mark.parametrize(
    ("prompt", "raw"),
    [
        ("Once", "Once"),
        (["Once"], "Once"),
        ([5, 6], (5, 6)),
        ([[5, 6]], (5, 6)),
    ],
)
def test_all_forms_of_a_prompt_are_read(prompt: Any, raw: Any) -> None:
    request = read(prompt=prompt)
    assert request.raw_prompt == raw
    assert [m.role for m in request.messages] == ["user"] and request.tools == ()
    assert request.label == "main"


def test_sampling_parameters_are_read() -> None:
    assert read().wish.max_tokens == 16
    request = read(
        max_tokens=5, temperature=0.5, top_p=0.9, top_k=-1, stop="END", n=2, best_of=2, logprobs=3,
        seed=1, presence_penalty=0.1, frequency_penalty=0.2, echo=False, suffix="", user="u", something_new=1,
    )  # fmt: skip
    wish = request.wish
    assert (wish.max_tokens, wish.temperature, wish.top_p, wish.top_k, wish.stop) == (
        5,
        0.5,
        0.9,
        0,
        ("END",),
    )
    assert (wish.seed, wish.presence_penalty, wish.frequency_penalty, wish.top_logprobs) == (1, 0.1, 0.2, 3)
    assert request.choices == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "."}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"stop": [1]}, "stop"),
    ],
)
def test_a_refusal_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_whole_response_has_all_fields() -> None:
    first, second = recorded(" upon a time"), recorded(" more", reason="length")
    data = DIALECT.answer(body(), [first, second], TOKENIZER)
    answer = SdkCompletion.model_validate_json(data)
    assert answer.id == "cmpl-" + first.turn.id.removeprefix("chatcmpl-")
    assert (answer.object, answer.model, answer.created) == ("text_completion", "davinci", 1800000000)
    assert [(c.index, c.text, c.finish_reason, c.logprobs) for c in answer.choices] == [
        (0, " upon a time", "stop", None),
        (1, " more", "length", None),
    ]
    sampled = len(first.turn.completion) + len(second.turn.completion)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, sampled)
    assert answer.usage.total_tokens == 10 + sampled
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


def test_logprobs_have_the_legacy_shape() -> None:
    ids = TOKENIZER.encode("ab cd")
    best = tuple(((token_id, -0.5), (TOKENIZER.encode("x")[0], -2.0)) for token_id in ids)
    done = recorded("ab cd", top_logprobs=best)
    answer = json.loads(DIALECT.answer(body(logprobs=2), [done], TOKENIZER))
    found = answer["choices"][0]["logprobs"]
    tokens = [TOKENIZER.decode([token_id]) for token_id in ids]
    assert len(tokens) > 1
    assert found["tokens"] == tokens and found["token_logprobs"] == [-0.5] * len(ids)
    assert found["top_logprobs"] == [{token: -0.5, "x": -2.0} for token in tokens]
    assert found["text_offset"] == ["ab cd".index(token) for token in tokens]
    plain = json.loads(DIALECT.answer(body(logprobs=0), [recorded("ab cd")], TOKENIZER))
    assert plain["choices"][0]["logprobs"]["top_logprobs"] is None
    assert plain["choices"][0]["logprobs"]["tokens"] == tokens


def test_the_best_logprob_is_reported_for_tokens_with_the_same_string() -> None:
    same = TOKENIZER.encode("x")[0]
    done = recorded("x", top_logprobs=(((same, -0.5), (same, -3.0)),))
    answer = json.loads(DIALECT.answer(body(logprobs=2), [done], TOKENIZER))
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"x": -0.5}]


@pytest.mark.parametrize("with_usage", [True, False])
def test_the_pieces_of_a_stream_add_up_to_the_whole_response(with_usage: bool) -> None:
    done = [recorded(" upon a time"), recorded(" more", reason="length")]
    asked = body(logprobs=0, stream=True, stream_options={"include_usage": with_usage})
    writer = DIALECT.stream(asked, read(), [each.turn.id for each in done], 1.8e9, TOKENIZER)
    out = writer.start() + writer.content(0, " upon") + writer.content(1, " more")
    out += writer.content(0, " a time") + writer.finish(done)
    *events, last = out.decode().removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    chunks = [SdkCompletion.construct(**json.loads(event.removeprefix("data: "))) for event in events]
    whole = SdkCompletion.model_validate_json(DIALECT.answer(asked, done, TOKENIZER))
    assert {chunk.id for chunk in chunks} == {whole.id}
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert usages == ([whole.usage] if with_usage else [])
    for expected in whole.choices:
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == expected.index]
        assert "".join(piece.text for piece in pieces) == expected.text
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [
            expected.finish_reason
        ]
        assert pieces[-1].logprobs == expected.logprobs


def test_errors_have_the_form_of_openai() -> None:
    error = RequestError("echo is not supported", code="unsupported_parameter", param="echo")
    expected = {
        "error": {
            "message": "echo is not supported",
            "type": "invalid_request_error",
            "param": "echo",
            "code": "unsupported_parameter",
        }
    }
    assert json.loads(DIALECT.error(error)) == expected
    writer = DIALECT.stream(body(), read(), [new_turn_id()], 1.8e9, TOKENIZER)
    first = writer.error(error).decode().split("\n\n")[0]
    assert json.loads(first.removeprefix("data: ")) == expected
    with pytest.raises(AssertionError, match="no tool calls"):
        writer.call(0, ToolCall("c", "search", "{}"))


def test_the_real_client_reads_whole_and_streamed_responses(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: " upon a time"
    whole, streamed = proxy.open_episode(), proxy.open_episode()
    asked: dict[str, Any] = {"model": "davinci", "prompt": "Once", "max_tokens": 20, "logprobs": 0}
    answer = proxy.openai(whole).completions.create(**asked)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" upon a time", "stop")
    assert proxy.engine.calls[0].input_ids.tolist() == TOKENIZER.encode("Once")
    turn = proxy.tokens(whole)["turns"][0]
    assert answer.id == "cmpl-" + turn["id"].removeprefix("chatcmpl-")
    chunks = list(
        proxy.openai(streamed).completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == " upon a time"
    assert chunks[-1].usage == answer.usage and chunks[-1].choices == []
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-2].choices[0].logprobs.tokens == answer.choices[0].logprobs.tokens


def test_a_prompt_of_ids_reaches_the_engine_unchanged(proxy: RunningProxy) -> None:
    ids = TOKENIZER.encode("Once upon")
    client = proxy.openai(proxy.open_episode())
    answer = client.completions.create(model="davinci", prompt=ids, n=2)
    assert [call.input_ids.tolist() for call in proxy.engine.calls] == [ids, ids]
    assert [choice.text for choice in answer.choices] == ["ok", "ok"]
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="davinci", prompt=[10**9])


def test_a_prompt_continues_only_a_reply_that_was_cut_off(
    proxy: RunningProxy,
) -> None:
    """The stop token of a complete reply is not in its text, so the next prompt must not have it."""
    episode = proxy.open_episode()
    client = proxy.openai(episode)
    proxy.engine.script = lambda call: TOKENIZER.encode(" upon a")  # cut off: no stop token
    client.completions.create(model="davinci", prompt="Once", max_tokens=20)
    proxy.engine.script = lambda call: " time"
    client.completions.create(model="davinci", prompt="Once upon a long", max_tokens=20)
    client.completions.create(model="davinci", prompt="Once upon a long time ago", max_tokens=20)
    first, second, third = proxy.tokens(episode)["turns"]
    known = TOKENIZER.encode("Once") + first["token_ids"]
    assert second["parent"] == third["parent"] == first["id"]
    assert second["prompt_ids"] == known + TOKENIZER.encode(" long")
    assert third["prompt_ids"] == known + TOKENIZER.encode(" long time ago")
