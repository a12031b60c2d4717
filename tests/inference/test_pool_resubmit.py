"""A completion in several attempts: what is kept, what is requested next, and what cannot continue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from pool_support import QUICK, Part, PlayedEngine, chain, prompt_of, text_of

from areal_agents.core.completion import Completion, Grammar, SamplingParams, TokenChunk
from areal_agents.errors import EngineUnavailable
from areal_agents.inference.continuation import Decode, PartialCompletion
from areal_agents.inference.pool import EnginePool
from areal_agents.inference.pool.suspects import MOST_STALLS, attempt_rid

PROMPT = prompt_of(1)
TWENTY = SamplingParams(20, ignore_eos=True)
GRAMMAR = Grammar("regex", "[a-z]+")


@asynccontextmanager
async def pool_of(engine: PlayedEngine, decode: Decode | None = None) -> AsyncIterator[EnginePool]:
    pool = EnginePool([engine], decode=decode, limits=QUICK)
    try:
        yield pool
    finally:
        await pool.aclose()


async def draw(
    *parts: Part, sampling: SamplingParams = TWENTY, streamed: bool = False, decode: Any = text_of
) -> tuple[Completion, PlayedEngine, list[int]]:
    """Return a completion of a pool with one engine, that engine, and the tokens streamed to the caller."""
    engine, got = PlayedEngine(list(parts)), []
    taken = (lambda chunk: got.extend(chunk.token_ids)) if streamed else None
    async with pool_of(engine, decode) as pool:
        completion = await pool.generate("r", PROMPT, sampling, taken)
    return completion, engine, got


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_aborted_generation_continues_after_its_last_token(streamed: bool) -> None:
    parts = [Part(7, versions=(1, 1, 1, 2)), Part(0), Part(6, versions=(2, 3)), Part(99, "length", (4,))]
    completion, engine, got = await draw(*parts, streamed=streamed)
    whole = chain(PROMPT.tolist(), 20)
    assert completion.token_ids.tolist() == whole
    assert completion.versions.tolist() == [1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, *[4] * 7]
    assert completion.logprobs.tolist() == [-(token % 32) / 8 for token in whole]
    assert completion.finish_reason == "length"
    assert got == (whole if streamed else [])
    assert [ids for _, ids, _ in engine.asked] == [[*PROMPT, *whole[:n]] for n in (0, 7, 7, 13)]
    assert [sampling.max_new_tokens for _, _, sampling in engine.asked] == [20, 13, 13, 7]
    assert len({rid for rid, _, _ in engine.asked}) == 4  # the engine may still know the earlier ids


async def test_the_seed_and_the_other_parameters_are_the_same_in_later_attempts() -> None:
    sampling = SamplingParams(20, seed=5, temperature=0.0, top_p=0.5, top_logprobs=2, stop_token_ids=(9,))
    completion, engine, _ = await draw(Part(5), Part(99, "length"), sampling=sampling)
    rest = engine.asked[1][2]
    assert rest == SamplingParams(15, seed=5, temperature=0.0, top_p=0.5, top_logprobs=2, stop_token_ids=(9,))
    assert [best[0][0] for best in completion.top_logprobs] == completion.token_ids.tolist()


async def test_a_request_that_its_caller_aborts_is_not_continued() -> None:
    engine = PlayedEngine([Part(5), Part(4), Part(99, "length")])
    async with pool_of(engine) as pool:
        engine.on_part = lambda index: pool.abort("r") if index == 1 else None
        completion = await pool.generate("r", PROMPT, TWENTY)
    assert completion.finish_reason == "abort" and len(completion) == 9
    assert engine.aborted == [engine.asked[1][0]]  # under the request id that the engine knows


async def test_a_request_is_given_up_after_several_aborts_without_a_token() -> None:
    engine = PlayedEngine([Part(5), Part(0)])
    async with pool_of(engine) as pool:
        with pytest.raises(EngineUnavailable, match="without a token"):
            await pool.generate("r", PROMPT, TWENTY)
    assert len(engine.asked) == MOST_STALLS + 2


async def test_a_request_that_gets_a_token_now_and_then_is_not_given_up() -> None:
    parts = [part for _ in range(20) for part in (Part(1), Part(0))]
    completion, _, _ = await draw(*parts)
    assert completion.token_ids.tolist() == chain(PROMPT.tolist(), 20)


@pytest.mark.parametrize(
    "constraint", [{"grammar": GRAMMAR}, {"frequency_penalty": 0.5}, {"presence_penalty": -0.5}]
)
async def test_outputs_with_a_grammar_or_penalties_are_sampled_again_from_the_start(constraint: Any) -> None:
    sampling = SamplingParams(20, ignore_eos=True, **constraint)
    completion, engine, _ = await draw(Part(5), Part(0), Part(99, "length", (3,)), sampling=sampling)
    assert completion.versions.tolist() == [3] * 20
    assert [ids for _, ids, _ in engine.asked] == [PROMPT.tolist()] * 3
    with pytest.raises(EngineUnavailable, match="cannot be continued"):
        await draw(Part(5), Part(99, "length"), sampling=sampling, streamed=True)
    # Before the first token nothing has been streamed.
    _, _, got = await draw(Part(0), Part(99, "length"), sampling=sampling, streamed=True)
    assert len(got) == 20


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("cut", range(1, 6))
async def test_a_stop_string_across_the_boundary_of_two_attempts_ends_the_completion(
    streamed: bool, cut: int
) -> None:
    """The boundary is at several positions within and before the tokens that spell the stop string."""
    whole = chain(PROMPT.tolist(), 20)
    stop = text_of(whole[6:9])
    end = next(n for n in range(1, 20) if stop in text_of(whole[:n]))
    sampling = SamplingParams(20, ignore_eos=True, stop=(stop,))
    boundary = end - cut
    completion, _, got = await draw(
        Part(boundary), Part(99, "length", (1,), chunk=3), sampling=sampling, streamed=streamed
    )
    assert completion.token_ids.tolist() == whole[:end]
    assert completion.finish_reason == "stop"
    assert completion.versions.tolist() == [0] * boundary + [1] * (end - boundary)
    assert got == (whole[:end] if streamed else [])


async def test_a_stop_string_that_spans_more_than_two_attempts_is_found() -> None:
    whole = chain(PROMPT.tolist(), 20)
    stop = text_of(whole[6:9])
    sampling = SamplingParams(20, ignore_eos=True, stop=(stop,))
    end = next(n for n in range(1, 20) if stop in text_of(whole[:n]))
    completion, _, _ = await draw(Part(7), Part(1), Part(99, "length"), sampling=sampling)
    assert completion.token_ids.tolist() == whole[:end] and completion.finish_reason == "stop"


async def test_without_a_tokenizer_outputs_with_stop_strings_are_sampled_again_from_the_start() -> None:
    sampling = SamplingParams(20, ignore_eos=True, stop=("never said",))
    completion, engine, _ = await draw(Part(5), Part(99, "length", (2,)), sampling=sampling, decode=None)
    assert completion.versions.tolist() == [2] * 20
    assert engine.asked[1][1] == PROMPT.tolist()


def unfinished_of(
    *chunks: TokenChunk, sampling: SamplingParams = TWENTY, streamed: bool = True
) -> PartialCompletion:
    unfinished = PartialCompletion(PROMPT, sampling, (lambda chunk: None) if streamed else None, text_of)
    unfinished.begin(attempt_rid("r", 0))
    for chunk in chunks:
        unfinished.take(chunk)
    return unfinished


def test_tokens_whose_version_is_not_certain_are_sampled_again() -> None:
    sure, unsure = TokenChunk((5, 6), (-1.0, -2.0), (), (3, 3)), TokenChunk((7,), (-1.0,), (), (-1,))
    unfinished = unfinished_of(sure, unsure, TokenChunk((8,), (-1.0,), (), (4,)), streamed=False)
    assert unfinished.interrupted(None) is None
    assert unfinished.kept == 2 and unfinished.newest == 3
    assert unfinished.input_ids.tolist() == [*PROMPT.tolist(), 5, 6]
    with pytest.raises(EngineUnavailable, match="policy version.*not known"):
        unfinished_of(sure, unsure).interrupted(None)


def test_a_lost_engine_that_had_sampled_everything_needs_no_replacement() -> None:
    chunk = TokenChunk(tuple(range(400, 420)), (-1.0,) * 20, (), (3,) * 20)
    whole = unfinished_of(chunk).interrupted(None)
    assert whole is not None and whole.finish_reason == "length" and len(whole) == 20
    sampling = SamplingParams(20, stop_token_ids=(401,))
    whole = unfinished_of(TokenChunk((400, 401), (-1.0, -1.0), (), (3, 3)), sampling=sampling).interrupted(
        None
    )
    assert whole is not None and whole.finish_reason == "stop" and len(whole) == 2


async def test_the_routed_experts_of_several_attempts_are_joined() -> None:
    first = Completion([400, 401], [-1.0, -1.0], [0, 0], "abort", (), np.zeros((13, 1, 1), np.int16))
    unfinished = PartialCompletion(PROMPT, SamplingParams(4, routed_experts_from=0))
    unfinished.begin("r")
    assert unfinished.interrupted(first) is None
    again = np.ones((15, 1, 1), np.int16)  # the second engine computes the prompt and the first part again
    rest = Completion([402, 403], [-1.0, -1.0], [1, 1], "length", (), again)
    routed = unfinished.finished(rest).routed_experts
    assert routed is not None and routed[:, 0, 0].tolist() == [0] * 13 + [1] * 2


async def test_cancelling_the_call_cancels_the_running_attempt() -> None:
    engine, started = PlayedEngine([Part(3), Part(3)]), asyncio.Event()

    async def hang(index: int) -> None:
        if index == 1:
            started.set()
            await asyncio.sleep(60)

    engine.on_part = hang
    async with pool_of(engine) as pool:
        call = asyncio.create_task(pool.generate("r", PROMPT, TWENTY))
        await started.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert len(engine.asked) == 2


def test_a_pool_needs_an_engine() -> None:
    with pytest.raises(ValueError, match="needs an engine"):
        EnginePool([])
