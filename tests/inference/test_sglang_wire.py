"""Answers of SGLang as recorded from real servers, and invalid answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from areal_agents.core.completion import Grammar, GrammarKind, SamplingParams, as_token_ids
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference.answers import SentRequest
from areal_agents.inference.engine import version_from_wire
from areal_agents.inference.sglang.client import SGLangEngine
from areal_agents.inference.sglang.wire import StreamedCompletion, completion_from_wire, sampling_to_wire


def answer(**meta: Any) -> dict[str, Any]:
    return {
        "text": "ab",
        "output_ids": [460, 7],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 2},
            "output_token_logprobs": [[-6.5, 460, None], [-0.25, 7, "b"]],
            "weight_version": "default",
        }
        | meta,
    }


def test_an_answer_becomes_a_completion() -> None:
    completion = completion_from_wire(answer())
    assert completion.token_ids.tolist() == [460, 7]
    assert completion.logprobs.tolist() == [-6.5, -0.25]
    assert completion.versions.tolist() == [0, 0]
    assert completion.finish_reason == "length"


def test_version_spans_take_precedence_over_the_weight_version_if_a_server_sends_them() -> None:
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}]
    assert completion_from_wire(answer(weight_version="3", weight_versions=spans)).versions.tolist() == [0, 3]
    assert completion_from_wire(answer(weight_version="12")).versions.tolist() == [12, 12]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ({"type": "stop", "matched": 7}, "stop"),
        ({"type": "abort", "message": "Aborted"}, "abort"),
        ("length", "length"),
    ],
)
def test_finish_reasons(reason: Any, expected: str) -> None:
    assert completion_from_wire(answer(finish_reason=reason)).finish_reason == expected


def test_an_abort_before_the_first_token_is_an_empty_completion() -> None:
    raw = {
        "text": "",
        "output_ids": [],
        "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "1"},
    }
    assert len(completion_from_wire(raw)) == 0


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([], "not a JSON object"),
        ({"output_ids": [1]}, "meta_info is not a JSON object"),
        (answer(finish_reason=None), "finish_reason None"),
        (answer(output_token_logprobs=[[-1.0, 460, None]]), "logprobs of 1 other tokens"),
        (answer(output_token_logprobs=[[-1.0, 460, None], [-1.0, 8, None]]), "other tokens"),
        (
            answer(output_token_logprobs=[[float("nan"), 460, None], [-1.0, 7, None]]),
            "nan, which is not a logprob",
        ),
        (answer(weight_versions=[{"version": "1", "start": 0, "end": 1}]), "do not cover the 2 tokens"),
        (answer(weight_version="v2"), "'v2'; expected an integer"),
        ({"output_ids": None, "meta_info": answer()["meta_info"]}, "cannot be read"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_an_engine_error(raw: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        completion_from_wire(raw)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([460, 1000], "sampled the token 1000, outside its vocabulary of 1000"),
        ([-1, 7], "sampled the token -1, outside"),
        ([460, 7.9], "7.9 is not a token id"),
        (["460", 7], "'460' is not a token id"),
        ([True, 7], "True is not a token id"),
        ([460, 7, 7], "3 tokens where 2 were requested"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_invalid_or_too_many_token_ids_are_an_engine_error(
    ids: list[Any], message: str, streamed: bool
) -> None:
    raw = {**answer(output_token_logprobs=[[-1.0, id, None] for id in ids]), "output_ids": ids}
    asked = SentRequest(SamplingParams(2), vocab_size=1000)
    with pytest.raises(EngineError, match=message):
        if streamed:
            StreamedCompletion(asked=asked).feed(json.dumps(raw).encode())
        else:
            completion_from_wire(raw, asked=asked)


@pytest.mark.parametrize("value", ["", "-1", "1.0", "٣", 3, None])
def test_an_invalid_version_is_an_engine_error(value: Any) -> None:
    with pytest.raises(EngineError, match="expected an integer of this run"):
        version_from_wire(value)


def test_sampling_parameters_in_wire_form() -> None:
    assert sampling_to_wire(SamplingParams(8)) == {
        "max_new_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "ignore_eos": False,
    }
    full = SamplingParams(
        8, top_k=5, frequency_penalty=0.5, presence_penalty=0.25, stop=("x",), stop_token_ids=(7,), seed=3
    )
    wire = sampling_to_wire(full)
    assert (wire["top_k"], wire["frequency_penalty"], wire["presence_penalty"]) == (5, 0.5, 0.25)
    assert (wire["stop"], wire["stop_token_ids"], wire["sampling_seed"]) == (["x"], [7], 3)


@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_a_grammar_in_wire_form(kind: GrammarKind) -> None:
    wire = sampling_to_wire(SamplingParams(8, grammar=Grammar(kind, "text")))
    assert wire == sampling_to_wire(SamplingParams(8)) | {kind: "text"}


def test_top_logprobs_are_sorted_and_without_tokens_that_a_grammar_excludes() -> None:
    rows = [[[-2.0, 9, None], [-0.5, 460, "x"], [-3.4028234663852886e38, 1, None]], [[None, 3, None]]]
    completion = completion_from_wire(answer(output_top_logprobs=rows))
    assert completion.top_logprobs == (((460, -0.5), (9, -2.0)), ())
    assert completion_from_wire(answer(output_top_logprobs=None)).top_logprobs == ()
    with pytest.raises(EngineError, match="got 1 for 2 tokens"):
        completion_from_wire(answer(output_top_logprobs=rows[:1]))


@pytest.mark.parametrize(
    ("status", "error"), [(400, EngineRejected), (503, EngineUnavailable), (500, EngineUnavailable)]
)
def test_an_abort_with_a_status_code_is_an_error(status: int, error: type[Exception]) -> None:
    reason = {"type": "abort", "message": "no such grammar", "status_code": status}
    with pytest.raises(error, match="no such grammar"):
        completion_from_wire(answer(finish_reason=reason))


def test_a_base_url_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="http://"):
        SGLangEngine("localhost:30000")


@pytest.mark.parametrize("scored", [False, True])
async def test_a_cancelled_call_is_aborted_by_its_request_id(scored: bool) -> None:
    """A real server notices a closed connection only after seconds, and would sample until then."""
    calls: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    async def generate(request: web.Request) -> web.Response:
        await calls.put(("generate", await request.json()))
        await asyncio.Event().wait()
        raise AssertionError("never answered")

    async def abort(request: web.Request) -> web.Response:
        await calls.put(("abort", await request.json()))
        return web.Response()

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_post("/abort_request", abort)
    async with TestServer(app) as server, SGLangEngine(str(server.make_url("/")), vocab_size=8) as engine:
        ids = as_token_ids([1, 2])
        if scored:
            call: asyncio.Task[Any] = asyncio.create_task(engine.score("r1", ids, start=1))
        else:
            call = asyncio.create_task(engine.generate("r1", ids, SamplingParams(max_new_tokens=4)))
        assert (await calls.get())[0] == "generate"
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(10):
            assert await calls.get() == ("abort", {"rid": "r1$"})


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_incomplete_response_is_an_unavailable_engine(streamed: bool) -> None:
    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "500"})
        await response.prepare(request)
        await response.write(json.dumps(answer()).encode()[:60])
        assert request.transport is not None
        request.transport.abort()
        return response

    async def aborted(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_post("/abort_request", aborted)
    async with TestServer(app) as server, SGLangEngine(str(server.make_url("/")), vocab_size=8) as engine:
        on_tokens = (lambda chunk: None) if streamed else None
        with pytest.raises(EngineUnavailable, match="/generate"):
            await engine.generate("r1", as_token_ids([1, 2]), SamplingParams(max_new_tokens=4), on_tokens)
