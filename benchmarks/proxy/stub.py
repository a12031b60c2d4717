"""An engine that uses almost no CPU time: `python -m benchmarks.proxy.stub CONFIG.json`.

It implements the part of SGLang's protocol that the proxy uses, and an engine's own chat endpoint for the
proxies that the proxy is compared with. Every reply is serialised before the first call; the token limit of a
request selects the reply. It exits when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any, cast

import uvloop

_LIMIT = re.compile(rb'"max_(?:new_|completion_)?tokens": ?(\d+)')
_RID = re.compile(rb'"rid": ?"([^"$]+)')  # without the end marker of `inference.sglang.client`
_STREAM = re.compile(rb'"stream": ?true')
_ENDS = 2000  # bytes at either end of a body
_NO_REPLY = b'{"error":{"message":"no reply is prepared for this limit"}}'
_WITH_IDS = re.compile(rb'"return_token_ids": ?true')


class Reply:
    """One prepared reply in each of its forms.

    Args:
        spec: ids [N] with the stop token last, and their texts [N]; the chat `message` that they represent;
            the reported `prompt_tokens`; `delay_s` before the reply; `token_s` between streamed tokens.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        ids: list[int] = spec["ids"]
        draw = random.Random(0)
        logprobs = [-draw.expovariate(2.0) for _ in ids]
        triples = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
        self.delay_s: float = spec["delay_s"]
        self.token_s: float = spec["token_s"]
        self.native = _http(_dump(_native(ids, triples, spec, finished=True)))
        self.events = [
            _event(_native(ids[:n], triples[:n], spec, finished=n == len(ids)))
            for n in range(1, len(ids) + 1)
        ] if self.token_s else []  # fmt: skip
        self.chat = _http(_dump(_chat(spec, None)))
        self.chat_with_ids = _http(_dump(_chat(spec, logprobs)))


def _native(ids: list[int], triples: list[Any], spec: dict[str, Any], *, finished: bool) -> dict[str, Any]:
    """SGLang's /generate answer; streamed pieces are cumulative, as its server sends them by default.

    Values that would differ between calls, the id and the number of prompt tokens, are left out.
    """
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop", "matched": ids[-1]} if finished else None,
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": "default",
        "output_token_logprobs": triples,
    }
    if finished:
        meta["weight_versions"] = [{"version": "default", "start": 0, "end": len(ids)}]
    return {"text": "".join(spec["texts"][: len(ids)]), "output_ids": ids, "meta_info": meta}


def _chat(spec: dict[str, Any], logprobs: list[float] | None) -> dict[str, Any]:
    """An engine's own chat response, with ids and logprobs in vLLM's form if the request asks for them."""
    ids, prompt_tokens = spec["ids"], spec["prompt_tokens"]
    choice: dict[str, Any] = {"index": 0, "finish_reason": "tool_calls", "message": spec["message"]}
    answer: dict[str, Any] = {
        "id": "chatcmpl-stub",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(ids),
            "total_tokens": prompt_tokens + len(ids),
        },
    }
    if logprobs is not None:
        answer["prompt_token_ids"] = [1000 + i % 100_000 for i in range(prompt_tokens)]
        choice["token_ids"] = ids
        choice["logprobs"] = {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(spec["texts"], logprobs, strict=True)
            ]
        }
    return answer


class Engine:
    """The prepared replies, and the time at which the first token of each streamed call was sent."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.replies = {int(limit): Reply(spec) for limit, spec in config["replies"].items()}
        self.info = _http(_dump(config["info"]))
        self.sent: dict[str, float] = {}  # rid → time.monotonic()


class _Connection(asyncio.Protocol):
    """An HTTP/1.1 connection that handles one request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffer = bytearray()
        self._needed = 0  # size of the request that is arriving, once its head is complete
        self._head = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            if not self._needed:
                end = self._buffer.find(b"\r\n\r\n")
                if end < 0:
                    return
                self._head = bytes(self._buffer[:end])
                length = self._head.lower().partition(b"content-length:")[2].partition(b"\r")[0]
                self._needed = end + 4 + int(length or 0)
            if len(self._buffer) < self._needed:
                return
            body = bytes(self._buffer[len(self._head) + 4 : self._needed])
            del self._buffer[: self._needed]
            self._needed = 0
            self._answer(self._head.split(b" ", 2)[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        engine = self._engine
        if path == b"/generate" or path.endswith(b"/chat/completions"):
            # The limit is near an end of the body; the text in between may contain anything.
            found = _LIMIT.search(body[-_ENDS:]) or _LIMIT.search(body[:_ENDS])
            reply = engine.replies.get(int(found[1])) if found else None
            if reply is None:
                self._write(_http(_NO_REPLY, b"400 Bad Request"))
            elif path != b"/generate":
                self._later(reply, reply.chat_with_ids if _WITH_IDS.search(body) else reply.chat)
            elif _STREAM.search(body[-_ENDS:]) or _STREAM.search(body[:_ENDS]):
                rid = _RID.search(body)
                self._stream(reply, rid[1].decode() if rid else "", 0)
            else:
                self._later(reply, reply.native)
        elif path == b"/sent":
            self._write(_http(_dump(engine.sent)))
        else:  # /model_info, /server_info, /health and other requests that need only a 200
            self._write(engine.info)

    def _later(self, reply: Reply, answer: bytes) -> None:
        if reply.delay_s:
            asyncio.get_running_loop().call_later(reply.delay_s, self._write, answer)
        else:
            self._write(answer)

    def _stream(self, reply: Reply, rid: str, index: int) -> None:
        """Send piece `index` of a streamed reply and schedule the next."""
        if index == 0:
            self._write(_STREAM_HEAD)
            self._engine.sent[rid] = time.monotonic()
        self._write(reply.events[index])
        if index + 1 == len(reply.events):
            self._write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            asyncio.get_running_loop().call_later(reply.token_s, self._stream, reply, rid, index + 1)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _event(piece: dict[str, Any]) -> bytes:
    return _chunk(b"data: " + _dump(piece) + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _http(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        status,
        len(body),
        body,
    )


async def _serve(config: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    engine = Engine(config)
    server = await loop.create_server(lambda: _Connection(engine), "127.0.0.1", 0, backlog=2048)
    print(f"serving at http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_serve(json.loads(Path(sys.argv[1]).read_text())))
