"""Plays complete conversations over plain sockets, so that the load generator uses little CPU time.

A conversation sends back the server's replies, as an agent does, and adds a tool result. Its body is kept in
serialised pieces, so a call costs one join, whatever the length of the history.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

CALL_TIMEOUT_S = 120.0


class Connection:
    """A keep-alive HTTP/1.1 connection. It is reopened when the server has closed it between two calls, or
    after a failed call.

    Attributes:
        reopened: number of times that it was reopened.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        self._address = address
        self._reader = reader
        self._writer = writer
        self._used = False
        self._clean = True  # no part of a response is outstanding, so the next request may be sent
        self.reopened = 0

    @classmethod
    async def open(cls, url: str) -> Connection:
        """Connect to http://host:port."""
        address = url.partition("://")[2]
        return cls(*await _connected(address), address)

    async def post(self, path: str, body: bytes, key: str) -> tuple[int, bytes]:
        """Return (status, body) of a response that is not streamed."""
        head = await self._head(path, body, key)
        return int(head[9:12]), await self._body(head)

    async def get(self, path: str, key: str) -> bytes:
        """Return the body of a response to a GET."""
        head = await self._head(path, b"", key, method="GET")
        return await self._body(head)

    async def post_streamed(self, path: str, body: bytes, key: str) -> tuple[int, bytes, float]:
        """Return (status, body, time.monotonic() when the first text of the reply arrived)."""
        head = await self._head(path, body, key)
        status, first = int(head[9:12]), 0.0
        if b"transfer-encoding: chunked" not in head:
            return status, await self._body(head), first
        pieces = []
        async for piece in self._pieces():
            if not first and b'content":"' in piece.replace(b'content":""', b""):
                first = time.monotonic()
            pieces.append(piece)
        self._clean = b"\r\nconnection: close" not in head
        return status, b"".join(pieces), first

    async def _head(self, path: str, body: bytes, key: str, *, method: str = "POST") -> bytes:
        """Send a request; return the head of the response, in lower case.

        A server may close an idle connection at any time, even just before it reads the request. If not a
        single byte of a response arrives, the request is sent once more on a new connection.
        """
        if not self._clean or self._writer.is_closing() or self._reader.at_eof():
            await self._reopen()
        fresh, self._clean = not self._used, False
        try:
            self._send(path, body, key, method)
            head = await self._reader.readuntil(b"\r\n\r\n")
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            if fresh or (isinstance(error, asyncio.IncompleteReadError) and error.partial):
                raise
            await self._reopen()
            self._send(path, body, key, method)
            head = await self._reader.readuntil(b"\r\n\r\n")
        self._used = True
        return head.lower()

    async def _reopen(self) -> None:
        self._writer.close()
        self._reader, self._writer = await _connected(self._address)
        self._used = False
        self.reopened += 1

    async def _body(self, head: bytes) -> bytes:
        """Read the rest of a response."""
        if b"transfer-encoding: chunked" in head:
            body = b"".join([piece async for piece in self._pieces()])
        else:
            length = int(head.partition(b"content-length:")[2].partition(b"\r")[0])
            body = await self._reader.readexactly(length)
        self._clean = b"\r\nconnection: close" not in head
        return body

    async def _pieces(self) -> Any:
        while size := int(await self._reader.readline(), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()

    def _send(self, path: str, body: bytes, key: str, method: str) -> None:
        if self._writer.is_closing():
            raise ConnectionResetError("the server has closed the connection")
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._address}\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)

    def close(self) -> None:
        """Close the socket."""
        self._writer.close()


@dataclass
class Tally:
    """The results: latencies in seconds and prompt lengths of whole replies, and descriptions of the first
    failures. `reopened` counts connections that the server had closed.
    """

    latencies_s: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    failures: int = 0
    reopened: int = 0
    examples: list[str] = field(default_factory=list)

    def failed(self, what: str) -> None:
        """Count one."""
        self.failures += 1
        if len(self.examples) < 5:
            self.examples.append(what)

    def add(self, other: Tally) -> None:
        """Add the failures of another tally."""
        self.failures += other.failures
        self.reopened += other.reopened
        self.examples += other.examples[: 5 - len(self.examples)]


class Conversation:
    """The agent of one episode: a system prompt, a task, then tool results, over its own connection.

    Args:
        system, task: texts of the first two messages.
        tools: tools in OpenAI's format.
        path, key: path of the chat endpoint, and the bearer token.

    Attributes:
        episode_id: id of the episode on the proxy; "" with a proxy that has no episodes.
    """

    def __init__(
        self, connection: Connection, *, system: str, task: str, tools: Sequence[Any], path: str, key: str
    ) -> None:
        self._connection = connection
        self._path = path
        self._key = key
        self._tools = orjson.dumps(list(tools))
        self._messages = [
            orjson.dumps({"role": "system", "content": system}),
            orjson.dumps({"role": "user", "content": task}),
        ]
        self._call_id = ""
        self._busy = asyncio.Lock()
        self.episode_id = ""

    def add_result(self, text: str) -> None:
        """The message with the result of the tool that the last reply called."""
        self._messages.append(orjson.dumps({"role": "tool", "tool_call_id": self._call_id, "content": text}))

    def add_reply(self, message: dict[str, Any]) -> None:
        """The assistant message, as the server sent it."""
        self._call_id = message["tool_calls"][0]["id"]
        self._messages.append(orjson.dumps(message))

    async def call(self, max_tokens: int, tally: Tally, newest: str | None = None) -> None:
        """Play one turn: add `newest` as the last call's result, send the request, check and keep the
        reply."""
        async with self._busy:
            if newest is not None:
                self.add_result(newest)
            body = self._body(max_tokens, stream=False)
            started, reopened = time.perf_counter(), self._connection.reopened
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    status, raw = await self._connection.post(self._path, body, self._key)
            except (TimeoutError, OSError, EOFError, ValueError) as error:
                tally.failed(repr(error))
                return
            finally:
                tally.reopened += self._connection.reopened - reopened
            latency_s = time.perf_counter() - started
            answer = orjson.loads(raw) if status == 200 else {}
            if not _is_whole(answer, max_tokens):
                tally.failed(f"{status} {raw[:300].decode(errors='replace')}")
                return
            tally.latencies_s.append(latency_s)
            tally.prompt_tokens.append(answer["usage"]["prompt_tokens"])
            message = answer["choices"][0]["message"]
            self.add_reply({name: value for name, value in message.items() if value is not None})

    async def post(self, max_tokens: int) -> tuple[int, bytes]:
        """Send the request of this turn, and return the status and the body of the response."""
        return await self._connection.post(self._path, self._body(max_tokens, stream=False), self._key)

    async def call_streamed(self, max_tokens: int, tally: Tally) -> tuple[str, float]:
        """Return (completion id, time.monotonic() of the first text) of one streamed reply, which is not
        kept."""
        body = self._body(max_tokens, stream=True)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                status, raw, first = await self._connection.post_streamed(self._path, body, self._key)
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            tally.failed(repr(error))
            return "", 0.0
        if status != 200 or b"[DONE]" not in raw or not first:
            tally.failed(f"{status} {raw[:300].decode(errors='replace')}")
            return "", 0.0
        return raw.partition(b'"id":"')[2].partition(b'"')[0].decode(), first

    def _body(self, max_tokens: int, *, stream: bool) -> bytes:
        tail = b',"stream":true' if stream else b""
        return b'{"model":"policy","messages":[%s],"tools":%s,"temperature":1.0%s,"max_tokens":%d}' % (
            b",".join(self._messages),
            self._tools,
            tail,
            max_tokens,
        )

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


async def _connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.partition(":")
    return await asyncio.open_connection(host, int(port), limit=2**20)


def _is_whole(answer: dict[str, Any], max_tokens: int) -> bool:
    """Whether this is a reply of `max_tokens` tokens with one tool call."""
    if not answer or answer["usage"]["completion_tokens"] != max_tokens:
        return False
    return len(answer["choices"][0]["message"].get("tool_calls") or ()) == 1


Call = Callable[[], Awaitable[None]]


async def all_at_once(calls: Iterable[Call], *, at_a_time: int) -> None:
    """Run the calls in order, `at_a_time` of them concurrently."""
    waiting = iter(list(calls))

    async def work() -> None:
        for call in waiting:
            await call()

    await asyncio.gather(*(work() for _ in range(at_a_time)))


async def at_rate(calls: Sequence[Call], *, per_s: float) -> None:
    """Start one call every 1 / per_s seconds, whether or not the earlier ones have ended; return when all
    have ended."""
    started = time.perf_counter()
    tasks = []
    for index, call in enumerate(calls):
        delay = started + index / per_s - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.ensure_future(call()))
    await asyncio.gather(*tasks)
