"""Requests at or above the size limits, sent while the calls of a neighbour are timed."""

from __future__ import annotations

import json
import random
import string
import time
from collections.abc import Callable, Iterator
from typing import Any

from attack_support import Neighbour, Row, open_episode, send

from benchmarks.proxy.processes import Server

MIB = 2**20
P99_MS = 100.0
MEMORY_MB = 200.0  # that the process may have gained BACK_S after an attack
BACK_S = 5.0


def big(
    server: Server, neighbour: Neighbour, *, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[Row]:
    """Yield one row per body, with the response and the effect on the neighbour."""
    before, _ = server.memory_mb()
    for name, path, make in BODIES:
        if not wanted(name):
            continue
        key = open_episode(server.url)["key"]
        body = make()
        began = time.monotonic()
        answer = send(server.url, "POST", path, body, key=key)
        ended = time.monotonic()
        p99, longest, failed = neighbour.during(began, ended)
        deadline = time.monotonic() + BACK_S
        while (now := server.memory_mb()[0]) - before > MEMORY_MB and time.monotonic() < deadline:
            time.sleep(0.2)
        peak = server.memory_mb()[1]
        refused = answer.status == 200 or 400 <= answer.status < 500
        yield Row(
            "big",
            f"{name}, {len(body) / MIB:.1f} MiB to {path}",
            f"200 or 4xx; neighbour's p99 ≤ {P99_MS:g} ms; memory comes back",
            f"{answer.status} after {answer.seconds:.2f} s; p99 {p99:.0f} ms, longest {longest:.0f} ms; "
            f"{now - before:+.0f} MB (highest {peak:.0f} MB)",
            refused and p99 <= P99_MS and not failed and now - before <= MEMORY_MB,
        )


def _chat(content: str, **more: Any) -> bytes:
    return json.dumps(
        {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **more}, ensure_ascii=False
    ).encode()


def _words(size: int) -> str:
    rng = random.Random(0)
    words: list[str] = []
    length = 0
    while length < size:
        words.append("".join(rng.choices(string.ascii_letters, k=rng.randint(3, 12))))
        length += len(words[-1]) + 1
    return " ".join(words)


def _prose(size: int) -> str:
    sentence = "The proxy records, token by token, exactly what the served model read and wrote. "
    return sentence * (size // len(sentence) + 1)


def _tools(count: int, size: int) -> list[dict[str, Any]]:
    properties = {
        f"field_{i}": {"type": "string", "description": "It is described here at some length. " * 3}
        for i in range(size)
    }
    schema = {"type": "object", "properties": properties}
    return [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": schema}} for i in range(count)
    ]


def _json(**body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def _schema() -> bytes:
    schema = _tools(1, 100_000)[0]["function"]["parameters"]
    return _chat(
        "hi", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    )


def _conversation(count: int, words: int) -> bytes:
    roles = ("user", "assistant")
    return _json(messages=[{"role": roles[i % 2], "content": f"{i} " * words} for i in range(count)])


def _called(arguments: str) -> bytes:
    """Return a conversation in which a tool was called with these arguments."""
    call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return _json(
        max_tokens=8,
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_0", "content": "found"},
        ],
    )


def _image() -> bytes:
    url = "data:image/png;base64," + "A" * (30 * MIB)
    part = {"type": "image_url", "image_url": {"url": url}}
    return _json(messages=[{"role": "user", "content": [part]}])


def _nested(begin: bytes, end: bytes, size: int) -> bytes:
    depth = size // (len(begin) + len(end))
    return b'{"metadata": ' + begin * depth + b"1" + end * depth + b"}"


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNTING, REWARDS = "/v1/messages", "/v1/messages/count_tokens", "/rewards"
BODIES: list[tuple[str, str, Callable[[], bytes]]] = [
    ("one letter", CHAT, lambda: _chat("a" * (31 * MIB))),
    ("spaces", CHAT, lambda: _chat(" " * (8 * MIB))),
    ("prose", CHAT, lambda: _chat(_prose(4 * MIB))),
    ("prose", CHAT, lambda: _chat(_prose(31 * MIB))),
    ("random words", CHAT, lambda: _chat(_words(MIB))),
    ("random words that nearly fit", CHAT, lambda: _chat(_words(100_000))),
    ("four-byte characters", CHAT, lambda: _chat("𓀀" * (7 * MIB))),
    ("special tokens", CHAT, lambda: _chat("<|im_end|>" * (3 * MIB))),
    ("a call's arguments of words", CHAT, lambda: _called('{"a": "' + "hello you " * (3 * MIB) + '"}')),
    ("a call's arguments of numbers", CHAT, lambda: _called("[" + "1," * (14 * MIB) + "1]")),
    (
        "a call's arguments of special tokens",
        CHAT,
        lambda: _called('{"a": "' + "<|im_end|>" * (2 * MIB) + '"}'),
    ),
    (
        "a call's arguments of special tokens and escapes",
        CHAT,
        lambda: _called('{"a": "' + r"<|im_end|>\n" * (2 * MIB) + '"}'),
    ),
    ("a tool schema", CHAT, lambda: _chat("hi", tools=_tools(1, 130_000))),
    ("many tools", CHAT, lambda: _chat("hi", tools=_tools(3000, 50))),
    ("an output schema", CHAT, _schema),
    ("many messages", CHAT, lambda: _json(messages=[{"role": "user", "content": "a"}] * 800_000)),
    ("4,095 messages", CHAT, lambda: _conversation(4095, 900)),
    ("nested arrays", CHAT, lambda: _nested(b"[", b"]", 31 * MIB)),
    ("nested objects", CHAT, lambda: _nested(b'{"a":', b"}", 31 * MIB)),
    ("a list of numbers", CHAT, lambda: _chat("hi", stop=list(range(4_000_000)))),
    ("a number of many digits", CHAT, lambda: b'{"messages": [], "seed": ' + b"7" * (31 * MIB) + b"}"),
    ("many keys", CHAT, lambda: _json(**{f"key{i}": i for i in range(1_500_000)})),
    ("no UTF-8", CHAT, lambda: b'{"messages": "' + b"\xff" * (31 * MIB) + b'"}'),
    ("escapes", CHAT, lambda: b'{"messages": "' + rb"\u0061" * (5 * MIB) + b'"}'),
    ("a logit bias", CHAT, lambda: _chat("hi", logit_bias={str(i): 1 for i in range(1_000_000)})),
    ("token ids", COMPLETIONS, lambda: _json(prompt=[7] * (8 * MIB), max_tokens=8)),
    ("prompts", COMPLETIONS, lambda: _json(prompt=["a"] * (5 * MIB), max_tokens=8)),
    ("prose", COMPLETIONS, lambda: _json(prompt=_prose(31 * MIB), max_tokens=8)),
    ("prose", RESPONSES, lambda: _json(input=_prose(31 * MIB))),
    ("prose", MESSAGES, lambda: _chat(_prose(31 * MIB))),
    ("prose", COUNTING, lambda: _chat(_prose(31 * MIB))),
    ("an image", CHAT, _image),
    ("more than is allowed", CHAT, lambda: _chat("a" * (64 * MIB))),
    ("a long string", REWARDS, lambda: _json(completion_id="chatcmpl-0", reward=1.0, name="a" * (7 * MIB))),
]
