"""Whatever a client sends, the answer is a success or a clear refusal: never a 500."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_support import SEARCH, RunningProxy, tool_call

RELAXED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["", "\0", "<|im_end|>", "<tool_call>", "{", "é\U0001f600"])
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
functions = st.fixed_dictionaries({}, optional={"name": st.just("search") | anything, "arguments": anything})
calls = st.fixed_dictionaries(
    {}, optional={"id": anything, "type": anything, "function": functions | anything}
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"]) | anything},
    optional={
        "content": st.text(max_size=9)
        | st.lists(st.fixed_dictionaries({"text": anything}), max_size=2)
        | anything,
        "tool_calls": st.lists(calls, max_size=2) | anything,
        "tool_call_id": anything,
        "reasoning_content": anything,
        "name": anything,
    },
)
CHAT_FIELDS = [
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "logit_bias", "seed", "stop",
    "max_tokens", "n", "stream", "tool_choice", "parallel_tool_calls", "logprobs", "prompt_cache_key",
    "response_format",
]  # fmt: skip
tools = st.just([SEARCH]) | st.lists(st.fixed_dictionaries({"function": functions}), max_size=2) | anything
chat_bodies = st.fixed_dictionaries(
    {"messages": st.lists(messages, max_size=4) | anything},
    optional={**dict.fromkeys(CHAT_FIELDS, anything), "tools": tools},
)
episode_bodies = st.fixed_dictionaries(
    {},
    optional={
        "task": st.fixed_dictionaries({"id": st.text(max_size=3)}, optional={"input": anything}) | anything,
        "group": st.sampled_from(["a", "b/c@0"]) | anything,
        "group_size": st.integers(1, 3) | anything,
        "index": st.integers(-1, 3) | anything,
        "split": st.sampled_from(["train", "eval"]) | anything,
        "metadata": anything,
        "limits": st.dictionaries(st.sampled_from(["max_turns", "max_tokens", "time_s", "x"]), anything)
        | anything,
        "sampling": st.dictionaries(st.sampled_from(["temperature", "top_p", "seed", "x"]), anything)
        | anything,
    },
)
reward_bodies = st.fixed_dictionaries(
    {},
    optional={
        "reward": st.floats() | st.dictionaries(st.text(max_size=3), anything, max_size=2) | anything,
        "completion_id": anything,
        "name": anything,
        "scope": st.sampled_from(["episode", "turn", "branch"]) | anything,
    },
)


def answer(proxy: RunningProxy, path: str, body: Any) -> dict[str, Any]:
    """The answer, which must be a success or a refusal in OpenAI's form."""
    response = proxy.http.post(path, content=json.dumps(body))
    assert response.status_code < 500, (body, response.text)
    data: dict[str, Any] = response.json()
    assert response.status_code == 200 or set(data["error"]) == {"message", "type", "param", "code"}
    return data


@RELAXED
@given(chat_bodies)
def test_chat_requests(proxy: RunningProxy, body: Any) -> None:
    proxy.engine.script = lambda call: tool_call(query="x")
    episode = proxy.open_episode(split="eval")
    answer(proxy, f"/e/{episode['key']}/v1/chat/completions", body)
    answer(proxy, "/v1/chat/completions", body)


@RELAXED
@given(episode_bodies, st.lists(reward_bodies, max_size=2), anything)
def test_control_requests(proxy: RunningProxy, body: Any, rewards: list[Any], junk: Any) -> None:
    opened = answer(proxy, "/episodes", body)
    if "id" not in opened:
        return
    for reward in rewards:
        answer(proxy, f"/episodes/{opened['id']}/reward", reward)
        answer(proxy, "/rewards", reward)
    key_call = {"messages": [{"role": "user", "content": "x"}]}
    answer(proxy, f"/e/{opened['key']}/v1/chat/completions", key_call)
    answer(proxy, f"/episodes/{opened['id']}/fail", {"error": junk, "aborted": junk})
    answer(proxy, f"/episodes/{opened['id']}/finish", {"rewards": junk})
    assert proxy.http.get(f"/episodes/{opened['id']}").status_code == 200
