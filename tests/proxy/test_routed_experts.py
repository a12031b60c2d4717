"""The experts that processed each token, from SGLang's response to a training sample."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from proxy_support import SEARCH, RecordingEngine, RunningProxy, running_proxy, tool_call

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.algorithms.samples import episode_samples
from areal_agents.core.completion import Completion, SamplingParams, as_token_ids, joined_routing
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Trajectory, Turn
from areal_agents.errors import EngineError
from areal_agents.inference import SGLangEngine
from areal_agents.inference.expert_routing import (
    ExpertLayout,
    RequestedRouting,
    expert_layout,
    routing_from_wire,
)
from areal_agents.rendering import ChatRenderer
from areal_agents.testing import ScriptedApp, ScriptedReply, running

LAYERS, PER_TOKEN = 3, 2
TOKENIZER = Path(__file__).parents[2] / "examples" / "search_agent" / "model"


def experts_of(tokens: np.ndarray) -> np.ndarray:
    """Return experts that encode position and token: [N, LAYERS, PER_TOKEN]."""
    positions = np.arange(len(tokens))
    rows = np.stack([positions, np.asarray(tokens) % 1000], axis=1)
    return np.repeat(rows[:, None], LAYERS, axis=1) + np.arange(LAYERS)[:, None]


def completion(count: int, rows: int | None, first: int = 0, version: int = 0) -> Completion:
    """Return `count` tokens with the experts of `rows` tokens, numbered from `first` on."""
    routing = None
    if rows is not None:
        routing = np.arange(first, first + rows, dtype=np.int16)[:, None, None].repeat(2, axis=2)
    return Completion([7] * count, [-1.0] * count, [version] * count, "abort", routed_experts=routing)  # type: ignore[arg-type]


def numbers(routing: np.ndarray | None) -> list[int]:
    assert routing is not None
    return routing[:, 0, 0].tolist()


# -- reading a response -----------------------------------------------------------------------


def meta(rows: np.ndarray, **fields: Any) -> dict[str, Any]:
    encoded = base64.b64encode(rows.astype("<i4").tobytes()).decode()
    return {"finish_reason": {"type": "stop"}, "routed_experts": encoded} | fields


ASKED = RequestedRouting(
    ExpertLayout(2, 1), start=1, prompt_tokens=3
)  # two rows for the prompt, and one per sampled token but the last
ROWS = np.arange(5 * 2).reshape(5, 2, 1)


def test_a_response_has_the_experts_of_the_requested_tokens_but_the_last() -> None:
    routing = routing_from_wire(meta(ROWS), ASKED, [4] * 4)
    assert routing is not None and routing.dtype == np.int16
    np.testing.assert_array_equal(routing, ROWS)


def test_experts_of_an_earlier_version_are_unknown_after_a_retraction() -> None:
    routing = routing_from_wire(meta(ROWS, num_retractions=1), ASKED, [4, 4, 5, 5])
    # Row 0 belongs to a prompt token; rows 1 and 2 to the tokens before the two that version 4 sampled.
    assert routing is not None and routing[:, 0, 0].tolist() == [0, -1, -1, 6, 8]
    frozen = routing_from_wire(
        meta(ROWS), ASKED, [4, 4, 5, 5]
    )  # swapped in place, so nothing was computed again
    np.testing.assert_array_equal(frozen, ROWS)
    same = routing_from_wire(meta(ROWS, num_retractions=1), ASKED, [4] * 4)  # retracted to free memory
    np.testing.assert_array_equal(same, ROWS)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"finish_reason": {"type": "stop"}}, "--enable-return-routed-experts"),
        (meta(ROWS[1:]), "8 routed experts for 5 tokens, 2 layers and 1 experts.*different model"),
        (meta(ROWS, routed_experts="%%%"), "cannot be read"),
        (meta(ROWS + 40_000), "routed experts from"),
    ],
)
def test_an_invalid_response_is_an_error(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        routing_from_wire(answer, ASKED, [0] * 4)


def test_an_aborted_response_may_have_no_experts() -> None:
    aborted = {"finish_reason": {"type": "abort"}}
    assert routing_from_wire(aborted, ASKED, []) is None
    assert routing_from_wire(aborted, ASKED, [0, 0]) is None


def test_the_layout_is_read_from_the_config_of_the_model() -> None:
    text = {"num_hidden_layers": 5, "num_experts_per_tok": 2}
    assert expert_layout(text) == expert_layout({"text_config": text}) == ExpertLayout(5, 2)
    assert expert_layout({"num_hidden_layers": 5}) is None


# -- completions in two parts, and trajectories of several turns -------------------------------


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # A prompt of 3 tokens, then 2 and 2 sampled ones; the second part has rows from 0 or its boundary.
        (completion(2, 4), completion(2, 6, first=100), [0, 1, 2, 3, 104, 105]),
        (completion(2, 4), completion(2, 2, first=100), [0, 1, 2, 3, 100, 101]),
        (completion(2, None), completion(2, 6, first=100), [100, 101, -1, -1, 104, 105]),
        (completion(0, None), completion(2, 4, first=100), [100, 101, 102, 103]),
        (completion(2, 4), completion(0, None), [0, 1, 2, 3]),
    ],
)
def test_the_experts_of_two_parts_of_a_completion_are_joined(
    first: Completion, second: Completion, expected: list[int]
) -> None:
    assert numbers(joined_routing(first, second)) == expected


def test_the_joined_experts_are_none_if_the_second_part_has_none() -> None:
    assert joined_routing(completion(2, None), completion(2, None)) is None
    assert joined_routing(completion(2, 4), completion(2, None)) is None


def turn(turn_id: str, parent: str | None, drawn: Completion) -> Turn:
    return Turn(
        turn_id,
        parent,
        (Message("user", "q"),),
        [5, 6, 7],
        drawn,
        Message("assistant", "a"),
        SamplingParams(8),  # type: ignore[arg-type]
    )


def test_a_trajectory_has_the_experts_of_all_its_tokens_but_the_last() -> None:
    root, child = turn("a", None, completion(2, 4)), turn("b", "a", completion(2, 5, first=4))
    assert numbers(Trajectory((root, child)).routed_experts) == [*range(9), -1]
    silent = turn("b", "a", completion(2, None))
    assert numbers(Trajectory((root, silent)).routed_experts) == [0, 1, 2, 3, *[-1] * 6]
    assert Trajectory((turn("a", None, completion(2, None)),)).routed_experts is None
    with pytest.raises(ValueError, match="turn a adds 5 tokens, .* of at most 4: .*; got those of 5"):
        turn("a", None, completion(2, 5))
    other = replace(child, completion=replace(child.completion, routed_experts=np.zeros((5, 1, 3), np.int16)))
    with pytest.raises(ValueError, match="must have one shape"):
        _ = Trajectory((root, other)).routed_experts


# -- from the proxy to a training sample -------------------------------------------------------


@pytest.fixture(scope="module")
def app() -> ScriptedApp:
    return ScriptedApp.from_folder(TOKENIZER, lambda call: tool_call(query="x"), experts_of=experts_of)


@pytest.fixture(scope="module")
def engine_url(app: ScriptedApp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scripted engine that reports a model with experts."""
    folder = tmp_path_factory.mktemp("moe")
    (folder / "config.json").write_text(
        f'{{"num_hidden_layers": {LAYERS}, "num_experts_per_tok": {PER_TOKEN}}}'
    )
    app._model_path = str(folder)
    with running(app) as url:
        yield url


@pytest.fixture(scope="module")
def proxy(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    engine = RecordingEngine(engine_url, ChatRenderer.from_folder(TOKENIZER))
    with running_proxy(tmp_path_factory.mktemp("p") / "store.db", engine, routed_experts=True) as running:
        yield running


def converse(proxy: RunningProxy, turns: int, *, stream: bool) -> dict[str, Any]:
    """Play an episode of `turns` turns, each of which calls a tool."""
    episode = proxy.open_episode(split="train")
    client, messages = proxy.openai(episode), [{"role": "user", "content": "question"}]
    for _ in range(turns):
        asked: dict[str, Any] = {"model": "m", "messages": messages, "tools": [SEARCH]}
        if stream:
            with client.chat.completions.stream(**asked) as events:
                reply = events.get_final_completion().choices[0].message
        else:
            reply = client.chat.completions.create(**asked).choices[0].message
        assert reply.tool_calls
        messages.append(reply.model_dump(exclude_none=True))
        messages.append({"role": "tool", "content": "found", "tool_call_id": reply.tool_calls[0].id})
    return episode


@pytest.mark.parametrize("stream", [False, True])
def test_every_turn_requests_the_experts_of_what_it_adds_and_the_sample_has_all(
    proxy: RunningProxy, stream: bool
) -> None:
    proxy.engine.calls.clear()
    loaded = proxy.store.load_episode(converse(proxy, 3, stream=stream)["id"])
    assert [turn.parent is None for turn in loaded.turns] == [True, False, False]
    ends = np.cumsum([len(t.new_prompt_ids) + len(t.completion) for t in loaded.turns]).tolist()
    asked = [call.sampling.routed_experts_from for call in proxy.engine.calls]
    assert asked == [0, ends[0] - 1, ends[1] - 1]  # the last token of a turn is computed by the next one
    assert {turn.sampling.routed_experts_from for turn in loaded.turns} == {None}
    (sample,) = episode_samples(loaded, np.ones(3), group_id="g", config=AlgorithmConfig())
    expected = experts_of(sample.token_ids)
    expected[-1] = -1
    assert sample.routed_experts is not None
    np.testing.assert_array_equal(sample.routed_experts, expected)
    (batch,) = pack([sample], token_budget=4096)
    np.testing.assert_array_equal(batch.routed_experts, expected[:-1])
    supervised = AlgorithmConfig(preset="sft")
    (fitted,) = episode_samples(loaded, np.ones(3), group_id="g", config=supervised)
    assert fitted.routed_experts is None


def test_no_experts_are_requested_or_stored_without_the_setting(
    engine_url: str, tmp_path: Path, app: ScriptedApp
) -> None:
    engine = RecordingEngine(engine_url, ChatRenderer.from_folder(TOKENIZER))
    with running_proxy(tmp_path / "store.db", engine) as proxy:
        loaded = proxy.store.load_episode(converse(proxy, 1, stream=False)["id"])
    assert "return_routed_experts" not in app.exchanges[-1].body
    assert loaded.turns[0].completion.routed_experts is None


def test_an_engine_that_returns_no_experts_is_an_error(engine_url: str, app: ScriptedApp) -> None:
    async def ask() -> Completion:
        async with SGLangEngine(engine_url) as engine:
            return await engine.generate("r", as_token_ids([5, 6]), SamplingParams(4, routed_experts_from=0))

    assert asyncio.run(ask()).routed_experts is not None
    app._experts_of, kept = None, app._experts_of
    try:
        with pytest.raises(EngineError, match="--enable-return-routed-experts"):
            asyncio.run(ask())
    finally:
        app._experts_of = kept


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    async def ask(url: str) -> None:
        async with SGLangEngine(url) as engine:
            await engine.generate("r", as_token_ids([5, 6]), SamplingParams(4, routed_experts_from=0))

    app = ScriptedApp.from_folder(TOKENIZER, lambda call: ScriptedReply("x"))
    with running(app) as url, pytest.raises(EngineError, match="the model that .* serves has none"):
        asyncio.run(ask(url))
