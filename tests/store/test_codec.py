"""Routed experts in the store: they are read as written, take less space, and are read only for training."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_support import make_turn, open_episode

from areal_agents.core.completion import Completion, Routing
from areal_agents.core.trajectory import Turn
from areal_agents.errors import StoreError
from areal_agents.store import Store
from areal_agents.store.codec import COMPRESSED, PLAIN, decode_turn, encode_turn

LAYERS, PER_TOKEN, EXPERTS = 48, 8, 128  # Qwen3-30B-A3B
RAW_BYTES = LAYERS * PER_TOKEN * 2  # per token


def turn_with(routing: Routing | None) -> Turn:
    """Return a turn of two sampled tokens, with the experts of all of its tokens but the last."""
    completion = Completion([5, 6], [-1.0] * 2, [0, 0], "stop", routed_experts=routing)  # type: ignore[arg-type]
    prompt = np.zeros(3 if routing is None else len(routing) - 1, np.int32)
    return replace(make_turn("t0"), new_prompt_ids=prompt, completion=completion)


@given(
    rows=st.integers(2, 40),
    layers=st.integers(1, 6),
    per_token=st.integers(1, 4),
    experts=st.sampled_from([1, 8, 128, 255, 256, 257, 32768]),
    seed=st.integers(0, 99),
)
def test_routed_experts_are_read_as_they_were_written(
    rows: int, layers: int, per_token: int, experts: int, seed: int
) -> None:
    routing = np.random.default_rng(seed).integers(-1, experts, (rows, layers, per_token)).astype(np.int16)
    routing[0, 0, 0] = experts - 1
    row = encode_turn("e", turn_with(routing), 1.0)
    read = decode_turn(row).completion.routed_experts
    assert read is not None and read.dtype == np.int16 and read.flags.c_contiguous
    np.testing.assert_array_equal(read, routing)


def chosen_at_random(tokens: int) -> Routing:
    scores = np.random.default_rng(0).random((tokens, LAYERS, EXPERTS))
    return np.argsort(-scores, axis=-1)[..., :PER_TOKEN].astype(np.int16)


def chosen_unevenly(tokens: int) -> Routing:
    """Return experts of unequal load that differs by layer; neighbouring tokens often share some of them."""
    draw = np.random.default_rng(0)
    load, state = draw.normal(size=(LAYERS, EXPERTS)), draw.normal(size=(LAYERS, EXPERTS))
    chosen = []
    for _ in range(tokens):
        state = 0.7 * state + 0.7 * draw.normal(size=state.shape)
        chosen.append(np.argsort(-(load + state), axis=-1)[:, :PER_TOKEN])
    return np.array(chosen, np.int16)


def test_the_routing_of_a_large_model_takes_less_than_half_the_space() -> None:
    """Random choices carry 55.8 bits per layer, 335 of the 768 bytes, so no more space can be saved."""
    for choose, most in ((chosen_at_random, 345), (chosen_unevenly, 340)):
        stored = encode_turn("e", turn_with(choose(300)), 1.0)["routed_experts"]
        assert len(stored) / 300 < most < RAW_BYTES / 2


def test_rows_of_the_earlier_codec_are_read() -> None:
    routing = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    row = encode_turn("e", turn_with(routing), 1.0)
    assert row["codec"] == COMPRESSED
    earlier = {**row, "codec": PLAIN, "routed_experts": routing.astype("<i2").tobytes()}
    np.testing.assert_array_equal(decode_turn(earlier).completion.routed_experts, routing)
    assert encode_turn("e", turn_with(None), 1.0)["codec"] == PLAIN


@pytest.mark.parametrize("damage", [lambda blob: blob[:-3], lambda blob: b"", lambda blob: b"\1" + blob[:1]])
def test_damaged_experts_are_an_error(damage: Callable[[bytes], bytes]) -> None:
    row = encode_turn("e", turn_with(np.ones((40, 3, 2), np.int16)), 1.0)
    with pytest.raises(StoreError, match="the routed experts of turn t0 are damaged"):
        decode_turn({**row, "routed_experts": damage(row["routed_experts"])})


def test_experts_are_read_only_for_training(tmp_path: Path) -> None:
    """An episode that is loaded for further calls is read without its experts, even if they are damaged."""
    with Store.open(tmp_path / "store.db") as store:
        open_episode(store, "e")
        store.add_turn("e", turn_with(np.ones((4, 3, 2), np.int16))).result()
        (turn,) = store.load_episode("e").turns
        assert turn.completion.routed_experts is not None
    with sqlite3.connect(tmp_path / "store.db") as connection:
        connection.execute("UPDATE turns SET routed_experts = x'00'")
    with Store.open(tmp_path / "store.db") as store:
        assert [t.completion.routed_experts for t in store.turns_of("e")] == [None]
        with pytest.raises(StoreError, match="damaged"):
            store.load_episode("e")
