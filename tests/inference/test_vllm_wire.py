"""The JSON of vLLM: requests, answers recorded from vLLM 0.32.0, and answers that are refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from areal_agents.core.completion import Grammar, SamplingParams, as_token_ids
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference.answers import SentRequest
from areal_agents.inference.vllm.wire import (
    StreamedCompletion,
    completion_from_wire,
    request_to_wire,
    scores_from_wire,
    seed_at,
)

PROMPT = as_token_ids([10, 11, 12, 13])
ASKED = SentRequest(
    SamplingParams(2, temperature=0.0, top_logprobs=2), 256, 4, "generate-tokens-r1", end_ids=frozenset({2})
)
# Two tokens and the best ones at each, as the real server answered for `logprobs: 3`.
ANSWER: dict[str, Any] = {
    "request_id": "generate-tokens-r1",
    "usage": {"prompt_tokens": 4, "total_tokens": 6, "completion_tokens": 2},
    "prompt_logprobs": None,
    "choices": [
        {
            "index": 0,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": [173, 100],
            "weight_versions": [
                {"version": "default", "start": 0, "end": 1},
                {"version": "7", "start": 1, "end": 2},
            ],
            "logprobs": {
                "content": [
                    {
                        "token_id": 173,
                        "logprob": -2.116161584854126,
                        "rank": 1,
                        "top_logprobs": [
                            {"token_id": 173, "logprob": -2.116161584854126, "rank": 1},
                            {"token_id": 95, "logprob": -3.269723892211914, "rank": 2},
                            {"token_id": 102, "logprob": -3.42856502532959, "rank": 3},
                        ],
                    },
                    {
                        "token_id": 100,
                        "logprob": -5.44722580909729,
                        "rank": 40,
                        "top_logprobs": [
                            {"token_id": 100, "logprob": -5.44722580909729, "rank": 40},
                            {"token_id": 239, "logprob": -3.1734442710876465, "rank": 1},
                            {"token_id": 114, "logprob": -9999.0, "rank": 2},
                        ],
                    },
                ]
            },
        }
    ],
}


def test_a_request_has_the_parameters_of_the_caller() -> None:
    params = SamplingParams(
        8, temperature=0.7, top_k=3, stop=("w1",), stop_token_ids=(4,), seed=9, top_logprobs=5,
        grammar=Grammar("ebnf", "root ::= x"),
    )  # fmt: skip
    body = request_to_wire("r", PROMPT, params, stream_interval=16)
    sent = body["sampling_params"]
    assert (body["request_id"], body["token_ids"].tolist(), body["stream"]) == ("r", [10, 11, 12, 13], True)
    assert sent["logprobs"] == 6  # vLLM counts the sampled token, which it lists first
    assert (sent["stop"], sent["stop_token_ids"], sent["detokenize"]) == (["w1"], [4], True)
    assert (sent["stream_interval"], sent["structured_outputs"]) == (16, {"grammar": "root ::= x"})
    assert sent["seed"] == seed_at(9, 4)
    plain = request_to_wire("r", PROMPT, SamplingParams(8, stop_token_ids=(4,), ignore_eos=True))
    assert "stop_token_ids" not in plain["sampling_params"]  # vLLM would stop at them
    assert "seed" not in plain["sampling_params"] and "stream" not in plain


def test_a_continued_completion_does_not_repeat_the_random_numbers_of_its_beginning() -> None:
    assert seed_at(9, 4) == seed_at(9, 4)
    assert len({seed_at(seed, position) for seed in range(9) for position in range(9)}) == 81
    assert all(0 <= seed_at(seed, 0) < 2**63 for seed in range(99))


def test_an_answer_becomes_a_completion_with_the_version_of_each_token() -> None:
    done = completion_from_wire(ANSWER, ASKED)
    assert done.token_ids.tolist() == [173, 100] and done.versions.tolist() == [0, 7]
    assert done.logprobs.tolist() == pytest.approx([-2.1161616, -5.4472258])
    assert done.finish_reason == "length"
    assert done.top_logprobs == (
        ((173, -2.116161584854126), (95, -3.269723892211914)),
        ((239, -3.1734442710876465), (100, -5.44722580909729)),  # without tokens that a grammar excludes
    )


def changed(**fields: Any) -> dict[str, Any]:
    """Return the answer with other values in some fields of its choice."""
    answer = copy.deepcopy(ANSWER)
    answer["choices"][0].update(fields)
    return answer


LOGPROBS = ANSWER["choices"][0]["logprobs"]["content"]
LIES = {
    "another request": ({**ANSWER, "request_id": "generate-tokens-r2"}, "answered request"),
    "another prompt": ({**ANSWER, "usage": {"prompt_tokens": 5}}, "counts 5 prompt tokens"),
    "a token more than it counts": (
        {**ANSWER, "usage": {"prompt_tokens": 4, "completion_tokens": 3}},
        "returned 2 tokens and counts 3",
    ),
    "other tokens' logprobs": (changed(token_ids=[173, 101]), "logprobs of 2 other tokens"),
    "no logprobs": (changed(logprobs=None), "cannot be read"),
    "no number": (
        changed(logprobs={"content": [{**LOGPROBS[0], "logprob": -9999.0}, LOGPROBS[1]]}),
        "as the logprob of a token that it sampled",
    ),
    "too many tokens": (
        changed(token_ids=[173, 100, 173], logprobs={"content": [*LOGPROBS, LOGPROBS[0]]}),
        "3 tokens where 2 were requested",
    ),
    "no versions": (changed(weight_versions=None), "do not cover the 2 tokens"),
    "a version by hand": (
        changed(weight_versions=[{"version": "step-3", "start": 0, "end": 2}]),
        "weight version 'step-3'",
    ),
    "a version that goes back": (
        changed(
            weight_versions=[
                {"version": "7", "start": 0, "end": 1},
                {"version": "6", "start": 1, "end": 2},
            ]
        ),
        "go back from 7 to 6",
    ),
    "an end without its token": (changed(finish_reason="stop"), "neither a stop token nor a stop string"),
    "an unknown end": (changed(finish_reason="repetition"), "finish_reason 'repetition'"),
    "no end": (changed(finish_reason=None), "without a finish reason"),
}


@pytest.mark.parametrize(("answer", "message"), LIES.values(), ids=LIES)
def test_an_answer_that_contradicts_itself_or_the_request_is_refused(answer: Any, message: str) -> None:
    usage = answer["usage"]
    if message.startswith("3 tokens"):
        answer = {**answer, "usage": {**usage, "completion_tokens": 3}}
    with pytest.raises(EngineError, match=message):
        completion_from_wire(answer, ASKED)


def test_a_failed_request_counts_as_an_unavailable_engine() -> None:
    with pytest.raises(EngineUnavailable, match="see its log"):
        completion_from_wire(changed(finish_reason="error"), ASKED)


def test_an_answer_that_was_aborted_before_the_first_token_is_an_empty_completion() -> None:
    answer = changed(finish_reason="abort", token_ids=[], logprobs={"content": []}, weight_versions=[])
    answer["usage"] = {"prompt_tokens": 0, "completion_tokens": 0}
    done = completion_from_wire(answer, ASKED)
    assert (len(done), done.finish_reason) == (0, "abort")


def chunk(tokens: slice, sent: int, **fields: Any) -> bytes:
    """Return an event with some of the answer's tokens."""
    choice = {**ANSWER["choices"][0], "finish_reason": None, "weight_versions": None}
    choice["token_ids"] = choice["token_ids"][tokens]
    choice["logprobs"] = {"content": LOGPROBS[tokens]}
    usage = {"prompt_tokens": 4, "completion_tokens": sent}
    return json.dumps({**ANSWER, "usage": usage, "choices": [{**choice, **fields}]}).encode()


END = {"finish_reason": "length", "weight_versions": ANSWER["choices"][0]["weight_versions"]}


def test_a_stream_becomes_a_completion() -> None:
    stream = StreamedCompletion(ASKED)
    first = stream.feed(chunk(slice(0, 1), 1))
    assert first is not None and (first.token_ids, first.versions) == ((173,), ())
    assert not stream.finished
    stream.feed(chunk(slice(1, 2), 2, **END))
    assert stream.finished
    assert stream.feed(json.dumps({**ANSWER, "choices": []}).encode()) is None
    assert stream.completion().versions.tolist() == [0, 7]


def test_a_lost_chunk_and_a_chunk_after_the_end_are_errors() -> None:
    with pytest.raises(EngineError, match="returned 1 tokens and counts 2"):
        StreamedCompletion(ASKED).feed(chunk(slice(1, 2), 2, **END))
    stream = StreamedCompletion(ASKED)
    stream.feed(chunk(slice(0, 2), 2, **END))
    with pytest.raises(EngineError, match="after the one that ended"):
        stream.feed(chunk(slice(0, 1), 1))


@pytest.mark.parametrize(("code", "kind"), [(400, EngineRejected), (500, EngineUnavailable)])
def test_an_error_in_a_stream_is_raised_according_to_its_code(code: int, kind: type[Exception]) -> None:
    event = json.dumps({"error": {"message": "too long", "code": code}}).encode()
    with pytest.raises(kind, match="too long"):
        StreamedCompletion(ASKED).feed(event)


# The answer of the real server for `prompt_logprobs: 2`.
ROWS = [
    None,
    {"11": {"logprob": -1.857856273651123, "rank": 1}, "60": {"logprob": -3.9792511463165283, "rank": 2}},
    {
        "12": {"logprob": -8.508912086486816, "rank": 237},
        "173": {"logprob": -2.1694467067718506, "rank": 1},
        "150": {"logprob": -2.6724748611450195, "rank": 2},
    },
    {
        "13": {"logprob": -7.25118350982666, "rank": 187},
        "173": {"logprob": -2.501392364501953, "rank": 1},
        "227": {"logprob": -3.18210506439209, "rank": 2},
    },
]
SCORED = {**ANSWER, "prompt_logprobs": ROWS}
SCORED["choices"] = [{**ANSWER["choices"][0], "weight_versions": [{"version": "3", "start": 0, "end": 1}]}]


def test_scores_are_those_of_the_given_tokens() -> None:
    scores = scores_from_wire(SCORED, PROMPT, start=1, top=2, vocab_size=256)
    assert scores.token_logprobs.tolist() == pytest.approx([-1.8578563, -8.508912, -7.2511835])
    assert scores.top_ids.tolist() == [[11, 60], [173, 150], [173, 227]]
    assert scores.version == 3
    assert scores_from_wire(SCORED, PROMPT, start=3, top=2, vocab_size=256).top_ids.tolist() == [[173, 227]]


def test_scores_of_other_tokens_are_refused() -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        scores_from_wire(SCORED, as_token_ids([10, 11, 12, 14]), start=1, top=2, vocab_size=256)
    with pytest.raises(EngineError, match="of 4 prompt tokens, expected 5"):
        scores_from_wire(SCORED, as_token_ids([10, 11, 12, 13, 5]), start=1, top=2, vocab_size=256)
    with pytest.raises(EngineError, match="outside its vocabulary of 200"):
        scores_from_wire(SCORED, PROMPT, start=1, top=2, vocab_size=200)
