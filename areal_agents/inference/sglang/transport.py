"""HTTP to one server. Every wait has a time limit, and every failure becomes an error of `errors`.

Server-sent events are parsed from a byte stream however the reads split it: inside a line, or many events at
once. Invariant: at most one unfinished event, of bounded size, is buffered.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Any

import aiohttp
import orjson

from areal_agents.errors import EngineError, EngineUnavailable
from areal_agents.inference.sglang.wire import error_of
from areal_agents.secret_variables import bearer

JSON = {"Content-Type": "application/json"}
# Below the 5 s after which SGLang closes idle connections, so that no call uses a connection being closed.
KEEP_ALIVE_S = 3.0
END_WAIT_S = 1.0  # longest wait for the end of a stream after its last event
DONE = b"[DONE]"  # the event after the last chunk of a stream
NO_ENDPOINT = (404, 405)


class HttpTransport:
    """Sends requests to `base_url`, with the key of the engine if it has one.

    Raises ValueError if `base_url` is not an HTTP URL.
    """

    def __init__(self, base_url: str, *, connect_timeout_s: float, key: str = "") -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must start with http:// or https://, got {base_url!r}")
        self.base_url = base_url.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        self._headers = {**JSON, **bearer(key)}
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float, optional: bool = False
    ) -> Any:
        """Send a request and return the parsed JSON, or None for an empty body.

        With `optional`, also returns None if the server does not have the endpoint.
        """
        url = self.base_url + path
        with _mapped_errors(url, timeout_s, self._connect_timeout_s):
            async with self._open(method, url, body, timeout_s) as response:
                raw, status = await _whole_answer(response), response.status
        if optional and status in NO_ENDPOINT:
            return None
        if (error := error_of(url, status, raw)) is not None:
            raise error
        if not raw:
            return None
        try:
            return orjson.loads(raw)
        except ValueError:
            return raw.decode(errors="replace")  # /flush_cache and /health answer with plain text

    async def events(self, path: str, body: Any, *, timeout_s: float) -> AsyncGenerator[list[bytes], None]:
        """Yield the events of a streamed answer in the batches in which they arrive, without the final
        [DONE]."""
        url, reader = self.base_url + path, EventReader()
        with _mapped_errors(url, timeout_s, self._connect_timeout_s):
            async with self._open("POST", url, body, timeout_s) as response:
                if (error := error_of(url, response.status, b"")) is not None:
                    raise error_of(url, response.status, await _whole_answer(response)) or error
                async for received in response.content.iter_any():
                    events = reader.feed(received)
                    done = bool(events) and events[-1] == DONE
                    if events[: len(events) - done]:
                        yield events[: len(events) - done]
                    if done:
                        await _finish(response)
                        return

    async def aclose(self) -> None:
        """Close the connections; a later request opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(
        self, method: str, url: str, body: Any, timeout_s: float
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            # No limit on connections: the caller's admission control limits concurrent calls.
            # aiohttp's own context has the authorities that were trusted when aiohttp was imported.
            context = ssl.create_default_context() if self.base_url.startswith("https:") else True
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=context)
            )
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_timeout_s)
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        return self._session.request(method, url, data=data, headers=self._headers, timeout=timeout)


MAX_ANSWER_BYTES = 128 * 1024 * 1024  # also of an answer that was sent compressed


async def _whole_answer(response: aiohttp.ClientResponse) -> bytes:
    """Return the whole body; EngineError if it exceeds the limit."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            response.close()
            raise EngineError(f"the engine sent an answer of more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


async def _finish(response: aiohttp.ClientResponse) -> None:
    """Read to the end of the stream, so that the connection can be reused."""
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(END_WAIT_S):
            await _whole_answer(response)


@contextmanager
def _mapped_errors(url: str, timeout_s: float, connect_timeout_s: float) -> Iterator[None]:
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:  # which is a TimeoutError too
        raise EngineUnavailable(f"{url} accepted no connection within {connect_timeout_s:g} s") from error
    except TimeoutError as error:
        raise EngineUnavailable(f"{url} did not answer within {timeout_s:g} s") from error
    except aiohttp.ClientError as error:
        raise EngineUnavailable(f"{url} is not reachable: {error}") from error


MAX_EVENT_BYTES = 64 * 1024 * 1024  # twice a cumulative chunk of 32k tokens with 20 top logprobs


class EventReader:
    """Collects the `data:` field of each event; comments and other fields are skipped."""

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit
        self._rest = bytearray()  # the unfinished line
        self._scanned = 0  # number of its bytes known to contain no line end
        self._data: list[bytes] = []  # the lines of the unfinished event
        self._held = 0  # size of the unfinished event in bytes

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of the events that `received` completes; EngineError if one exceeds the limit."""
        self._rest += received
        events: list[bytes] = []
        start = 0
        while (end := self._rest.find(b"\n", max(start, self._scanned))) >= 0:
            with memoryview(self._rest) as view:
                line = bytes(view[start:end])
            start = end + 1
            self._take(line.removesuffix(b"\r"), events)
        del self._rest[:start]
        self._scanned = len(self._rest)
        if self._held + len(self._rest) > self._limit:
            raise EngineError(f"the engine streamed an event of more than {self._limit} bytes")
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            self._held += len(line)
        elif not line and self._data:
            events.append(b"\n".join(self._data))
            self._data, self._held = [], 0
