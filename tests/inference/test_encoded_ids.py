"""The JSON of token ids equals that of orjson, whichever ids were encoded before."""

from __future__ import annotations

import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st

from areal_agents.inference import encoded_ids
from areal_agents.inference.encoded_ids import EncodedIds

LONG = np.arange(20_000, dtype=np.int32)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "a", "b"]),
            st.integers(0, 20_000),
            st.lists(st.integers(0, 2**31 - 1), max_size=5),
            st.sampled_from([np.int32, np.int64]),
        ),
        max_size=8,
    )
)
def test_any_sequence_of_prompts_is_written_as_if_each_were_the_first(prompts: list) -> None:
    encoded = EncodedIds()
    for affinity, kept, new, dtype in prompts:
        ids = np.concatenate([LONG[:kept], np.array(new, np.int64)]).astype(dtype)
        assert orjson.loads(orjson.dumps(encoded.json(ids, affinity))) == ids.tolist()


def test_only_the_new_ids_of_a_growing_prompt_are_encoded(monkeypatch) -> None:
    written = []
    dumps = encoded_ids._dumps
    monkeypatch.setattr(encoded_ids, "_dumps", lambda ids: written.append(len(ids)) or dumps(ids))
    encoded = EncodedIds()
    for count in (16_000, 16_500, 16_500, 17_000):
        encoded.json(LONG[:count], "episode")
    encoded.json(LONG[::-1], "episode")
    assert written == [16_000, 500, 500, 20_000]
