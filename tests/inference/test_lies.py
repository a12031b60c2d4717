"""Engines that give invalid answers: none is accepted, and a request that always gets one affects no other
request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pool_support import MODEL, QUICK, TOKENIZER, Rows

from areal_agents.core.completion import (
    Completion,
    Grammar,
    SamplingParams,
    TokenChunk,
    TokenIds,
    as_token_ids,
)
from areal_agents.errors import EngineError, EngineUnavailable
from areal_agents.inference import SGLangEngine
from areal_agents.inference.answers import SentRequest, check_logprobs, checked_spans, end_ids_of
from areal_agents.inference.pool import EnginePool
from areal_agents.inference.pool.replica import Replica
from areal_agents.testing import LIES, ScriptedApp, ScriptedCall, ScriptedReply, running
from areal_agents.testing.invalid_answers import Form

TEXT = "one two three four"
STOP = 2
SAMPLING = SamplingParams(64, stop_token_ids=(STOP,))
TRUTH = [*TOKENIZER.encode(TEXT, add_special_tokens=False).ids, STOP]
TOLD = [(name, form) for name, lie in LIES.items() for form in sorted(lie.forms)]


def prompt(text: str) -> TokenIds:
    return as_token_ids(TOKENIZER.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[Form, tuple[ScriptedApp, str]]]:
    apps = {
        incremental: ScriptedApp.from_folder(MODEL, lambda call: TEXT, incremental=incremental, keep=0)
        for incremental in (False, True)
    }
    with running(apps[False]) as cumulative, running(apps[True]) as incremental:
        yield {
            "whole": (apps[False], cumulative),
            "cumulative": (apps[False], cumulative),
            "incremental": (apps[True], incremental),
        }


@asynccontextmanager
async def pool_over(url: str, rows: Rows | None = None, **limits: Any) -> AsyncIterator[EnginePool]:
    """A pool with one serving engine."""

    def decode(ids: Any) -> str:
        return TOKENIZER.decode(list(ids), skip_special_tokens=False)

    pool = EnginePool(
        [SGLangEngine(url, decode=decode)],
        current=rows or Rows(),
        decode=decode,
        limits=replace(QUICK, **limits),
    )
    try:
        await pool.model_info()
        yield pool
    finally:
        await pool.aclose()


@pytest.mark.parametrize("published", [True, False], ids=["published", "no-trainer"])
@pytest.mark.parametrize(("lie", "form"), TOLD)
async def test_no_invalid_answer_is_accepted(
    engines: dict[Form, tuple[ScriptedApp, str]], lie: str, form: Form, published: bool
) -> None:
    """The request is repeated; if a part was streamed to the caller already, the call fails instead."""
    app, url = engines[form]
    calls = 0

    def once(call: ScriptedCall) -> ScriptedReply:
        nonlocal calls
        calls += 1
        return ScriptedReply(TEXT, lie=lie if calls == 1 else "")

    app.script = once
    rows = Rows()
    if published:
        rows.publish(0)
    chunks: list[TokenChunk] = []
    async with pool_over(url, rows) as pool:
        generation = pool.generate("r", prompt("hello"), SAMPLING, None if form == "whole" else chunks.append)
        if form == "whole":
            completion = await generation
            assert (calls, pool.counts.failovers) == (2, 1)
            assert completion.token_ids.tolist() == TRUTH and set(completion.versions.tolist()) == {0}
        else:
            with pytest.raises(EngineError) as caught:
                await generation
            assert calls == 1 and not isinstance(caught.value, EngineUnavailable)
        assert len(pool.replicas[0].invalid_answers) == (form != "whole")  # cleared by a valid answer
        app.script = lambda call: TEXT
        again = await pool.generate("s", prompt("hello"), SAMPLING, lambda chunk: None)
        assert again.token_ids.tolist() == TRUTH and again.finish_reason == "stop"


def asked(**given: Any) -> SentRequest:
    sampling = SamplingParams(given.pop("most", 8), **given.pop("sampling", {}))
    return SentRequest(sampling, vocab_size=99, prompt_tokens=10, **given)


GRAMMAR = Grammar("regex", "[a-z]+")


@pytest.mark.parametrize(
    ("request_", "ids", "reason", "matched", "is_right"),
    [
        (asked(sampling={"stop_token_ids": (7,)}), [1, 7], "stop", 7, True),
        (asked(sampling={"stop_token_ids": (7,)}), [1, 7], "stop", None, True),  # some servers do not say
        (asked(sampling={"stop_token_ids": (7,)}), [1, 8], "stop", None, False),
        (asked(sampling={"stop_token_ids": (7,), "ignore_eos": True}), [1, 7], "stop", 7, False),
        (asked(end_ids=frozenset({5})), [1, 5], "stop", 5, True),  # an end token of the model
        (asked(end_ids=frozenset({5})), [1, 6], "stop", 6, False),
        (asked(end_ids=None), [1, 6], "stop", 6, True),  # cannot be checked, so it is accepted
        (asked(end_ids=None), [1, 6], "stop", 5, False),
        (asked(sampling={"stop": ("END",)}), [1, 6], "stop", "END", True),
        (asked(sampling={"stop": ("END",)}, end_ids=frozenset()), [1, 6], "stop", None, True),
        (asked(sampling={"stop": ("END",), "ignore_eos": True}), [1, 6], "stop", "END", True),
        (asked(sampling={"stop": ("END",)}), [1, 6], "stop", "NaN happened", False),
        (asked(sampling={"stop": ("END",)}, decode=lambda ids: "the END."), [1, 6], "stop", "END", True),
        (asked(sampling={"stop": ("END",)}, decode=lambda ids: "the EN"), [1, 6], "stop", "END", False),
        (asked(sampling={"grammar": GRAMMAR}, end_ids=frozenset()), [1, 6], "stop", 6, True),
        (asked(sampling={"grammar": GRAMMAR}, end_ids=frozenset()), [1, 6], "stop", "NaN happened", False),
        (asked(), [], "stop", None, False),
        (asked(most=3), [1, 2, 3], "length", None, True),
        (asked(most_tokens=13), [1, 2, 3], "length", None, True),  # the context is full
        (asked(most_tokens=14), [1, 2, 3], "length", None, False),
        (asked(most_tokens=None), [1, 2, 3], "length", None, True),  # the limit is not known
        (asked(most_tokens=14), [1], "abort", None, True),
    ],
)
def test_the_reported_end_of_a_completion_is_checked(
    request_: SentRequest, ids: list[int], reason: Any, matched: Any, is_right: bool
) -> None:
    if is_right:
        request_.check_end(ids, reason, matched)
    else:
        with pytest.raises(EngineError):
            request_.check_end(ids, reason, matched)


def test_an_aborted_answer_is_checked_less_strictly() -> None:
    """SGLang counts one prompt token of a request that it refuses, and spans of tokens that were not sent."""
    asked().check_meta({"prompt_tokens": 1}, "abort")
    with pytest.raises(EngineError, match="1 prompt tokens, expected 10"):
        asked().check_meta({"prompt_tokens": 1}, None)
    spans = [{"version": "3", "start": 0, "end": 5}]
    assert checked_spans(spans, 3, aborted=True) == [(3, 3)]
    assert checked_spans([{"version": "3", "start": 0, "end": 0}], 0) == [(3, 0)]


@pytest.mark.parametrize("value", [0, 0.0, 1e-5, -1e-45, -87.3, -999])
def test_valid_logprobs_are_accepted(value: float) -> None:
    check_logprobs([value])


@pytest.mark.parametrize(
    "value", [float("nan"), float("-inf"), float("inf"), 2e-4, -1001.0, "-1", None, True]
)
def test_invalid_logprobs_are_refused(value: Any) -> None:
    with pytest.raises(EngineError):
        check_logprobs([-0.5, value])


def test_the_end_tokens_of_a_model_are_read_from_all_its_files(tmp_path: Any) -> None:
    ends = end_ids_of(MODEL)
    assert ends is not None and STOP in ends
    assert end_ids_of(tmp_path) is None
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 5}}')
    assert end_ids_of(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "<e>"}, "added_tokens_decoder": {"8": {"content": "<e>"},'
        ' "9": {"content": "<|eom_id|>"}}}'
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert end_ids_of(tmp_path) == {5, 6, 7, 8, 9}
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<unknown>"}')
    assert end_ids_of(tmp_path) is None


def lying_to(*words: str) -> Any:
    """Return a script that answers prompts with one of `words` invalidly, and others after a short delay."""

    def script(call: ScriptedCall) -> ScriptedReply:
        if any(word in call.prompt_text for word in words):
            return ScriptedReply(TEXT, lie="a logprob above 0")
        return ScriptedReply(TEXT, delay_s=0.02)

    return script


def exclusions_of(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Record the state and the reason of an engine, and the number of failovers, at each of its exclusions.

    A valid answer resets the number that the engine itself keeps.
    """
    found: list[tuple[str, str, int]] = []
    exclude = Replica.exclude_after_invalid_answers

    def noted(replica: Replica, longest_s: float, why: str) -> None:
        exclude(replica, longest_s, why)
        found.append((replica.state, replica.reason, pool.counts.failovers))

    monkeypatch.setattr(Replica, "exclude_after_invalid_answers", noted)
    return found


async def outcome(pool: EnginePool, rid: str, text: str, affinity: str) -> Completion | EngineError:
    """Return the completion of a call, or its error."""
    try:
        completion = await pool.generate(rid, prompt(text), SAMPLING, affinity=affinity)
    except EngineError as error:
        return error
    assert completion.token_ids.tolist() == TRUTH
    return completion


@pytest.mark.parametrize(
    "poisoned",
    [
        ["poison apple"],
        ["poison apple", "poison pear"],
        [f"poison {number}" for number in range(8)],  # one caller with many such requests
    ],
    ids=["one", "two", "one caller's many"],
)
async def test_a_request_that_always_gets_invalid_answers_fails_alone(
    engines: dict[Form, tuple[ScriptedApp, str]], poisoned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, url = engines["whole"]
    app.script = lying_to("poison")
    async with pool_over(url) as pool:
        exclusions = exclusions_of(pool, monkeypatch)
        bad = [
            asyncio.create_task(outcome(pool, f"bad-{n}", text, "the one caller"))
            for n, text in enumerate(poisoned)
        ]
        good = 0
        while good < 12 or not all(task.done() for task in bad):
            n = good % 4
            assert isinstance(await outcome(pool, f"good-{good}", f"hello {n}", f"episode {n}"), Completion)
            good += 1
        assert not exclusions and pool.replicas[0].is_serving
        for error in await asyncio.gather(*bad):
            assert isinstance(error, EngineError) and not isinstance(error, EngineUnavailable)
            assert "6 times in a row" in str(error) and "expected one from -1000 to 0" in str(error)


async def test_a_prompt_that_always_gets_invalid_answers_fails_alone_in_every_episode(
    engines: dict[Form, tuple[ScriptedApp, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, url = engines["whole"]
    app.script = lying_to("poison")
    async with pool_over(url) as pool:
        exclusions = exclusions_of(pool, monkeypatch)
        found = await asyncio.gather(
            *(outcome(pool, f"r{n}", "poison", f"episode {n}") for n in range(8)),
            *(outcome(pool, f"s{n}", "hello", f"episode {n}") for n in range(8)),
        )
        assert all(isinstance(one, EngineError) for one in found[:8])
        assert all(isinstance(one, Completion) for one in found[8:])
        assert not exclusions


async def test_a_health_check_keeps_the_reason_of_an_excluded_engine(
    engines: dict[Form, tuple[ScriptedApp, str]],
) -> None:
    """An answer to a health check does not end the exclusion."""
    app, url = engines["whole"]
    app.script = lambda call: TEXT
    async with pool_over(url) as pool:
        replica = pool.replicas[0]
        replica.exclude_after_invalid_answers(60.0, "it gave invalid answers: one of them")
        await pool._monitor.check(replica)
        assert (replica.state, replica.reason) == ("down", "it gave invalid answers: one of them")


async def test_an_engine_is_excluded_after_invalid_answers_to_three_callers(
    engines: dict[Form, tuple[ScriptedApp, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may be excluded several times, and one valid answer resets the count."""
    app, url = engines["whole"]
    app.script = lying_to("")
    async with pool_over(url, longest_pause_s=0.2) as pool:
        replica, exclusions = pool.replicas[0], exclusions_of(pool, monkeypatch)
        calls = [asyncio.create_task(outcome(pool, f"r{n}", f"hello {n}", f"episode {n}")) for n in range(3)]
        for error in await asyncio.gather(*calls):
            assert isinstance(error, EngineError)
        state, reason, failovers = exclusions[0]
        assert state == "down" and "invalid answers" in reason and failovers <= 3
        assert len(exclusions) > 1
        app.script = lambda call: TEXT
        assert isinstance(await outcome(pool, "good", "hello", "episode 9"), Completion)
        assert (replica.exclusions, replica.invalid_answers) == (0, [])


async def test_an_unknown_vocabulary_size_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    app = ScriptedApp.from_folder(MODEL, lambda call: TEXT)
    app._model_path, app._vocab_size = str(tmp_path), None  # type: ignore[assignment]  # as SGLang reports
    with running(app) as url:
        async with SGLangEngine(url) as engine:
            with pytest.raises(EngineError, match=r"config.json is not readable from here; start it on"):
                await engine.model_info()
            (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
            with pytest.raises(EngineError, match=r"config.json has no vocab_size; add it to the file"):
                await engine.model_info()
