"""Random traffic through the scheduler: however it uses the slots, each output equals that of the request
alone."""

from __future__ import annotations

from pathlib import Path
from queue import Queue

import numpy as np
import pytest
from inference_support import EOS, PATIENCE_S, VOCAB
from test_architectures import make_runner

from areal_agents.core.completion import SamplingParams, TokenIds, as_token_ids
from areal_agents.inference.embedded.model.architecture import read_architecture
from areal_agents.inference.embedded.model.numba_runner import NumbaRunner
from areal_agents.inference.embedded.model.runner import ModelRunner
from areal_agents.inference.embedded.model.weights import load_weights
from areal_agents.inference.embedded.scheduling.request import Request
from areal_agents.inference.embedded.scheduling.scheduler import Scheduler
from areal_agents.inference.embedded.scheduling.worker import EngineThread, Notice


def make_scheduler(
    runner: ModelRunner, *, slots: int, prefill_tokens: int, prefix_cache: bool = True
) -> Scheduler:
    return Scheduler(
        runner,
        slots=slots,
        max_context=512,
        prefill_tokens=prefill_tokens,
        prefix_cache=prefix_cache,
        eos_ids=(EOS,),
        vocab_size=VOCAB,
        find_stop=lambda ids, stops: None,
        version="0",
    )


def submit(scheduler: Scheduler, prompt: TokenIds, seed: int, *, count: int = 20) -> Request:
    params = SamplingParams(count, temperature=0.9 if seed % 3 else 0.0, top_k=20 if seed % 5 == 0 else 0)
    request = Request(f"r{seed}", prompt, params, seed, notify=lambda _: None)
    scheduler.add(request)
    return request


def drawn_alone(runner: ModelRunner, request: Request) -> Request:
    """Run the same request in a scheduler with one slot and without a cache."""
    scheduler = make_scheduler(runner, slots=1, prefill_tokens=128, prefix_cache=False)
    alone = Request("alone", request.prompt, request.sampling, request.seed, notify=lambda _: None)
    scheduler.add(alone)
    while scheduler.has_work:
        scheduler.step()
    return alone


def grow(draw: np.random.Generator, known: list[TokenIds]) -> TokenIds:
    """Return a new prompt: a known prompt, often only a prefix of it, followed by new tokens."""
    base = known[draw.integers(len(known))]
    kept = base[: draw.integers(1, len(base) + 1)] if draw.random() < 0.7 else base
    fresh = draw.integers(8, VOCAB, draw.integers(0, 40))
    return as_token_ids(np.concatenate([kept, fresh])[:400])


@pytest.mark.parametrize("seed", range(4))
def test_with_random_traffic_each_output_is_bitwise_that_of_the_request_alone(
    seed: int, model_folder: Path
) -> None:
    draw = np.random.default_rng(seed)
    runner = make_runner("numba", model_folder, threads=2, slots=5)
    scheduler = make_scheduler(runner, slots=5, prefill_tokens=24)
    known = [as_token_ids(draw.integers(8, VOCAB, 150))]
    requests: list[Request] = []
    for number in range(60):
        requests.append(submit(scheduler, grow(draw, known), number))
        known.append(requests[-1].prompt)
        for _ in range(draw.integers(0, 8)):
            scheduler.step()
        event = draw.random()
        if event < 0.1:
            scheduler.pause("retract" if event < 0.05 else "in_place")
            scheduler.step()
            scheduler.resume()
        elif event < 0.15:
            scheduler.abort(requests[draw.integers(len(requests))].rid)
        known += [
            as_token_ids(np.concatenate([r.prompt, r.output_ids]))
            for r in requests[-3:]
            if r.finish is not None and len(r.output_ids)
        ]
    while scheduler.has_work:
        scheduler.step()

    fresh = make_runner("numba", model_folder, slots=1)
    reused = 0
    for request in requests:
        assert request.finish is not None
        alone = drawn_alone(fresh, request)
        count = len(request.output_ids)
        assert count == len(alone.output_ids) or request.finish.reason == "abort"
        assert request.output_ids.tolist() == alone.output_ids[:count].tolist()
        assert np.array_equal(request.output_logprobs, alone.output_logprobs[:count])
        reused += request.cached_tokens
    assert reused > 1000  # the requests did use the cache


def test_a_long_prompt_does_not_stall_decoding(model_folder: Path) -> None:
    """While 300 prompt tokens are computed 16 at a time, the running request gets a token at every step."""
    runner = make_runner("torch", model_folder)
    scheduler = make_scheduler(runner, slots=2, prefill_tokens=16)
    short = submit(scheduler, as_token_ids([9, 10, 11]), 1, count=40)
    scheduler.step()
    long = submit(scheduler, as_token_ids(np.arange(300) % 200 + 8), 2, count=5)
    for _ in range(10):
        scheduler.step()
    scheduler.abort(None)
    assert len(short.output_ids) == 11
    assert len(long.output_ids) == 0


def test_prompt_logprobs_survive_a_retraction_in_the_middle_of_the_prompt(model_folder: Path) -> None:
    runner = make_runner("numba", model_folder)
    prompt = as_token_ids(np.arange(100) % 60 + 8)
    results = []
    for paused in (False, True):
        scheduler = make_scheduler(runner, slots=2, prefill_tokens=16)
        request = Request("r", prompt, SamplingParams(3), 1, notify=lambda _: None, input_logprobs_from=0)
        scheduler.add(request)
        for _ in range(3):
            scheduler.step()
        if paused:
            scheduler.pause("retract")
            scheduler.weights_changed()
            scheduler.resume()
        while scheduler.has_work:
            scheduler.step()
        assert request.input_logprobs is not None
        results.append(request.input_logprobs[1:])
    assert np.isfinite(results[0]).all()
    assert np.array_equal(results[0], results[1])


def test_retracted_requests_keep_their_order(model_folder: Path) -> None:
    """Two requests in the slots, one waiting; after a retraction the first two are computed first again."""
    runner = make_runner("numba", model_folder)
    scheduler = make_scheduler(runner, slots=2, prefill_tokens=64)
    finished: list[str] = []
    for name, count in (("a", 6), ("b", 6), ("c", 6)):
        prompt = as_token_ids(np.arange(20) + 8 + 30 * (ord(name) - ord("a")))
        params = SamplingParams(count, temperature=0.0, ignore_eos=True)
        scheduler.add(Request(name, prompt, params, 0, notify=lambda r: finished.append(r.rid)))
    scheduler.step()
    scheduler.step()
    scheduler.pause("retract")
    scheduler.resume()
    while scheduler.has_work:
        scheduler.step()
    assert finished == ["a", "b", "c"]


def test_logits_that_are_not_finite_abort_the_request_and_affect_no_later_one(
    model_folder: Path,
) -> None:
    arch = read_architecture(model_folder)
    for kind in ("numba", "torch"):
        runner = make_runner(kind, model_folder)
        good = load_weights(model_folder, arch)
        scheduler = make_scheduler(runner, slots=2, prefill_tokens=64)
        before = submit(scheduler, as_token_ids(np.arange(90) + 8), 1)
        while scheduler.has_work:
            scheduler.step()
        good.final_norm[0] = float("nan")
        runner.load(good)
        scheduler.weights_changed()
        broken = submit(scheduler, as_token_ids(np.arange(90) + 8), 1)
        scheduler.step()
        scheduler.step()
        assert broken.finish is not None and broken.finish.reason == "abort"
        assert "not finite" in broken.finish.message
        assert len(broken.output_ids) == 0
        runner.load(load_weights(model_folder, arch))
        scheduler.weights_changed()
        after = submit(scheduler, as_token_ids(np.arange(90) + 8), 1)
        while scheduler.has_work:
            scheduler.step()
        assert after.output_ids.tolist() == before.output_ids.tolist()


def test_an_error_in_a_step_reaches_the_owner_of_the_thread(model_folder: Path) -> None:
    """A runner without weights cannot compute, and its error must be reported."""
    arch = read_architecture(model_folder)
    runner = NumbaRunner(arch, slots=1, max_context=64, max_rows=16, threads=1)
    failures: Queue[Exception] = Queue()
    thread = EngineThread(
        make_scheduler(runner, slots=1, prefill_tokens=8), deliver=lambda _: None, on_failure=failures.put
    )
    thread.start()
    request = Request("r", as_token_ids([9]), SamplingParams(1), 0, notify=thread.notify)
    thread.submit(lambda scheduler: scheduler.add(request))
    assert isinstance(failures.get(timeout=PATIENCE_S), AssertionError)
    thread.stop()


def test_a_cancelled_call_is_not_run_and_affects_no_later_one(model_folder: Path) -> None:
    """The caller disconnected while the call waited; the engine's thread continues."""
    failures: Queue[Exception] = Queue()
    thread = EngineThread(
        make_scheduler(make_runner("torch", model_folder), slots=1, prefill_tokens=8),
        deliver=lambda _: None,
        on_failure=failures.put,
    )
    cancelled = [thread.call(Scheduler.resume), thread.call_when_idle(lambda s: s.pause("abort"))]
    assert all(future.cancel() for future in cancelled)
    later = thread.call(lambda scheduler: scheduler.paused)
    thread.start()
    assert later.result(timeout=PATIENCE_S) is None
    thread.stop()
    assert failures.empty()


def test_a_notice_describes_the_step_in_which_it_was_made(model_folder: Path) -> None:
    """A notice may be read after later steps, when the request has already finished."""
    notices: Queue[list[Notice]] = Queue()
    thread = EngineThread(
        make_scheduler(make_runner("numba", model_folder), slots=1, prefill_tokens=8),
        deliver=notices.put,
        on_failure=lambda _: None,
    )
    request = Request("r", as_token_ids([9]), SamplingParams(5), 0, notify=thread.notify, streaming=True)
    thread.submit(lambda scheduler: scheduler.add(request))
    thread.start()
    read = [notices.get(timeout=PATIENCE_S)]
    while request.finish is None:
        read.append(notices.get(timeout=PATIENCE_S))
    thread.stop()
    read += [notices.get_nowait() for _ in range(notices.qsize())]
    finished = [notice.finished for batch in read for notice in batch]
    assert finished == [False] * (len(finished) - 1) + [True] and len(finished) == len(request.output_ids)
