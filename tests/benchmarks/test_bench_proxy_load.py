"""The benchmark's load generator against servers that close connections and refuse calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from areal_agents.errors import EngineError
from areal_agents.rendering import Tokenizer
from benchmarks.proxy import run as proxy
from benchmarks.proxy.load import Connection, Conversation, Tally
from benchmarks.proxy.qwen_vocabulary import qwen_folder
from benchmarks.proxy.run import QUICK, Bench, UnsoundFigure, _refuse_failures
from benchmarks.proxy.texts import Texts

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REPLY = json.dumps(
    {
        "choices": [{"message": {"role": "assistant", "content": "x", "tool_calls": [CALL]}}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 5},
    }
).encode()
Serve = Callable[[int, int, asyncio.StreamWriter], Awaitable[bool]]


def answer(body: bytes = REPLY, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[str]:
    """Run a server that calls `serve` for each request, with its number in total and on its connection.

    The server closes the connection if `serve` returns False.
    """
    requests = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        here = 0
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
                requests, here = requests + 1, here + 1
                if not await serve(requests, here, writer):
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def played(url: str, calls: int) -> Tally:
    tally = Tally()
    connection = await Connection.open(url)
    conversation = Conversation(connection, system="s", task="t", tools=[], path="/v1/x", key="k")
    for number in range(calls):
        await conversation.call(5, tally, "r" if number else None)
        await asyncio.sleep(0.01)
    conversation.close()
    return tally


async def closes_after_answering(request: int, here: int, writer: asyncio.StreamWriter) -> bool:
    writer.write(answer())
    await writer.drain()
    return False


async def says_so(request: int, here: int, writer: asyncio.StreamWriter) -> bool:
    writer.write(answer(headers="Connection: close\r\n"))
    await writer.drain()
    return True  # the connection stays open, but the client must not use it again


async def closes_on_the_second(request: int, here: int, writer: asyncio.StreamWriter) -> bool:
    if here > 1:
        return False  # like a server whose idle timeout expires while the request arrives
    writer.write(answer())
    await writer.drain()
    return True


@pytest.mark.parametrize("serve", [closes_after_answering, says_so, closes_on_the_second])
async def test_a_connection_that_the_server_closed_between_two_calls_is_reopened(serve: Serve) -> None:
    async with asyncio.timeout(60), serving(serve) as url:
        tally = await played(url, 4)
    assert (tally.failures, len(tally.latencies_s), tally.reopened) == (0, 4, 3), tally.examples


async def test_a_truncated_response_is_a_failure_and_its_connection_is_not_reused() -> None:
    async def breaks_off(request: int, here: int, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer()[:-10] if request == 2 else answer())
        await writer.drain()
        return request != 2

    async with asyncio.timeout(60), serving(breaks_off) as url:
        tally = await played(url, 3)
    assert tally.failures == 1 and "IncompleteReadError" in tally.examples[0]
    assert len(tally.latencies_s) == 2 and tally.reopened == 1


async def test_a_failed_first_request_of_a_connection_is_not_repeated() -> None:
    asked = []

    async def refuses(request: int, here: int, writer: asyncio.StreamWriter) -> bool:
        asked.append(here)
        return False

    async with asyncio.timeout(60), serving(refuses) as url:
        tally = await played(url, 3)
    assert tally.failures == 3 and asked == [1, 1, 1] and not tally.latencies_s


async def test_refused_calls_have_no_latency() -> None:
    async def refuses(request: int, here: int, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer(b"{}", "503 Busy"))
        await writer.drain()
        return True

    async with asyncio.timeout(60), serving(refuses) as url:
        tally = await played(url, 2)
    assert tally.failures == 2 and not tally.latencies_s and tally.examples[0] == "503 {}"


def test_a_figure_that_includes_failed_calls_is_refused() -> None:
    async def call() -> None: ...

    tally = Tally(failures=3)
    _refuse_failures("LiteLLM", [call] * 4, tally, 3)
    tally.failed("IncompleteReadError")
    with pytest.raises(UnsoundFigure, match="1 of 4 timed calls to LiteLLM failed.*IncompleteReadError"):
        _refuse_failures("LiteLLM", [call] * 4, tally, 3)


class _Stub:
    """A server in this process, whose processor time is not measured."""

    def __init__(self, url: str) -> None:
        self.url = url

    def cpu_s(self) -> float:
        return 0.0


async def test_failures_of_litellm_are_counted_separately_and_suppress_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def often_busy(request: int, here: int, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer(b"{}", "503 Busy") if request % 3 == 0 else answer())
        await writer.drain()
        return True

    folder = qwen_folder()
    bench = Bench(tmp_path, folder, Texts(Tokenizer.from_folder(folder)), QUICK)
    async with asyncio.timeout(100), serving(often_busy) as url:
        stub: Any = _Stub(url)
        assert await asyncio.to_thread(bench.litellm_cpu_ms, stub) is None
    assert bench.tallies["LiteLLM"].failures > 0 and bench.tally.failures == 0
    (reason,) = bench.unsound
    assert "timed calls to LiteLLM failed" in reason and "503 {}" in reason

    # The other figures are printed, and the command fails.
    figures = {"cpu_ms_4k": 1.5, "litellm_cpu_ms_4k": None}
    monkeypatch.setattr(Bench, "measure", lambda self: self.unsound.append(reason) or figures)
    with pytest.raises(EngineError, match="timed calls to LiteLLM failed"):
        proxy.run(json=True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures
