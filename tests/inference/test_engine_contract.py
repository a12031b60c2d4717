"""What the client requires of every server: the embedded engine with either kernel, SGLang, and vLLM."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from inference_support import (
    EMBEDDED,
    EOS,
    EVERY_SERVER,
    OF_SGLANGS_PROTOCOL,
    PATIENCE_S,
    PLAIN_SGLANG,
    Missed,
    Target,
    again_if_missed,
    fresh_ids,
    load_reference,
    prompt_of,
    reference_greedy,
    reference_logprobs,
)

from areal_agents.core.completion import (
    Completion,
    Grammar,
    GrammarKind,
    SamplingParams,
    TokenChunk,
    TokenIds,
    as_logprobs,
    as_token_ids,
)
from areal_agents.errors import EngineRejected
from areal_agents.inference import PauseMode, SGLangEngine, running_engine
from areal_agents.inference.vllm.client import VLLMEngine

GREEDY = SamplingParams(40, temperature=0.0, ignore_eos=True)
STREAMING = [*EVERY_SERVER, PLAIN_SGLANG]  # both forms of chunks, from the embedded engine and from SGLang
STREAMED_GREEDILY = [  # a real SGLang on a CPU ignores seeds
    *(pytest.param(name, 0.0, marks=pytest.mark.sglang) for name in ("sglang", "sglang-plain")),
    *(pytest.param("vllm", t, marks=pytest.mark.vllm) for t in (0.0, 0.8)),
]
speaking_sglang = pytest.mark.parametrize("target", OF_SGLANGS_PROTOCOL, indirect=True)


@pytest.fixture
async def engine(target: Target) -> AsyncIterator[SGLangEngine]:
    async with fresh_ids(target.url, request_timeout_s=PATIENCE_S) as client:
        yield client


def assert_equal(a: Completion, b: Completion, atol: float = 1e-5) -> None:
    assert a.token_ids.tolist() == b.token_ids.tolist()
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=atol)


async def running(engine: SGLangEngine) -> int:
    """Return the number of running requests."""
    if isinstance(engine, VLLMEngine):
        metrics = await engine._call("GET", "/metrics")
        return int(float(re.search(r"^vllm:num_requests_running\{.*\} (.*)$", metrics, re.M)[1]))
    info = await engine._call("GET", "/get_server_info")
    if "running" not in info:  # a real SGLang reports it at another endpoint
        return (await engine._call("GET", "/v1/loads"))["loads"][0]["num_running_reqs"]
    return info["running"]


async def until_running(engine: SGLangEngine, *calls: asyncio.Task[Completion], count: int = 1) -> None:
    """Wait until `count` requests are running; raise Missed if the calls end before that is observed."""
    async with asyncio.timeout(PATIENCE_S):
        while await running(engine) < count:
            if sum(not call.done() for call in calls) < count:
                await asyncio.gather(*calls)  # raises the error of a call that failed
                raise Missed
            await asyncio.sleep(0.002)


def check_aborted(completion: Completion) -> None:
    """Check that a completion was aborted; raise Missed if it had reached its full length before."""
    if completion.finish_reason == "length":
        raise Missed
    assert completion.finish_reason == "abort"


async def until_idle(engine: SGLangEngine) -> None:
    """Wait until no request is running."""
    async with asyncio.timeout(PATIENCE_S):
        while await running(engine):
            await asyncio.sleep(0.005)


def assert_joined(pieces: list[TokenChunk], completion: Completion) -> None:
    """Check that the joined pieces equal the completion."""
    assert sum((piece.token_ids for piece in pieces), ()) == tuple(completion.token_ids.tolist())
    logprobs = as_logprobs(sum((piece.logprobs for piece in pieces), ()))
    assert logprobs.tolist() == completion.logprobs.tolist()
    assert sum((piece.top_logprobs for piece in pieces), ()) == completion.top_logprobs
    assert all(piece.token_ids for piece in pieces)


async def test_model_info(engine: SGLangEngine, target: Target) -> None:
    info = await engine.model_info()
    assert (info.model_path, info.version, info.vocab_size) == (str(target.folder), 0, 256)
    await engine.health()


async def test_greedy_equals_transformers_and_a_cached_prefix_changes_nothing(
    engine: SGLangEngine, target: Target
) -> None:
    prompt = prompt_of(90, seed=11)
    first = await engine.generate("g1", prompt, GREEDY)
    assert first.token_ids.tolist() == reference_greedy(target.reference, prompt, 40).tolist()
    assert first.finish_reason == "length"
    assert first.versions.tolist() == [0] * 40
    expected = reference_logprobs(target.reference, prompt, first.token_ids)
    np.testing.assert_allclose(first.logprobs, expected, atol=1e-5)

    assert_equal(await engine.generate("g2", prompt, GREEDY), first)
    turn = as_token_ids(np.concatenate([prompt, first.token_ids, prompt_of(9, seed=12)]))
    second = await engine.generate("g3", turn, GREEDY)
    assert second.token_ids.tolist() == reference_greedy(target.reference, turn, 40).tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
async def test_logprobs_are_those_of_the_distribution_after_temperature(
    engine: SGLangEngine, target: Target, temperature: float
) -> None:
    prompt = prompt_of(50, seed=13)
    params = SamplingParams(60, temperature=temperature, ignore_eos=True, seed=5)
    drawn = await engine.generate("t", prompt, params)
    expected = reference_logprobs(target.reference, prompt, drawn.token_ids, temperature=temperature)
    np.testing.assert_allclose(drawn.logprobs, expected, atol=2e-5)


@pytest.mark.parametrize("target", EMBEDDED, indirect=True)
async def test_a_seed_reproduces_a_completion_alone_and_beside_others(
    engine: SGLangEngine, target: Target
) -> None:
    """A real SGLang respects seeds only with --enable-deterministic-inference, which no CPU backend has."""
    prompt = prompt_of(40, seed=14)
    params = SamplingParams(50, ignore_eos=True, seed=99)
    alone = await engine.generate("s", prompt, params)
    crowd = [
        engine.generate(f"c{i}", prompt_of(20 + 30 * i, seed=i), SamplingParams(60, ignore_eos=True, seed=i))
        for i in range(8)
    ]
    again, *_ = await asyncio.gather(engine.generate("s", prompt, params), *crowd)
    assert_equal(again, alone)
    other = await engine.generate("s", prompt, SamplingParams(50, ignore_eos=True, seed=100))
    assert other.token_ids.tolist() != alone.token_ids.tolist()


async def test_more_requests_than_slots_all_equal_transformers(engine: SGLangEngine, target: Target) -> None:
    prompts = [prompt_of(10 + 17 * i, seed=20 + i) for i in range(14)]
    done = await asyncio.gather(*(engine.generate(f"m{i}", p, GREEDY) for i, p in enumerate(prompts)))
    for prompt, completion in zip(prompts, done, strict=True):
        assert completion.token_ids.tolist() == reference_greedy(target.reference, prompt, 40).tolist()


async def test_top_k_and_top_p_only_sample_what_they_allow(engine: SGLangEngine, target: Target) -> None:
    prompt = prompt_of(30, seed=15)
    for params in (
        SamplingParams(80, top_k=3, ignore_eos=True, seed=1),
        SamplingParams(80, top_p=0.3, ignore_eos=True, seed=2),
        SamplingParams(80, min_p=0.4, ignore_eos=True, seed=3),
    ):
        drawn = await engine.generate("k", prompt, params)
        logprobs = reference_logprobs(target.reference, prompt, drawn.token_ids)
        ranks = _ranked(target, prompt, drawn)
        if isinstance(engine, VLLMEngine):  # only vLLM's logprobs are of the truncated distribution
            logprobs = logprobs - np.log([sum(ranked[list(_allowed(ranked, params))]) for ranked in ranks])
        np.testing.assert_allclose(drawn.logprobs, logprobs, atol=2e-5)
        for token, ranked in zip(drawn.token_ids, ranks, strict=True):
            assert token in _allowed(ranked, params)
    assert len(set(drawn.token_ids.tolist())) > 1


def _ranked(target: Target, prompt: np.ndarray, drawn: Completion) -> list[np.ndarray]:
    """Return the probabilities [V] at each step."""
    import torch

    ids = torch.from_numpy(np.concatenate([prompt, drawn.token_ids]).astype(np.int64))[None]
    with torch.inference_mode():
        logits = target.reference(ids).logits[0, len(prompt) - 1 : -1]
    return list(torch.softmax(logits, dim=-1).numpy())


def _allowed(probs: np.ndarray, params: SamplingParams) -> set[int]:
    order = np.argsort(-probs)
    if params.top_k:
        return set(order[: params.top_k].tolist())
    if params.min_p:
        return set(np.flatnonzero(probs >= params.min_p * probs.max() * (1 - 1e-4)).tolist())
    before = np.cumsum(probs[order]) - probs[order]
    return set(order[before <= params.top_p + 1e-4].tolist())


async def test_penalties_reduce_repetitions(engine: SGLangEngine, target: Target) -> None:
    """Greedy sampling yields more different tokens with penalties than without."""
    params = SamplingParams(40, temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0, ignore_eos=True)
    plain = await engine.generate("p0", prompt_of(30, seed=16), GREEDY)
    penalised = await engine.generate("p1", prompt_of(30, seed=16), params)
    assert len(set(penalised.token_ids.tolist())) > len(set(plain.token_ids.tolist()))


async def test_a_stop_token_ends_the_completion_and_is_included(engine: SGLangEngine) -> None:
    prompt = prompt_of(60, seed=17)
    free = await engine.generate("f", prompt, GREEDY)
    stop_at = next(i for i in range(5, 40) if free.token_ids[i] not in free.token_ids[:i])
    stop_id = int(free.token_ids[stop_at])
    stopped = await engine.generate(
        "st", prompt, SamplingParams(40, temperature=0.0, stop_token_ids=(stop_id,))
    )
    assert stopped.token_ids.tolist() == free.token_ids[: stop_at + 1].tolist() or EOS in stopped.token_ids
    assert stopped.finish_reason == "stop"


async def test_the_end_of_sequence_token_ends_a_completion(engine: SGLangEngine, target: Target) -> None:
    """At temperature 1 and with a vocabulary of 256 tokens, some of the completions sample EOS."""
    prompt = prompt_of(30, seed=18)
    runs = await asyncio.gather(
        *(engine.generate(f"e{i}", prompt, SamplingParams(300, seed=i)) for i in range(24))
    )
    ended = [c for c in runs if c.finish_reason == "stop"]
    assert ended
    for completion in runs:
        inner = completion.token_ids if completion.finish_reason == "length" else completion.token_ids[:-1]
        assert EOS not in inner
    for completion in ended:
        assert completion.token_ids[-1] == EOS


async def test_a_stop_string_ends_the_completion_and_is_included_in_the_ids(
    engine: SGLangEngine, target: Target
) -> None:
    prompt = prompt_of(60, seed=19)
    free = await engine.generate("f", prompt, GREEDY)
    a, b = free.token_ids[6:8].tolist()
    stop = f"w{a}w{b}"
    text = "".join(f"w{i}" for i in free.token_ids)
    expected = next(n for n in range(1, 41) if stop in "".join(f"w{i}" for i in free.token_ids[:n]))
    assert stop in text
    params = SamplingParams(40, temperature=0.0, ignore_eos=True, stop=("never said", stop))
    stopped = await engine.generate("ss", prompt, params)
    assert stopped.token_ids.tolist() == free.token_ids[:expected].tolist()
    assert stopped.finish_reason == "stop"
    if isinstance(engine, VLLMEngine):
        return
    raw = await engine._call(
        "POST",
        "/generate",
        {
            "input_ids": prompt.tolist(),
            "sampling_params": {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True, "stop": stop},
        },
    )
    assert raw["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert raw["text"] == text[: text.index(stop)]


@pytest.mark.parametrize(
    ("target", "temperature"),
    [*((kernel, t) for kernel in EMBEDDED for t in (0.0, 0.8)), *STREAMED_GREEDILY],
    indirect=["target"],
)
@again_if_missed
async def test_a_streamed_completion_equals_one_that_is_not_streamed(
    engine: SGLangEngine, target: Target, temperature: float
) -> None:
    prompt = prompt_of(45, seed=50)
    params = SamplingParams(120, temperature=temperature, ignore_eos=True, seed=8, top_logprobs=2)
    whole = await engine.generate("w", prompt, params)
    pieces: list[TokenChunk] = []
    streamed = await engine.generate("s", prompt, params, pieces.append)
    if len(pieces) <= 2:  # on a stalled machine the reader finds the tokens of many steps in one piece
        raise Missed
    assert_joined(pieces, streamed)
    exact = (await engine.model_info()).kernel == "numba"
    assert_equal(streamed, whole, atol=0.0 if exact else 1e-5)
    assert streamed.versions.tolist() == whole.versions.tolist()
    assert streamed.finish_reason == whole.finish_reason == "length"
    assert [[i for i, _ in row] for row in streamed.top_logprobs] == [
        [i for i, _ in row] for row in whole.top_logprobs
    ]


@pytest.mark.parametrize("target", STREAMING, indirect=True)
async def test_many_concurrent_streams_equal_transformers(engine: SGLangEngine, target: Target) -> None:
    pieces: list[list[TokenChunk]] = [[] for _ in range(12)]
    calls = [
        engine.generate(f"n{i}", prompt_of(10 + 9 * i, seed=60 + i), GREEDY, pieces[i].append)
        for i in range(12)
    ]
    for i, completion in enumerate(await asyncio.gather(*calls)):
        assert_joined(pieces[i], completion)
        expected = reference_greedy(target.reference, prompt_of(10 + 9 * i, seed=60 + i), 40)
        assert completion.token_ids.tolist() == expected.tolist()


LONG = SamplingParams(1900, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("target", STREAMING, indirect=True)
@again_if_missed
async def test_a_stream_ends_on_an_error_of_its_reader_a_cancellation_or_an_abort(
    engine: SGLangEngine,
) -> None:
    """After an abort by its request id, the reader has the tokens sampled so far."""

    def refuse(piece: TokenChunk) -> None:
        raise ArithmeticError("enough")

    with pytest.raises(ArithmeticError, match="enough"):
        await engine.generate("l1", prompt_of(30, seed=51), LONG, refuse)
    await until_idle(engine)

    begun = asyncio.Event()
    task = asyncio.create_task(engine.generate("l2", prompt_of(30, seed=51), LONG, lambda piece: begun.set()))
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    if not task.cancel():
        raise Missed
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle(engine)

    begun.clear()
    pieces: list[TokenChunk] = []

    def take(piece: TokenChunk) -> None:
        pieces.append(piece)
        begun.set()

    task = asyncio.create_task(engine.generate("l3", prompt_of(30, seed=51), LONG, take))
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    await engine.abort("l3")
    completion = await asyncio.wait_for(task, PATIENCE_S)
    check_aborted(completion)
    assert 0 < len(completion) < 1900
    assert_joined(pieces, completion)


async def test_top_logprobs_are_of_the_distribution_that_is_sampled_from(
    engine: SGLangEngine, target: Target
) -> None:
    prompt = prompt_of(33, seed=52)
    params = SamplingParams(12, temperature=0.7, ignore_eos=True, seed=4, top_logprobs=5)
    drawn = await engine.generate("top", prompt, params)
    table = reference_table(target, prompt, drawn.token_ids, temperature=0.7)
    for row, best in zip(table, drawn.top_logprobs, strict=True):
        assert [token for token, _ in best] == np.argsort(-row, kind="stable")[:5].tolist()
        np.testing.assert_allclose([logprob for _, logprob in best], np.sort(row)[::-1][:5], atol=2e-5)
    assert (await engine.generate("none", prompt, GREEDY)).top_logprobs == ()


def reference_table(
    target: Target,
    prompt: TokenIds,
    output: TokenIds,
    *,
    temperature: float = 1.0,
    allowed: list[list[int]] | None = None,
) -> np.ndarray:
    """Return logprobs [C, V] at each output position, of the `allowed` tokens only if these are given."""
    import torch

    ids = torch.from_numpy(np.concatenate([prompt, output]).astype(np.int64))[None]
    with torch.inference_mode():
        logits = target.reference(ids).logits[0, len(prompt) - 1 : -1] / temperature
        for row, tokens in enumerate(allowed or []):
            excluded = torch.ones(logits.shape[1], dtype=torch.bool)
            excluded[tokens] = False
            logits[row, excluded] = float("-inf")
        return torch.log_softmax(logits, dim=-1).numpy()


# Five words of w3 to w9, then the end. The end-of-sequence token is the word w2.
FIVE_WORDS = {
    "regex": "(w[3-9]){5}",
    "ebnf": 'root ::= word word word word word\nword ::= "w" [3-9]',
    "structural_tag": json.dumps(
        {"type": "structural_tag", "format": {"type": "regex", "pattern": "(w[3-9]){5}"}}
    ),
}


@pytest.mark.parametrize("target", STREAMING, indirect=True)
@pytest.mark.parametrize("kind", FIVE_WORDS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_a_grammar_is_kept_and_logprobs_are_of_what_it_allows(
    engine: SGLangEngine, target: Target, kind: GrammarKind, temperature: float
) -> None:
    prompt = prompt_of(40, seed=53)
    params = SamplingParams(
        20, temperature=temperature, seed=6, grammar=Grammar(kind, FIVE_WORDS[kind]), top_logprobs=9
    )
    pieces: list[TokenChunk] = []
    beside = asyncio.create_task(engine.generate("free", prompt, GREEDY))
    drawn, streamed = await asyncio.gather(
        engine.generate("g1", prompt, params), engine.generate("g2", prompt, params, pieces.append)
    )
    words = list(range(3, 10))
    for completion in (drawn, streamed):
        assert completion.finish_reason == "stop"
        assert len(completion) == 6
        assert set(completion.token_ids[:5].tolist()) <= set(words)
        assert completion.token_ids[5] == EOS
        allowed = [words] * 5 + [[EOS]]
        table = reference_table(
            target, prompt, completion.token_ids, temperature=temperature or 1.0, allowed=allowed
        )
        expected = table[np.arange(6), completion.token_ids]
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)
        for row, best in zip(table, completion.top_logprobs, strict=True):
            assert [i for i, _ in best] == np.argsort(-row, kind="stable")[: len(best)].tolist()
        assert [len(best) for best in completion.top_logprobs] == [7] * 5 + [1]
    assert_joined(pieces, streamed)
    unconstrained = await beside
    assert unconstrained.token_ids.tolist() == reference_greedy(target.reference, prompt, 40).tolist()


async def test_the_length_limit_ends_an_output_with_a_grammar(engine: SGLangEngine) -> None:
    params = SamplingParams(4, seed=1, grammar=Grammar("regex", FIVE_WORDS["regex"]))
    completion = await engine.generate("short", prompt_of(12, seed=54), params)
    assert (len(completion), completion.finish_reason) == (4, "length")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(w1"),
        ("json_schema", '{"type": "nonsense"}'),
        ("json_schema", "{"),
        ("ebnf", "root ::= "),
        ("structural_tag", '{"type": "structural_tag"}'),
    ],
)
async def test_a_malformed_grammar_is_refused(engine: SGLangEngine, kind: GrammarKind, text: str) -> None:
    params = SamplingParams(4, grammar=Grammar(kind, text))
    with pytest.raises(EngineRejected, match=kind if kind != "json_schema" else "json|Grammar error"):
        await engine.generate("bad", prompt_of(12), params)
    with pytest.raises(EngineRejected):
        await engine.generate("worse", prompt_of(12), params, lambda piece: None)
    await engine.health()


@speaking_sglang
async def test_prompt_logprobs_equal_transformers(engine: SGLangEngine, target: Target) -> None:
    prompt = prompt_of(70, seed=21)
    await engine.generate("warm", prompt, GREEDY)
    for start in (0, 25):
        raw = await engine._call(
            "POST",
            "/generate",
            {
                "input_ids": prompt.tolist(),
                "return_logprob": True,
                "logprob_start_len": start,
                "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True},
            },
        )
        triples = raw["meta_info"]["input_token_logprobs"]
        assert [t[1] for t in triples] == prompt[start:].tolist()
        expected = reference_logprobs(target.reference, prompt[: start + 1], prompt[start + 1 :])
        np.testing.assert_allclose([t[0] for t in triples[1:]], expected, atol=1e-5)
        assert triples[0][0] is None


@speaking_sglang
async def test_a_batch_is_answered_in_order(engine: SGLangEngine, target: Target) -> None:
    prompts = [prompt_of(n, seed=22) for n in (5, 50, 20)]
    raw = await engine._call(
        "POST",
        "/generate",
        {
            "input_ids": [p.tolist() for p in prompts],
            "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True},
        },
    )
    assert [r["output_ids"] for r in raw] == [
        reference_greedy(target.reference, p, 5).tolist() for p in prompts
    ]


@again_if_missed
async def test_abort_returns_what_was_sampled(engine: SGLangEngine, target: Target) -> None:
    prompt = prompt_of(30, seed=23)
    task = asyncio.create_task(
        engine.generate("long", prompt, SamplingParams(1900, temperature=0.0, ignore_eos=True))
    )
    await until_running(engine, task)
    await engine.abort("long")
    completion = await task
    check_aborted(completion)
    assert len(completion) < 1900
    count = len(completion)
    assert (
        completion.token_ids.tolist()
        == reference_greedy(target.reference, prompt, max(count, 1))[:count].tolist()
    )
    await engine.abort("nobody")


@again_if_missed
async def test_an_abort_ends_no_request_whose_id_has_the_same_prefix(engine: SGLangEngine) -> None:
    """A real SGLang aborts all requests whose ids begin with the given one."""
    params = SamplingParams(400, temperature=0.0, ignore_eos=True)
    one = asyncio.create_task(engine.generate("k1", prompt_of(30, seed=24), LONG))
    other = asyncio.create_task(engine.generate("k10", prompt_of(31, seed=24), params))
    await until_running(engine, one, other, count=2)
    await engine.abort("k1")
    aborted, whole = await asyncio.gather(one, other)
    check_aborted(aborted)
    assert whole.finish_reason == "length"
    again = await engine.generate("k100", prompt_of(30, seed=24), GREEDY)
    assert (len(again), again.finish_reason) == (40, "length")


@pytest.mark.parametrize(
    ("target", "mode"),
    [
        *((kernel, mode) for kernel in EMBEDDED for mode in ("retract", "in_place")),
        pytest.param("sglang", "retract", marks=pytest.mark.sglang),
        pytest.param("vllm", "retract", marks=pytest.mark.vllm),
        pytest.param("sglang-plain", "in_place", marks=pytest.mark.sglang),
    ],
    indirect=["target"],
)
@again_if_missed
async def test_a_pause_without_a_swap_changes_nothing(
    engine: SGLangEngine, target: Target, mode: PauseMode
) -> None:
    prompts = [prompt_of(20 + 40 * i, seed=30 + i) for i in range(9)]  # more than there are slots
    sampled = int(target.embedded)  # only the embedded engine respects seeds
    params = [
        SamplingParams(300, temperature=float(i % 2 * sampled), ignore_eos=True, seed=i) for i in range(9)
    ]
    calls = list(zip(prompts, params, strict=True))
    calm = await asyncio.gather(*(engine.generate(f"calm{i}", *call) for i, call in enumerate(calls)))
    tasks = [asyncio.create_task(engine.generate(f"q{i}", *call)) for i, call in enumerate(calls)]
    await until_running(engine, *tasks, count=2)
    for _ in range(3):
        await engine.pause(mode)
        await asyncio.sleep(0.01)
        if all(task.done() for task in tasks):
            raise Missed
        await engine.resume()
    for paused, expected in zip(await asyncio.gather(*tasks), calm, strict=True):
        assert_equal(paused, expected)


@again_if_missed
async def test_pause_abort_ends_running_requests_and_holds_new_ones(
    engine: SGLangEngine, target: Target
) -> None:
    running = asyncio.create_task(
        engine.generate("r", prompt_of(30), SamplingParams(1900, temperature=0.0, ignore_eos=True))
    )
    await until_running(engine, running)
    await engine.pause("abort")
    check_aborted(await running)
    held = asyncio.create_task(engine.generate("h", prompt_of(30), GREEDY))
    await asyncio.sleep(0.1)
    assert not held.done()
    await engine.resume()
    assert (await held).token_ids.tolist() == reference_greedy(target.reference, prompt_of(30), 40).tolist()


async def test_ids_outside_the_vocabulary_are_refused_before_they_are_sent(engine: SGLangEngine) -> None:
    for wrong in (256, -1):
        with pytest.raises(EngineRejected, match=f"token id {wrong} is outside"):
            await engine.generate("w", as_token_ids([3, wrong]), GREEDY)
    await engine.health()


@speaking_sglang
@again_if_missed
async def test_a_duplicate_rid_and_a_prompt_too_long_are_refused(engine: SGLangEngine) -> None:
    running = asyncio.create_task(
        engine.generate("same", prompt_of(30), SamplingParams(1500, temperature=0.0, ignore_eos=True))
    )
    await until_running(engine, running)
    try:
        await engine.generate("same", prompt_of(30), GREEDY)
    except EngineRejected as refused:
        assert "same" in str(refused)
    else:
        await running
        raise Missed
    await engine.abort("same")
    check_aborted(await running)
    with pytest.raises(EngineRejected, match="context"):
        await engine.generate("l", prompt_of(5000), GREEDY)
    await engine.health()


async def test_chunked_prefill_and_the_prefix_cache_change_no_completion(model_folder: Path) -> None:
    """Compares prompts computed in one step, without a cache, with reused prefixes and small chunks."""
    prompt = prompt_of(200, seed=40)
    calls = [
        as_token_ids(np.concatenate([prompt[:n], prompt_of(30, seed=n)])) for n in (200, 120, 200, 80, 0, 120)
    ]
    params = SamplingParams(30, ignore_eos=True, seed=3)

    async def run(url: str) -> list[Completion]:
        async with SGLangEngine(url) as engine:
            first = [await engine.generate(f"a{i}", ids, params) for i, ids in enumerate(calls[:2])]
            rest = [engine.generate(f"b{i}", ids, params) for i, ids in enumerate(calls[2:])]
            return first + list(await asyncio.gather(*rest))

    plain = {"slots": 8, "prefill_tokens": 512, "prefix_cache": False}
    reusing = {"slots": 3, "prefill_tokens": 8, "prefix_cache": True}
    results = []
    for options in (plain, reusing):
        with running_engine(model_folder, threads=1, max_context=512, **options) as url:
            results.append(await run(url))
    for a, b in zip(*results, strict=True):
        assert_equal(a, b, atol=0.0)
    expected = reference_logprobs(load_reference(model_folder), calls[0], results[0][0].token_ids)
    np.testing.assert_allclose(results[0][0].logprobs, expected, atol=1e-5)
