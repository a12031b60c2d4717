"""Scores of given tokens: every server against transformers, the client's checks, and pools.

Every request has a unique id, because SGLang may abort a request whose id was used shortly before.
"""

from __future__ import annotations

import asyncio
import base64
import copy
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inference_support import (
    MAX_CONTEXT,
    PATIENCE_S,
    VOCAB,
    Target,
    fresh_ids,
    load_reference,
    prompt_of,
)
from real_sglang import running_sglang
from real_vllm import VLLMUrl
from transformers import PreTrainedModel

from areal_agents.core.completion import SamplingParams, TokenIds, as_token_ids
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference import PromptScores, SGLangEngine, running_engine
from areal_agents.inference.pool import EnginePool
from areal_agents.inference.sglang.scoring import scores_from_wire, scoring_to_wire

ATOL = 1e-4  # every server computes in float32


@torch.inference_mode()
def reference_table(model: PreTrainedModel, ids: TokenIds, start: int) -> np.ndarray:
    """Return logprobs [N, V] of transformers at positions `start` to P-1, with the softmax in float64."""
    logits = model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0, start - 1 : -1]
    return torch.log_softmax(logits.double(), dim=-1).numpy()


def assert_scores(scores: PromptScores, model: PreTrainedModel, ids: TokenIds, start: int, top: int) -> None:
    """Check that the scores are those of transformers."""
    table = reference_table(model, ids, start)
    rows = np.arange(len(table))
    assert (len(scores), scores.top_ids.shape) == (len(ids) - start, (len(ids) - start, top))
    np.testing.assert_allclose(scores.token_logprobs, table[rows, ids[start:]], atol=ATOL)
    np.testing.assert_allclose(scores.top_logprobs, -np.sort(-table, axis=1)[:, :top], atol=ATOL)
    # Two tokens whose logprobs differ by less than ATOL may be in either order.
    np.testing.assert_allclose(scores.top_logprobs, table[rows[:, None], scores.top_ids], atol=ATOL)


@pytest.fixture
async def engine(target: Target) -> AsyncIterator[SGLangEngine]:
    async with fresh_ids(target.url, request_timeout_s=PATIENCE_S) as client:
        yield client


@pytest.mark.parametrize("top", [0, 1, 8, 64])
async def test_scores_equal_transformers(engine: SGLangEngine, target: Target, top: int) -> None:
    ids = prompt_of(150, seed=80 + top)
    for start in (1, 77, 149):
        scores = await engine.score(f"s{top}-{start}", ids, start=start, top=top)
        assert_scores(scores, target.reference, ids, start, top)
        assert scores.version == 0


async def test_a_cached_prefix_changes_no_scores(engine: SGLangEngine, target: Target) -> None:
    """The prefix cache holds no logits, so a server has to compute the scored positions again."""
    ids = prompt_of(120, seed=81)
    first = await engine.score("c0", ids, start=1, top=4)
    await engine.generate("c1", ids, SamplingParams(5, temperature=0.0, ignore_eos=True))
    for start in (1, 60, 119):
        again = await engine.score(f"c2-{start}", ids, start=start, top=4)
        np.testing.assert_allclose(again.token_logprobs, first.token_logprobs[start - 1 :], atol=1e-5)
        assert_scores(again, target.reference, ids, start, 4)
    longer = as_token_ids(np.concatenate([ids, prompt_of(40, seed=82)]))
    assert_scores(await engine.score("c3", longer, start=90, top=4), target.reference, longer, 90, 4)


async def test_a_batch_is_scored_concurrently_beside_generation(engine: SGLangEngine, target: Target) -> None:
    """More sequences than slots, of different lengths, some with a common prefix."""
    common = prompt_of(64, seed=83)
    batch = [as_token_ids(np.concatenate([common, prompt_of(5 + 13 * i, seed=i)])) for i in range(6)]
    batch += [prompt_of(2 + 31 * i, seed=90 + i) for i in range(6)]
    starts = [1 + (7 * i) % (len(ids) - 1) for i, ids in enumerate(batch)]
    params = SamplingParams(60, temperature=0.0, ignore_eos=True)
    before = await engine.generate("g0", prompt_of(30, seed=84), params)
    drawn, *scored = await asyncio.gather(
        engine.generate("g1", prompt_of(30, seed=84), params),
        *(
            engine.score(f"b{i}", ids, start=start, top=i % 4)
            for i, (ids, start) in enumerate(zip(batch, starts, strict=True))
        ),
    )
    assert drawn.token_ids.tolist() == before.token_ids.tolist()
    for i, (ids, start, scores) in enumerate(zip(batch, starts, scored, strict=True)):
        assert_scores(scores, target.reference, ids, start, i % 4)


async def test_scores_of_sampled_tokens_are_the_logprobs_that_they_were_sampled_with(
    engine: SGLangEngine,
) -> None:
    prompt = prompt_of(40, seed=85)
    drawn = await engine.generate("d", prompt, SamplingParams(50, ignore_eos=True, seed=3))
    ids = as_token_ids(np.concatenate([prompt, drawn.token_ids]))
    scores = await engine.score("e", ids, start=len(prompt))
    np.testing.assert_allclose(scores.token_logprobs, drawn.logprobs, atol=2e-5)


async def test_every_id_of_the_vocabulary_can_be_scored(engine: SGLangEngine, target: Target) -> None:
    """The end-of-sequence token ends nothing here, and SGLang reports the last id as 0."""
    ids = as_token_ids([VOCAB - 1, 0, 2, VOCAB - 1, VOCAB - 1, 2, 0, 0, VOCAB - 1])
    scores = await engine.score("v", ids, start=1, top=VOCAB)
    assert_scores(scores, target.reference, ids, 1, VOCAB)
    assert (np.sort(scores.top_ids, axis=1) == np.arange(VOCAB)).all()


@pytest.mark.parametrize(
    ("ids", "start", "top", "message"),
    [
        ([], 1, 0, "input_ids is empty"),
        ([5], 1, 0, "below the 1 positions"),
        ([5, 6, 7], 0, 0, "start must be at least 1"),
        ([5, 6, 7], -1, 0, "start must be at least 1"),
        ([5, 6, 7], 3, 0, "below the 3 positions of input_ids, got 3"),
        ([5, 6, 7], 1, -1, "top must be from 0"),
        ([5, 6, 7], 1, VOCAB + 1, f"top must be from 0 to the vocabulary size, {VOCAB}"),
        ([5, VOCAB], 1, 0, f"token id {VOCAB} is outside"),
        ([5, -1], 1, 0, "token id -1 is outside"),
        ([7] * 5000, 1, 0, "context|maximum model length"),
    ],
)
async def test_invalid_scoring_requests_are_refused(
    engine: SGLangEngine, ids: list[int], start: int, top: int, message: str
) -> None:
    with pytest.raises(EngineRejected, match=message):
        await engine.score("r", as_token_ids(ids), start=start, top=top)
    await engine.health()


async def test_the_longest_sequence_that_an_engine_accepts_is_scored(
    engine: SGLangEngine, target: Target
) -> None:
    """The embedded engine scores a whole context, vLLM one token less, and SGLang 7 tokens less."""
    room = 0 if target.embedded else 1 if isinstance(target.url, VLLMUrl) else 7
    most = (await engine.model_info()).max_context - room
    ids = prompt_of(most, seed=86)
    assert_scores(await engine.score("m", ids, start=most - 40, top=2), target.reference, ids, most - 40, 2)
    with pytest.raises(EngineRejected):
        await engine.score("n", prompt_of(most + 1, seed=86), start=most - 40)
    await engine.health()


async def test_both_formats_of_top_logprobs_are_read(engine: SGLangEngine, target: Target) -> None:
    """The client requests arrays; a server that does not support them answers with lists."""
    ids = prompt_of(30, seed=87)
    body = scoring_to_wire(ids, 10, 3)
    plain = {name: value for name, value in body.items() if not name.startswith("return_flat")}
    both = []
    for asked in (body, plain):
        raw = await engine._call("POST", "/generate", asked)
        assert ("input_top_logprobs_val_flat_b64" in raw["meta_info"]) == (asked is body)
        assert ("input_top_logprobs" in raw["meta_info"]) == (asked is plain)
        assert raw["output_ids"] == [] and raw["meta_info"]["completion_tokens"] == 0
        assert raw["meta_info"]["input_token_logprobs"][0] == [None, int(ids[9]), None]
        both.append(scores_from_wire(raw, ids, start=10, top=3, vocab_size=VOCAB))
        assert_scores(both[-1], target.reference, ids, 10, 3)
    assert both[0].top_ids.tolist() == both[1].top_ids.tolist()


async def test_scores_are_of_the_version_that_is_served(
    engine: SGLangEngine, target: Target, next_model_folder: Path
) -> None:
    """No logits of the earlier weights are reused."""
    ids = prompt_of(90, seed=89)
    await engine.score("o", ids, start=1, top=2)
    await engine.pause("retract")
    await engine.update_weights_from_disk(str(next_model_folder), 1)
    await engine.resume()
    try:
        scores = await engine.score("p", ids, start=30, top=2)
        assert scores.version == 1
        assert_scores(scores, load_reference(next_model_folder), ids, 30, 2)
    finally:
        await engine.pause("retract")
        await engine.update_weights_from_disk(str(target.folder), 0)
        await engine.resume()


async def test_chunks_and_caches_change_no_score_of_the_numba_kernel(model_folder: Path) -> None:
    """Scores are bitwise equal for prompts computed in one step and in steps of 8 with reused prefixes."""
    prompt = prompt_of(200, seed=91)
    calls = [(prompt[:length], start) for length, start in ((200, 1), (150, 149), (200, 100), (80, 16))]
    found = []
    for options in (
        {"slots": 8, "prefill_tokens": 512, "prefix_cache": False},
        {"slots": 3, "prefill_tokens": 8, "prefix_cache": True},
    ):
        with running_engine(model_folder, threads=1, max_context=512, **options) as url:
            async with SGLangEngine(url) as engine:
                tasks = [
                    engine.score(f"k{i}", as_token_ids(ids), start=start, top=5)
                    for i, (ids, start) in enumerate(calls)
                ]
                found.append([await tasks[0], *await asyncio.gather(*tasks[1:])])
    for whole, chunked in zip(*found, strict=True):
        assert whole.token_logprobs.tolist() == chunked.token_logprobs.tolist()
        assert whole.top_ids.tolist() == chunked.top_ids.tolist()
        assert whole.top_logprobs.tolist() == chunked.top_logprobs.tolist()


async def check_chunks_and_pauses(url: str, reference: PreTrainedModel) -> None:
    """Score ranges that begin near the ends of chunks of 32, then a batch that is retracted 12 times."""
    async with SGLangEngine(url, request_timeout_s=PATIENCE_S) as engine:
        ids = prompt_of(200, seed=93)
        for start in (1, 31, 32, 33, 34, 63, 64, 65, 66, 199):
            scores = await engine.score(f"f{start}", ids, start=start, top=3)
            assert_scores(scores, reference, ids, start, 3)
        batch = [prompt_of(300 + 17 * i, seed=100 + i) for i in range(20)]
        calls = [
            asyncio.create_task(engine.score(f"h{i}", ids, start=1 + i, top=2)) for i, ids in enumerate(batch)
        ]
        for _ in range(12):  # after each pause, all running requests begin again
            await engine.pause("retract")
            await engine.resume()
            await asyncio.sleep(0.03)
        for i, (ids, scores) in enumerate(zip(batch, await asyncio.gather(*calls), strict=True)):
            assert_scores(scores, reference, ids, 1 + i, 2)


@pytest.mark.parametrize("kernel", ["numba", "torch"])
async def test_chunked_prefill_and_retractions_change_no_score(model_folder: Path, kernel: str) -> None:
    with running_engine(
        model_folder, kernel=kernel, threads=1, slots=6, max_context=MAX_CONTEXT, prefill_tokens=32
    ) as url:
        await check_chunks_and_pauses(url, load_reference(model_folder))


@pytest.mark.sglang
async def test_chunked_prefill_and_retractions_change_no_score_of_sglang(
    model_folder: Path, sglang_python: str
) -> None:
    with running_sglang(sglang_python, model_folder, "--chunked-prefill-size", "32") as url:
        await check_chunks_and_pauses(url, load_reference(model_folder))


# Two positions of a vocabulary of 1000, in both formats.
IDS = as_token_ids([4, 5, 6, 7])
LISTS: dict[str, Any] = {
    "text": "",
    "output_ids": [],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 0},
        "input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [-3.0, 7, None]],
        "input_top_logprobs": [
            None,
            [[-0.5, 6, None], [-2.0, 9, None]],
            [[-0.25, 8, None], [-2.5, 6, None]],
        ],
        "weight_version": "3",
    },
}


def packed(values: list[Any], dtype: str) -> str:
    return base64.b64encode(np.array(values, dtype).tobytes()).decode()


ARRAYS = copy.deepcopy(LISTS)
del ARRAYS["meta_info"]["input_top_logprobs"]
ARRAYS["meta_info"] |= {
    "input_top_logprobs_val_flat_b64": packed([-0.5, -2.0, -0.25, -2.5], "<f4"),
    "input_top_logprobs_val_flat_b64_dtype": "float32",
    "input_top_logprobs_idx_flat_b64": packed([6, 9, 8, 6], "<i4"),
    "input_top_logprobs_idx_flat_b64_dtype": "int32",
    "input_top_logprobs_shape": [2, 2],
    "input_top_logprobs_null_prefix": 1,
}


def read(raw: Any) -> PromptScores:
    return scores_from_wire(raw, IDS, start=2, top=2, vocab_size=1000)


@pytest.mark.parametrize("raw", [LISTS, ARRAYS], ids=["lists", "arrays"])
def test_an_answer_becomes_scores(raw: Any) -> None:
    scores = read(raw)
    assert scores.token_logprobs.tolist() == [-0.5, -3.0]
    assert scores.top_ids.tolist() == [[6, 9], [8, 6]]
    assert scores.top_logprobs.tolist() == [[-0.5, -2.0], [-0.25, -2.5]]
    assert scores.version == 3
    assert (scores.token_logprobs.dtype, scores.top_ids.dtype) == (np.float32, np.int32)
    assert not scores.top_logprobs.flags.writeable


Spoil = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m.pop("input_token_logprobs"), "returned no logprobs of prompt tokens, expected 3"),
        (lambda m: m["input_token_logprobs"].pop(), "returned 2 logprobs"),
        (lambda m: m["input_token_logprobs"].append([-1.0, 8, None]), "returned 4 logprobs"),
        (lambda m: m["input_token_logprobs"][1].__setitem__(1, 60), "the token 60 at position 2, expected 6"),
        (lambda m: m["input_token_logprobs"][1].__setitem__(1, 0), "the token 0 at position 2, expected 6"),
        (lambda m: m["input_token_logprobs"][1].__setitem__(1, 6.0), "no integers"),
        (lambda m: m["input_token_logprobs"][1].__setitem__(0, None), "finite"),
        (lambda m: m["input_token_logprobs"][1].__setitem__(0, float("-inf")), "finite"),
        (lambda m: m["input_token_logprobs"][2].__setitem__(0, 0.1), "at most 0"),
        (lambda m: m["input_token_logprobs"][2].__setitem__(0, "x"), "cannot be read"),
        (lambda m: m["input_token_logprobs"].__setitem__(1, None), "cannot be read"),
        (lambda m: m["input_token_logprobs"][1].__setitem__(0, -0.7), "contradicts the best tokens"),
        (lambda m: m["input_token_logprobs"][2].__setitem__(0, -2.0), "contradicts the best tokens"),
        (lambda m: m.update(weight_version="v2"), "expected an integer"),
        (lambda m: m.update(finish_reason=None), "finish_reason None"),
    ],
)
def test_scores_that_cannot_be_trusted_are_an_engine_error(spoil: Spoil, message: str) -> None:
    for form in (LISTS, ARRAYS):
        raw = copy.deepcopy(form)
        spoil(raw["meta_info"])
        with pytest.raises(EngineError, match=message):
            read(raw)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "no top logprobs"),
        ([None, [[-0.5, 6, None], [-2.0, 9, None]]], r"shape \(1, 2\)"),
        ([None, [[-0.5, 6, None]], [[-0.25, 8, None]]], r"shape \(2, 1\)"),
        ([None, [[-0.5, 6, None]], [[-0.25, 8, None], [-2.5, 6, None]]], "cannot be read"),
        ([None, [[-2.0, 9, None], [-0.5, 6, None]], [[-0.25, 8, None], [-2.5, 6, None]]], "ascend"),
        ([None, [[-0.5, 6, None], [-2.0, 6, None]], [[-0.25, 8, None], [-2.5, 6, None]]], "must differ"),
        ([None, [[-0.5, 6, None], [-0.6, 9, None]], [[-0.25, 8, None], [-2.5, 6, None]]], "add up to"),
        ([None, [[-0.5, 6, None], [None, 9, None]], [[-0.25, 8, None], [-2.5, 6, None]]], "finite"),
        ([None, [[-0.5, 6, None], [-2.0, 1000, None]], [[-0.25, 8, None], [-2.5, 6, None]]], "outside"),
        ([None, [[-0.5, 6, None], [-2.0, 2**32, None]], [[-0.25, 8, None], [-2.5, 6, None]]], "outside"),
        ([None, [[-0.5, 6, None], [-2.0, -1, None]], [[-0.25, 8, None], [-2.5, 6, None]]], "outside"),
        ([None, [[-0.5, 6.0, None], [-2.0, 9, None]], [[-0.25, 8, None], [-2.5, 6, None]]], "no integers"),
        ([None, None, [[-0.25, 8, None], [-2.5, 6, None]]], "cannot be read"),
        ([[[-0.5, 6, None]], [[-0.5, 6, None]], [[-0.25, 8, None]]], "after 0 empty"),
    ],
)
def test_top_logprobs_that_cannot_be_trusted_are_an_engine_error(rows: Any, message: str) -> None:
    raw = copy.deepcopy(LISTS)
    raw["meta_info"]["input_top_logprobs"] = rows
    with pytest.raises(EngineError, match=message):
        read(raw)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("input_top_logprobs_shape", [2, 3], "cannot be read"),
        ("input_top_logprobs_shape", [1, 4], r"shape \(1, 4\)"),
        ("input_top_logprobs_null_prefix", 0, "after 0 empty"),
        ("input_top_logprobs_val_flat_b64_dtype", "float16", "as float16, expected float32"),
        ("input_top_logprobs_val_flat_b64", "!", "cannot be read"),
        ("input_top_logprobs_idx_flat_b64", None, "cannot be read"),
        ("input_top_logprobs_idx_flat_b64", packed([6, 9, 8, 1000], "<i4"), "outside"),
    ],
)
def test_arrays_that_cannot_be_trusted_are_an_engine_error(name: str, value: Any, message: str) -> None:
    raw = copy.deepcopy(ARRAYS)
    raw["meta_info"][name] = value
    with pytest.raises(EngineError, match=message):
        read(raw)


def test_the_last_id_of_the_vocabulary_may_be_reported_as_0() -> None:
    raw = copy.deepcopy(ARRAYS)
    raw["meta_info"]["input_token_logprobs"][1][1] = 0
    with pytest.raises(EngineError, match="expected 6"):
        read(raw)
    raw["meta_info"]["input_top_logprobs_idx_flat_b64"] = packed([6, 2, 3, 6], "<i4")
    raw["meta_info"]["input_token_logprobs"] = [[None, 5, None], [-0.5, 6, None], [-3.0, 0, None]]
    scores = scores_from_wire(raw, IDS, start=2, top=2, vocab_size=8)
    assert scores.token_logprobs.tolist() == [-0.5, -3.0]


def test_an_aborted_scoring_request_is_an_error() -> None:
    raw = copy.deepcopy(LISTS)
    raw["meta_info"]["finish_reason"] = {"type": "abort", "message": "paused"}
    with pytest.raises(EngineUnavailable, match="aborted the scoring.*paused"):
        read(raw)
    raw["meta_info"]["finish_reason"] |= {"status_code": 400, "message": "too long"}
    with pytest.raises(EngineRejected, match="too long"):
        read(raw)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (([-1.0], [[1], [2]], [[-1.0], [-1.0]]), "must be"),
        (([[-1.0]], [[1]], [[-1.0]]), "must be"),
        (([-1.0], [1], [-1.0]), "must be"),
        (([-1.0], [[1, 2]], [[-1.0]]), "must be"),
        (([float("nan")], [[1]], [[-1.0]]), "finite"),
        (([-1.0], [[1]], [[0.5]]), "at most 0"),
        (([-1.0], [[1, 2]], [[-2.0, -1.0]]), "ascend"),
        (([-1.0], [[1, 2, 1]], [[-2.0, -2.0, -2.0]]), "differ"),
        (([-1.0], [[1, 2]], [[-0.5, -0.5]]), "add up to"),
    ],
)
def test_scores_are_checked_when_they_are_made(arrays: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptScores(*arrays, version=0)


class PlayedScorer:
    """The client of a server whose first calls fail with `failures`; it records the request ids."""

    def __init__(self, url: str) -> None:
        self.client = SGLangEngine(url)
        self.failures: list[EngineError] = []
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    async def score(self, rid: str, input_ids: TokenIds, **options: Any) -> PromptScores:
        self.asked.append(rid)
        if self.failures:
            raise self.failures.pop(0)
        return await self.client.score(rid, input_ids, **options)


async def test_a_pool_scores_on_one_replica_and_on_another_if_it_is_lost(model_folder: Path) -> None:
    ids = prompt_of(60, seed=92)
    options = {"threads": 1, "slots": 4, "max_context": MAX_CONTEXT}
    with running_engine(model_folder, **options) as one, running_engine(model_folder, **options) as two:
        scorers = [PlayedScorer(one), PlayedScorer(two)]
        pool = EnginePool(scorers)  # type: ignore[arg-type]
        try:
            scores = await pool.score("a", ids, start=20, top=3, affinity="episode")
            assert_scores(scores, load_reference(model_folder), ids, 20, 3)
            [first] = [scorer for scorer in scorers if scorer.asked]
            [other] = [scorer for scorer in scorers if not scorer.asked]
            first.asked.clear()
            first.failures = [EngineUnavailable("the connection is lost")]
            again = await pool.score("b", ids, start=20, top=3, affinity="episode")
            assert again.token_logprobs.tolist() == scores.token_logprobs.tolist()
            assert (first.asked, other.asked) == (["b"], ["b~1"])
            assert pool.counts.failovers == 1
            with pytest.raises(EngineRejected, match="start must be"):
                await pool.score("c", ids, start=60)
            batch = await asyncio.gather(*(pool.score(f"d{i}", ids, start=20, top=3) for i in range(8)))
            assert all(one.top_ids.tolist() == scores.top_ids.tolist() for one in batch)
            shares = [sum(rid.startswith("d") for rid in scorer.asked) for scorer in scorers]
            assert shares == [4, 4]  # the batch is spread by load
        finally:
            await pool.aclose()
