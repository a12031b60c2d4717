"""Streams as bytes on a socket: events split anywhere, both forms of chunks, and invalid streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from polling import until

from areal_agents.core.completion import Completion, SamplingParams, TokenChunk, as_token_ids
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference.sglang.client import SGLangEngine
from areal_agents.inference.sglang.transport import EventReader, HttpTransport
from areal_agents.inference.sglang.wire import StreamedCompletion

IDS = [11, 12, 13, 14, 15]
LOGPROBS = [-0.5, -1.5, -0.25, -2.0, 0.0]
SPANS = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]
DONE = b"data: [DONE]\n\n"


def chunk(first: int, end: int, **meta: Any) -> dict[str, Any]:
    """Return the chunk in which SGLang streams the tokens from `first` to `end`."""
    triples = [[LOGPROBS[i], IDS[i], None] for i in range(first, end)]
    tops = [[[LOGPROBS[i], IDS[i], None], [-9.0, 1, None]] for i in range(first, end)]
    return {
        "text": "é" * (end - first),
        "output_ids": IDS[first:end],
        "meta_info": {
            "finish_reason": None,
            "completion_tokens": end,
            "weight_version": "4",
            "output_token_logprobs": triples,
            "output_top_logprobs": tops,
        }
        | meta,
    }


FINAL = {"finish_reason": {"type": "stop", "matched": 15}, "weight_versions": SPANS}
CUMULATIVE = [chunk(0, 1), chunk(0, 3), chunk(0, 3), chunk(0, 5, **FINAL)]
INCREMENTAL = [chunk(0, 1), chunk(1, 3), chunk(3, 3), chunk(3, 5, **FINAL)]


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def stream_of(chunks: list[dict[str, Any]]) -> bytes:
    return b"".join(map(event, chunks)) + DONE


@asynccontextmanager
async def serving(
    writes: list[bytes],
    *,
    cut: bool = False,
    hang: bool = False,
    timeout_s: float = 60.0,
    before_write: Callable[[int], Awaitable[None]] | None = None,
) -> AsyncIterator[tuple[SGLangEngine, list[str]]]:
    """Yield the client of a server that answers /generate with separate `writes`, and the aborted rids.

    `before_write` is called with the index of each write.
    """
    aborted: list[str] = []

    async def generate(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["stream"] is True
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for index, data in enumerate(writes):
            if before_write is not None:
                await before_write(index)
            await response.write(data)
            await asyncio.sleep(0)
        if hang:
            await asyncio.Event().wait()
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    async def abort(request: web.Request) -> web.Response:
        aborted.append((await request.json())["rid"])
        return web.Response()

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_post("/abort_request", abort)
    async with (
        TestServer(app) as server,
        SGLangEngine(str(server.make_url("/")), vocab_size=99, request_timeout_s=timeout_s) as engine,
    ):
        yield engine, aborted


async def generate(
    engine: SGLangEngine, on_tokens: Callable[[TokenChunk], None] = lambda piece: None
) -> Completion:
    return await engine.generate("r1", as_token_ids([1, 2]), SamplingParams(9, top_logprobs=2), on_tokens)


def split_at(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cuts), len(data)]
    return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@pytest.mark.parametrize("form", [CUMULATIVE, INCREMENTAL], ids=["cumulative", "incremental"])
@pytest.mark.parametrize("cut", ["whole", "bytes", "random", "events", "crlf", "noise"])
async def test_a_stream_yields_the_same_completion_however_it_is_split(
    form: list[dict[str, Any]], cut: str
) -> None:
    data = stream_of(form)
    writes = {
        "whole": [data],
        "bytes": [data[i : i + 1] for i in range(len(data))],
        "random": split_at(data, random.Random(5).sample(range(len(data)), 40)),
        "events": [*map(event, form), DONE],
        "crlf": split_at(data.replace(b"\n", b"\r\n"), list(range(0, len(data), 7))),
        "noise": [b": ping\n\nevent: x\nid: 7\n" + event(part).replace(b"data: ", b"data:") for part in form],
    }[cut]
    pieces: list[TokenChunk] = []
    async with serving(writes) as (engine, aborted):
        completion = await generate(engine, pieces.append)
    assert completion.token_ids.tolist() == IDS
    assert completion.logprobs.tolist() == LOGPROBS
    assert completion.versions.tolist() == [3, 3, 4, 4, 4]
    assert completion.finish_reason == "stop"
    assert sum((piece.token_ids for piece in pieces), ()) == tuple(IDS)
    assert sum((piece.logprobs for piece in pieces), ()) == tuple(LOGPROBS)
    assert sum((piece.top_logprobs for piece in pieces), ()) == completion.top_logprobs
    assert completion.top_logprobs[1] == ((12, -1.5), (1, -9.0))
    assert aborted == []


async def test_only_the_last_of_many_cumulative_events_in_one_read_is_parsed() -> None:
    """Once chunks are known to be cumulative, the events before the last one are not even parsed."""
    whole = StreamedCompletion()
    whole.feed(event(chunk(0, 1))[6:])
    assert not whole.cumulative
    whole.feed(event(chunk(0, 2))[6:])
    assert whole.cumulative
    later = b"data: garbage\n\n" + event(chunk(0, 5, **FINAL)) + DONE
    seen: list[int] = []

    async def earlier_ones_are_read(index: int) -> None:
        await until(lambda: len(seen) >= index)

    writes = [event(chunk(0, 1)), event(chunk(0, 2)), later]
    async with serving(writes, before_write=earlier_ones_are_read) as (engine, _):
        completion = await generate(engine, lambda piece: seen.extend(piece.token_ids))
    assert seen == completion.token_ids.tolist() == IDS


async def test_without_spans_the_version_is_that_of_the_last_chunk() -> None:
    last = chunk(0, 5, finish_reason={"type": "length", "length": 5})
    async with serving([stream_of([chunk(0, 2, weight_version="3"), last])]) as (engine, _):
        assert (await generate(engine)).versions.tolist() == [4] * 5


async def test_an_abort_of_a_retracted_request_has_one_id_and_all_logprobs() -> None:
    last = chunk(0, 4, finish_reason={"type": "abort", "message": "Aborted", "status_code": None})
    last["output_ids"] = [14]
    async with serving([stream_of([chunk(0, 1), chunk(1, 3), last])]) as (engine, _):
        completion = await generate(engine)
    assert (completion.token_ids.tolist(), completion.finish_reason) == (IDS[:4], "abort")


async def test_an_abort_before_the_first_token_is_empty() -> None:
    last = chunk(0, 0, finish_reason={"type": "abort", "message": "Aborted"})
    async with serving([stream_of([last])]) as (engine, _):
        assert len(await generate(engine)) == 0


REFUSED = {"error": {"message": "bad grammar", "type": "invalid_request_error", "code": 400}}
NEVER_RUN = chunk(
    0, 0, completion_tokens=1, finish_reason={"type": "abort", "message": "bad", "status_code": 400}
)


@pytest.mark.parametrize(
    ("writes", "error", "message"),
    [
        (
            [event(chunk(0, 1)), event(REFUSED), DONE],
            EngineRejected,
            r"refused the request \(400\): bad grammar",
        ),
        ([event({"error": {"message": "lost", "code": 503}}), DONE], EngineUnavailable, "lost"),
        ([event({"error": "broken"})], EngineUnavailable, "broken"),
        ([event(NEVER_RUN | {"output_ids": [77]}), DONE], EngineRejected, "bad"),
        ([event(chunk(0, 1)), DONE], EngineUnavailable, "ended its stream before the completion finished"),
        ([], EngineUnavailable, "ended its stream before"),
        ([event(chunk(0, 1)) + b'data: {"out'], EngineUnavailable, "ended its stream before"),
        ([event(chunk(0, 1)), b"data: {nonsense\n\n"], EngineError, "not JSON"),
        ([event([])], EngineError, "not a JSON object"),
        ([event({"output_ids": [1]})], EngineError, "meta_info is not a JSON object"),
        ([event(chunk(0, 2)), event(chunk(0, 1))], EngineError, "1 tokens after 2 and counts 1"),
        ([event(chunk(0, 2)), event(chunk(4, 5))], EngineError, "1 tokens after 2 and counts 5"),
        ([event(chunk(0, 2) | {"output_ids": [11, 99]})], EngineError, "other tokens"),
        ([event(chunk(0, 1, output_token_logprobs=[[None, 11, None]]))], EngineError, "None, which is no"),
        ([event(chunk(0, 5, finish_reason="bored"))], EngineError, "'bored'; expected one of"),
        ([event(chunk(0, 5, **FINAL | {"weight_versions": SPANS[:1]}))], EngineError, "do not cover"),
    ],
)
async def test_an_invalid_stream_is_an_error(
    writes: list[bytes], error: type[Exception], message: str
) -> None:
    async with serving(writes) as (engine, _):
        with pytest.raises(error, match=message) as caught:
            await generate(engine)
    assert caught.type is error


async def test_a_connection_serves_one_stream_after_another() -> None:
    ports: list[int] = []

    async def generate_one(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        response = web.StreamResponse()
        await response.prepare(request)
        for data in (*map(event, INCREMENTAL), DONE):
            await response.write(data)
        return response

    app = web.Application()
    app.router.add_post("/generate", generate_one)
    async with TestServer(app) as server, SGLangEngine(str(server.make_url("/")), vocab_size=99) as engine:
        for _ in range(3):
            await generate(engine)
    assert len(set(ports)) == 1


async def test_a_broken_connection_is_an_unavailable_engine() -> None:
    async with serving([event(chunk(0, 1))], cut=True) as (engine, _):
        with pytest.raises(EngineUnavailable, match="not reachable"):
            await generate(engine)


async def test_a_stream_that_stalls_ends_at_the_total_limit() -> None:
    async with serving([event(chunk(0, 1))], hang=True, timeout_s=0.2) as (engine, _):
        with pytest.raises(EngineUnavailable, match=r"did not answer within 0\.2 s"):
            await generate(engine)


async def test_the_error_has_the_limit_for_connections_if_no_connection_is_accepted() -> None:
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        opened.enter_context(socket.create_connection(address))  # the queue of the listener is full
        http = HttpTransport("http://{}:{}".format(*address), connect_timeout_s=0.2)
        message = r"^http://127\.0\.0\.1:\d+/health accepted no connection within 0\.2 s$"
        with pytest.raises(EngineUnavailable, match=message):
            await http.call("GET", "/health", timeout_s=600)
        await http.aclose()


async def test_a_status_400_in_place_of_a_stream_is_a_refusal() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "rid is taken"}}, status=400)

    app = web.Application()
    app.router.add_post("/generate", refuse)
    async with TestServer(app) as server, SGLangEngine(str(server.make_url("/")), vocab_size=99) as engine:
        with pytest.raises(EngineRejected, match=r"\(400\): rid is taken"):
            await generate(engine)


@pytest.mark.parametrize("failure", [ArithmeticError("mine"), TimeoutError("mine"), asyncio.CancelledError()])
async def test_an_exception_of_on_tokens_is_raised_and_the_call_is_aborted(failure: BaseException) -> None:
    def fail(piece: TokenChunk) -> None:
        raise failure

    async with serving([event(chunk(0, 1))], hang=True) as (engine, aborted):
        with pytest.raises(type(failure)) as caught:
            await generate(engine, fail)
        assert caught.value is failure
        async with asyncio.timeout(10):
            while not aborted:
                await asyncio.sleep(0.001)
    assert aborted == ["r1$"]


def test_the_size_of_an_event_is_limited() -> None:
    reader = EventReader(limit=100)
    assert reader.feed(b"data: " + b"x" * 90) == []
    with pytest.raises(EngineError, match="more than 100 bytes"):
        reader.feed(b"x" * 10)
    reader = EventReader(limit=100)
    with pytest.raises(EngineError, match="more than 100 bytes"):
        reader.feed(b"data: 12345678\n" * 10)


def test_data_over_several_lines_is_one_event() -> None:
    reader = EventReader()
    assert reader.feed(b"data: a\ndata:b\n\n\n\ndata: c") == [b"a\nb"]
    assert reader.feed(b"\n\n") == [b"c"]
