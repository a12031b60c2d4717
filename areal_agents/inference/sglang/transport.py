"""HTTP to one server. Every wait has a time limit, and every failure becomes an error of `errors`.

Server-sent events are parsed from a byte stream however the reads split it: inside a line, or many events at
once. Invariant: at most one unfinished event, of bounded size, is buffered.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import orjson

from areal_agents.errors import EngineError, EngineUnavailable
from areal_agents.inference.http_connections import (
    BadAnswer,
    ConnectTimeout,
    HttpConnections,
    TooLarge,
)
from areal_agents.inference.sglang.wire import error_of
from areal_agents.secret_variables import bearer

JSON = {"Content-Type": "application/json"}
END_WAIT_S = 1.0  # longest wait for the end of a stream after its last event
DONE = b"[DONE]"  # the event after the last chunk of a stream
NO_ENDPOINT = (404, 405)
MAX_ANSWER_BYTES = 128 * 1024 * 1024


class HttpTransport:
    """Sends requests to `base_url`, with the key of the engine if it has one.

    Raises ValueError if `base_url` is not an HTTP URL.
    """

    def __init__(self, base_url: str, *, connect_timeout_s: float, key: str = "") -> None:
        self._connect_timeout_s = connect_timeout_s
        self._headers = {**JSON, **bearer(key)}
        self._connections = self._connections_to(base_url)
        self._base_url = base_url.rstrip("/")

    @property
    def base_url(self) -> str:
        """The address; requests that are under way when it is changed stay where they are."""
        return self._base_url

    @base_url.setter
    def base_url(self, base_url: str) -> None:
        self._connections.close()
        self._connections = self._connections_to(base_url)
        self._base_url = base_url.rstrip("/")

    async def call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float, optional: bool = False
    ) -> Any:
        """Send a request and return the parsed JSON, or None for an empty body.

        With `optional`, also returns None if the server does not have the endpoint.
        """
        url, sent = self.base_url + path, _dumps(body)
        with _mapped_errors(url, timeout_s, self._connect_timeout_s):
            status, raw = await self._connections.whole(
                method, path, sent, timeout_s=timeout_s, most_bytes=MAX_ANSWER_BYTES
            )
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
        url, sent, reader = self.base_url + path, _dumps(body), EventReader()
        with _mapped_errors(url, timeout_s, self._connect_timeout_s):
            async with self._connections.streamed("POST", path, sent, timeout_s=timeout_s) as answer:
                if (error := error_of(url, answer.status, b"")) is not None:
                    raise error_of(url, answer.status, await answer.whole(MAX_ANSWER_BYTES)) or error
                while (received := await answer.part()) is not None:
                    events = reader.feed(received)
                    done = bool(events) and events[-1] == DONE
                    if events[: len(events) - done]:
                        yield events[: len(events) - done]
                    if done:
                        with suppress(TimeoutError, OSError, BadAnswer, TooLarge):
                            # Read to the end, so that the connection can be used again.
                            await answer.whole(MAX_ANSWER_BYTES, timeout_s=END_WAIT_S)
                        return

    async def aclose(self) -> None:
        """Close the connections; a later request opens new ones."""
        self._connections.close()
        self._connections = self._connections_to(self._base_url)

    def _connections_to(self, base_url: str) -> HttpConnections:
        return HttpConnections(base_url, self._headers, connect_timeout_s=self._connect_timeout_s)


def _dumps(body: Any) -> bytes | None:
    return None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


@contextmanager
def _mapped_errors(url: str, timeout_s: float, connect_timeout_s: float) -> Iterator[None]:
    try:
        yield
    except ConnectTimeout as error:
        raise EngineUnavailable(f"{url} accepted no connection within {connect_timeout_s:g} s") from error
    except TimeoutError as error:
        raise EngineUnavailable(f"{url} did not answer within {timeout_s:g} s") from error
    except OSError as error:
        raise EngineUnavailable(f"{url} is not reachable: {error}") from error
    except BadAnswer as error:
        raise EngineUnavailable(f"{url} gave no answer that can be read: {error}") from error
    except TooLarge as error:
        raise EngineError(f"{url} sent an answer of more than {MAX_ANSWER_BYTES} bytes") from error


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
