"""Big bodies: what they are refused for, and that they keep nobody waiting."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from proxy_support import MODEL, RunningProxy, ScriptedEngine, running_proxy

from areal_agents.core.messages import Message
from areal_agents.errors import PromptTooLong, RequestError
from areal_agents.proxy.values import _PART, refuse_many_values
from areal_agents.rendering import ChatRenderer, Tokenizer
from areal_agents.rendering.token_lengths import characters_per_token

MIB = 2**20


def values_in(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(values_in, value.values()))
    return 1 + sum(map(values_in, value)) if isinstance(value, list) else 1


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 5 else 4)
    if kind < 4:
        texts = ["", 'a"b', "\\", '\\"', ",:[{", "é\n", "\\" * 7 + '"', '{"a": [1, 2]}']
        return rng.choice([1, -2.5e3, True, None, *texts])
    items = [random_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    return items if kind < 6 else {f'k{i}"\\,': item for i, item in enumerate(items)}


def test_values_are_counted_without_what_stands_in_strings() -> None:
    for seed in range(2_000):
        rng = random.Random(seed)
        value = [random_value(rng)]
        body = orjson.dumps(value) if seed % 2 else json.dumps(value, indent=2).encode()
        # An empty list or object counts as if it had a value.
        empty = body.count(b"[]") + body.count(b"{}")
        most = values_in(value)
        refuse_many_values(body, most + empty)
        with pytest.raises(RequestError) as refused:
            refuse_many_values(body, most - 1)
        assert refused.value.status == 413 and "JSON values" in refused.value.message


@pytest.mark.parametrize("shift", range(-3, 4))
def test_a_string_may_end_anywhere(shift: int) -> None:
    for text in ("a" * (_PART + shift), "\\" * (_PART // 2 + shift), '"' * (_PART // 2 + shift)):
        body = orjson.dumps([text + ",[", 1])
        refuse_many_values(body, 3)
        with pytest.raises(RequestError):
            refuse_many_values(body, 2)
    refuse_many_values(b'["' + b"," * 10, 2)  # the parser's to refuse
    refuse_many_values(b'["\\', 2)


def test_a_constant_that_json_has_not_is_named_wherever_it_stands(proxy: RunningProxy) -> None:
    for name in ("NaN", "Infinity", "-Infinity"):
        for start in ("", "é" * 100_000):
            body = f'{{"messages": ["{start}", {name}]}}'.encode()
            answer = proxy.http.post("/v1/chat/completions", content=body)
            assert answer.status_code == 400 and name in answer.json()["error"]["message"]
            assert answer.json()["error"]["code"] == "not_finite"


def test_the_bound_of_a_text_holds_for_every_text() -> None:
    tokenizer = Tokenizer.from_folder(MODEL)
    bound = characters_per_token(json.loads((MODEL / "tokenizer.json").read_text()))
    assert bound is not None
    for seed in range(300):
        rng = random.Random(seed)
        alphabet = rng.choice(["a", " ", "ab ", "e\u0301\u0323", "漢🙂", "the cat "])
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 400)))
        text = text * rng.randrange(1, 20)
        assert len(tokenizer.encode(text)) >= len(text) / bound[0 if text.isascii() else 1]


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"added_tokens": [{"id": 0, "content": "<s>", "rstrip": True}]},
        {"model": {"type": "WordLevel", "vocab": {}}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(change: dict[str, Any]) -> None:
    settings = json.loads((MODEL / "tokenizer.json").read_text())
    assert characters_per_token({**settings, **change}) is None


def test_what_cannot_fit_is_refused_and_what_fits_is_not(renderer: ChatRenderer) -> None:
    per_ascii = characters_per_token(json.loads((MODEL / "tokenizer.json").read_text()))
    assert per_ascii is not None
    long = Message("user", "a" * 60_000)
    ids = renderer.render([long])
    assert renderer.render([long], most_tokens=len(ids)).tolist() == ids.tolist()
    with pytest.raises(PromptTooLong) as refused:
        renderer.render([long], most_tokens=60_000 // per_ascii[0] - 1)
    assert refused.value.at_least <= len(ids)
    many = [Message("user", "a" * 20_000) for _ in range(5)]  # each fits
    with pytest.raises(PromptTooLong):
        renderer.render(many, most_tokens=100_000 // per_ascii[0] - 1)
    assert len(renderer.render([Message("user", "a" * 40_000)], most_tokens=1)) > 1  # the caller counts
    renderer.render([long])  # without a limit again


@pytest.mark.parametrize(
    "path, body, code",
    [
        ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}, 0),
        ("/v1/completions", lambda text: {"prompt": text}, 0),
        ("/v1/responses", lambda text: {"input": text}, 0),
        ("/v1/messages", lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 4}, 1),
        ("/v1/messages/count_tokens", lambda text: {"messages": [{"role": "user", "content": text}]}, 1),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_in_every_dialect(
    proxy: RunningProxy, path: str, body: Callable[[str], Any], code: int
) -> None:
    started = time.monotonic()
    answer = proxy.http.post(path, json={"model": "policy", **body("a" * (30 * MIB))}, timeout=60)
    assert answer.status_code == 400 and time.monotonic() - started < 30
    message = answer.json()["error"]["message"]
    assert ("prompt is too long" if code else "maximum context length is 4096 tokens") in message
    assert proxy.engine.calls == []


def test_many_values_are_refused_before_they_are_parsed(tmp_path: Path, renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer)
    with running_proxy(tmp_path / "store.db", engine, max_json_values=50) as proxy:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "," * 1000}]}
        assert proxy.http.post("/v1/chat/completions", json=body).status_code == 200
        answer = proxy.http.post("/v1/chat/completions", json={**body, "metadata": {"x": [1] * 50}})
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"


def test_many_rewards_are_written_at_once_and_too_many_refused(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    started = time.monotonic()
    for value in (0.5, 1.0):
        body = {"reward": {f"n{i}": value for i in range(10_000)}}
        assert proxy.http.post(f"/episodes/{episode['id']}/reward", json=body).status_code == 200
    assert time.monotonic() - started < 8  # a minute, one by one
    shown = proxy.http.get(f"/episodes/{episode['id']}").json()
    assert shown["score"] == 10_000.0 and len(shown["rewards"]) == 10_000
    body = {"reward": {f"n{i}": 1.0 for i in range(10_001)}}
    assert proxy.http.post(f"/episodes/{episode['id']}/reward", json=body).status_code == 400


def test_arguments_of_very_many_values_are_refused(proxy: RunningProxy) -> None:
    function = {"name": "f", "arguments": json.dumps([0] * 50_001)}
    call = {"id": "c", "type": "function", "function": function}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    answer = proxy.http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 413


def test_many_assistant_messages_are_joined_in_one_go(proxy: RunningProxy) -> None:
    said = [{"role": "assistant", "content": "word " * 1_500} for _ in range(4_000)]
    body = {"messages": [*said, {"role": "user", "content": "x"}], "max_tokens": 4}
    started = time.monotonic()
    assert proxy.http.post("/v1/messages", json=body, timeout=120).status_code == 400
    assert time.monotonic() - started < 30  # minutes, where each is joined to all before it


BIG: dict[str, Callable[[], bytes]] = {
    "letter": lambda: orjson.dumps({"messages": [{"role": "user", "content": "a" * 31 * MIB}]}),
    "fitting letter": lambda: orjson.dumps({"messages": [{"role": "user", "content": "ab " * 30_000}]}),
    "schema": lambda: orjson.dumps(
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "f", "description": "d" * 20 * MIB}}],
        }
    ),
    "numbers": lambda: b'{"messages": [' + b"1," * 15 * MIB + b"1]}",
    "brackets": lambda: b'{"messages": ' + b"[" * 15 * MIB + b"]" * 15 * MIB + b"}",
    "escapes": lambda: b'{"messages": [{"role": "user", "content": "' + b"\\u0041" * 5 * MIB + b'"}]}',
    "quotes": lambda: b'{"messages": [{"role": "user", "content": "' + b'\\",' * 10 * MIB + b'"}]}',
    "not UTF-8": lambda: b'{"messages": ["' + b"\xff" * 30 * MIB + b'"]}',
    "special tokens": lambda: orjson.dumps(
        {"messages": [{"role": "user", "content": "<|im_start|>" * 500_000}]}
    ),
}


@pytest.mark.parametrize("kind", BIG)
def test_a_big_body_does_not_stop_another_episode(proxy: RunningProxy, kind: str) -> None:
    """The bar is 100 ms on an idle machine; here it only has to be told from the former seconds."""
    body, other = BIG[kind](), proxy.open_episode()
    key = {"authorization": f"Bearer {proxy.open_episode()['key']}"}
    proxy.engine.max_context = 65_536
    done, waits = threading.Event(), []

    def small() -> None:
        with httpx.Client(base_url=proxy.url, headers={"authorization": f"Bearer {other['key']}"}) as client:
            while not done.is_set() or len(waits) < 20:
                started = time.monotonic()
                answer = client.post(
                    "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]}, timeout=60
                )
                waits.append(time.monotonic() - started)
                assert answer.status_code == 200

    with ThreadPoolExecutor(1) as threads:
        calls = threads.submit(small)
        answer = proxy.http.post("/v1/chat/completions", content=body, headers=key, timeout=120)
        done.set()
        calls.result(timeout=120)
    assert answer.status_code in (200, 400, 413), answer.text
    assert max(waits) < 1.5, (kind, sorted(waits)[-5:])
