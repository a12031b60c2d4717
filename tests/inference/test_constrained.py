"""Constrained decoding in the embedded engine: with Qwen's vocabulary, with pauses, and its errors."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from inference_support import EOS, PATIENCE_S, Missed, again_if_missed, prompt_of
from real_tokenizers import qwen_folder
from tokenizers import Tokenizer

from areal_agents.core.completion import Grammar, SamplingParams, as_token_ids
from areal_agents.errors import EngineRejected, RequestError
from areal_agents.inference import PauseMode, SGLangEngine, running_engine
from areal_agents.inference.embedded.http.protocol import RequestLimits, parse_generate
from areal_agents.inference.embedded.scheduling.grammar import Grammars

QWEN_TOKENS = 151_669
PADDED_VOCAB = 151_936
IM_END, END_OF_TEXT, TOOL_CALL, TOOL_CALL_END = 151_645, 151_643, 151_657, 151_658
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Zürich"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "days", "flags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def qwen_url(make_model: Callable[..., Path]) -> Iterator[str]:
    """A tiny random model with Qwen's tokenizer and a vocabulary that is padded beyond the tokenizer's."""
    folder = make_model(
        vocab_size=PADDED_VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=16,
        eos_token_id=[IM_END, END_OF_TEXT],
    )
    shutil.copy(qwen_folder() / "tokenizer.json", folder)
    with running_engine(folder, threads=1, slots=4, max_context=1024, incremental_streaming=True) as url:
        yield url


@pytest.fixture
async def qwen(qwen_url: str) -> AsyncIterator[SGLangEngine]:
    async with SGLangEngine(qwen_url, request_timeout_s=PATIENCE_S) as engine:
        yield engine


@pytest.fixture(scope="module")
def words_url(model_folder: Path) -> Iterator[str]:
    with running_engine(model_folder, threads=1, slots=3, max_context=512) as url:
        yield url


@pytest.fixture
async def words(words_url: str) -> AsyncIterator[SGLangEngine]:
    """An engine with the vocabulary w0 to w255, where w2 is the end of sequence."""
    async with SGLangEngine(words_url, request_timeout_s=PATIENCE_S) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(qwen_folder() / "tokenizer.json"))


def decode(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False)


async def test_every_output_satisfies_its_json_schema(qwen: SGLangEngine, tokenizer: Tokenizer) -> None:
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    prompt = as_token_ids(tokenizer.encode("Where to?").ids)
    runs = await asyncio.gather(
        *(
            qwen.generate(f"j{i}", prompt, SamplingParams(600, temperature=1.0, seed=i, grammar=grammar))
            for i in range(6)
        )
    )
    answers = set()
    for completion in runs:
        assert completion.finish_reason == "stop"
        assert completion.token_ids[-1] in (IM_END, END_OF_TEXT)
        assert completion.token_ids.max() < QWEN_TOKENS
        answer = json.loads(decode(tokenizer, completion.token_ids[:-1]))
        assert sorted(answer) == ["city", "days", "flags"]
        assert answer["city"] in ("Paris", "Zürich")
        assert answer["days"] in range(1, 10)
        assert 1 <= len(answer["flags"]) <= 3 and all(type(flag) is bool for flag in answer["flags"])
        answers.add(json.dumps(answer))
    assert len(answers) > 1


async def test_markers_of_a_structural_tag_may_be_single_tokens(
    qwen: SGLangEngine, tokenizer: Tokenizer
) -> None:
    tag = {
        "type": "tag",
        "begin": "<tool_call>\n",
        "content": {"type": "regex", "pattern": '\\{"name": "travel", "days": [1-9]\\}'},
        "end": "\n</tool_call>",
    }
    grammar = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
    starts = set()
    for seed in range(8):
        params = SamplingParams(99, seed=seed, temperature=50.0, grammar=grammar)
        completion = await qwen.generate("t", as_token_ids([9, 10]), params)
        text = decode(tokenizer, completion.token_ids[:-1])
        assert text.startswith("<tool_call>\n") and text.endswith("\n</tool_call>")
        assert json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))["name"] == "travel"
        starts.add(int(completion.token_ids[0]))
    assert TOOL_CALL in starts  # there are many other spellings, which are allowed too


async def test_stop_tokens_of_the_request_end_only_a_complete_output(qwen: SGLangEngine) -> None:
    """`TOOL_CALL` would be a valid first token, but as a stop token it may only end the output."""
    grammar = Grammar("regex", "(<tool_call>){2}")
    ends = set()
    for seed in range(12):
        params = SamplingParams(
            60, seed=seed, temperature=50.0, stop_token_ids=(TOOL_CALL, TOOL_CALL_END), grammar=grammar
        )
        completion = await qwen.generate("s", as_token_ids([9, 10]), params)
        assert completion.finish_reason == "stop"
        assert TOOL_CALL not in completion.token_ids[:-1]
        ends.add(int(completion.token_ids[-1]))
    assert ends <= {IM_END, END_OF_TEXT, TOOL_CALL, TOOL_CALL_END}
    assert ends & {TOOL_CALL, TOOL_CALL_END}


@again_if_missed
async def test_the_texts_of_incremental_chunks_join_to_the_whole_text(qwen_url: str) -> None:
    """Random tokens of Qwen's vocabulary contain many incomplete characters."""
    body = {
        "input_ids": [9, 10],
        "sampling_params": {"max_new_tokens": 200, "sampling_seed": 3, "ignore_eos": True},
    }
    async with aiohttp.ClientSession() as session:
        async with session.post(qwen_url + "/generate", json=body) as response:
            whole = await response.json()
        async with session.post(qwen_url + "/generate", json=body | {"stream": True}) as response:
            events = [line[6:] for line in (await response.read()).decode().split("\n\n") if line]
    chunks: list[dict[str, Any]] = [json.loads(event) for event in events[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert sum((chunk["output_ids"] for chunk in chunks), []) == whole["output_ids"]
    assert [chunk["meta_info"]["completion_tokens"] for chunk in chunks][-1] == 200
    if len(chunks) <= 2:  # on a stalled machine the reader finds the tokens of many steps in one chunk
        raise Missed


MANY_WORDS = Grammar("regex", "(w[3-9]){200}")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@again_if_missed
async def test_a_pause_does_not_change_a_constrained_output(words: SGLangEngine, mode: PauseMode) -> None:
    params = [
        SamplingParams(
            300, temperature=0.9, seed=i, grammar=MANY_WORDS if i % 2 else None, ignore_eos=not i % 2
        )
        for i in range(5)
    ]
    prompts = [prompt_of(20 + 5 * i, seed=i) for i in range(5)]
    calm = [await words.generate(f"c{i}", prompts[i], params[i]) for i in range(5)]
    begun = asyncio.Event()
    tasks = [
        asyncio.create_task(words.generate(f"p{i}", prompts[i], params[i], lambda piece: begun.set()))
        for i in range(5)
    ]
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    for _ in range(3):
        await words.pause(mode)
        await asyncio.sleep(0.005)
        if all(task.done() for task in tasks):
            await words.resume()
            raise Missed
        await words.resume()
    for expected, completion in zip(calm, await asyncio.gather(*tasks), strict=True):
        assert completion.token_ids.tolist() == expected.token_ids.tolist()
        np.testing.assert_array_equal(completion.logprobs, expected.logprobs)
    assert [len(completion) for completion in calm[1::2]] == [201, 201]


async def test_a_stop_string_ends_a_constrained_output(words: SGLangEngine) -> None:
    free = await words.generate("f", prompt_of(9), SamplingParams(300, seed=1, grammar=MANY_WORDS))
    stop = "".join(f"w{token}" for token in free.token_ids[10:14])
    first = next(n for n in range(201) if stop in "".join(f"w{token}" for token in free.token_ids[:n]))
    params = SamplingParams(300, seed=1, grammar=MANY_WORDS, stop=(stop,))
    stopped = await words.generate("s", prompt_of(9), params)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == free.token_ids[:first].tolist()


async def test_the_end_of_a_grammar_ends_the_output_even_with_ignore_eos(words: SGLangEngine) -> None:
    params = SamplingParams(50, seed=1, grammar=Grammar("regex", "w7w8"), ignore_eos=True)
    completion = await words.generate("i", prompt_of(9), params)
    assert completion.token_ids.tolist() == [7, 8, EOS]
    assert completion.finish_reason == "stop"
    assert completion.logprobs.tolist() == [0.0, 0.0, 0.0]


async def test_truncation_and_penalties_apply_together_with_a_grammar(words: SGLangEngine) -> None:
    params = SamplingParams(
        300, seed=1, grammar=MANY_WORDS, top_k=1, frequency_penalty=2.0, presence_penalty=1.0
    )
    completion = await words.generate("k", prompt_of(9), params)
    assert len(completion) == 201
    assert set(completion.token_ids[:-1].tolist()) == set(range(3, 10))  # because of the penalties


async def test_a_grammar_that_the_vocabulary_cannot_spell_is_refused_or_aborts_the_request(
    words: SGLangEngine,
) -> None:
    with pytest.raises(EngineRejected, match="no token of the vocabulary begins what the json_schema"):
        await words.generate("b", prompt_of(9), SamplingParams(9, grammar=Grammar("json_schema", "{}")))
    stuck = await words.generate("m", prompt_of(9), SamplingParams(9, grammar=Grammar("regex", "w3x")))
    assert (stuck.token_ids.tolist(), stuck.finish_reason) == ([3], "abort")
    raw = await words._call(
        "POST", "/generate", {"input_ids": [9], "sampling_params": {"max_new_tokens": 9, "regex": "w3x"}}
    )
    assert "no token of the vocabulary fits the grammar" in raw["meta_info"]["finish_reason"]["message"]


async def test_a_batch_with_a_malformed_grammar_is_refused_before_anything_runs(words: SGLangEngine) -> None:
    params = [{"max_new_tokens": 400, "ignore_eos": True}, {"regex": "(w1"}]
    with pytest.raises(EngineRejected, match=r"\(400\): regex cannot be compiled: .*parenthesis"):
        await words._call("POST", "/generate", {"input_ids": [[9], [9]], "sampling_params": params})
    assert (await words._call("GET", "/get_server_info"))["running"] == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "only one of regex, ebnf can be set"),
        ({"json_schema": {"type": "object"}}, "json_schema must be a string"),
    ],
)
def test_invalid_grammar_parameters_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_generate(
            {"input_ids": [1], "sampling_params": params}, RequestLimits(256, 512, has_tokenizer=True)
        )


def test_an_empty_grammar_counts_as_no_grammar() -> None:
    body = {"input_ids": [1], "sampling_params": {"regex": "", "json_schema": None}}
    ((generation,), _, _) = parse_generate(body, RequestLimits(256, 512, has_tokenizer=True))
    assert generation.sampling.grammar is None


def test_without_a_tokenizer_a_grammar_is_refused() -> None:
    body = {"input_ids": [1], "sampling_params": {"regex": "a"}}
    with pytest.raises(RequestError, match=r"regex needs a tokenizer\.json in the model folder"):
        parse_generate(body, RequestLimits(256, 512, has_tokenizer=False))


def test_a_grammar_needs_a_stop_token_if_the_model_has_no_end_token() -> None:
    vocabulary = Tokenizer.from_str(_WORDS)
    with pytest.raises(RequestError, match="give stop_token_ids"):
        Grammars(vocabulary, 8, ()).matcher(Grammar("regex", "b"), ())
    with pytest.raises(RequestError, match="stop token 8 is outside the vocabulary of 8"):
        Grammars(vocabulary, 8, ()).matcher(Grammar("regex", "b"), (8,))
    matcher = Grammars(vocabulary, 8, ()).matcher(Grammar("regex", "b"), (0,))
    assert np.flatnonzero(matcher.allowed()).tolist() == [1]
    matcher.accept(1)
    assert np.flatnonzero(matcher.allowed()).tolist() == [0]
    assert not matcher.ended
    matcher.accept(0)
    assert matcher.ended and not matcher.stuck


_WORDS = json.dumps(
    {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "a"}}
)
