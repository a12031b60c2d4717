"""Batches concurrent requests: everything that waits when a search ends is searched by the next call.

No request waits for others to come: alone, it is searched at once. One thread searches, so the index need not
be safe for several.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from retrieval.index import Hit, Index, Mode


class TooBusy(Exception):
    """More queries wait than the server accepts."""


@dataclass(slots=True, eq=False)
class _Waiting:
    queries: Sequence[str]
    k: int
    mode: Mode
    result: asyncio.Future[list[list[Hit]]] = field(repr=False)


class Batcher:
    """Searches an index for many callers.

    Args:
        most_queries: the most queries of one call of the index.
        most_waiting: the most queries that wait; further ones are refused.
    """

    def __init__(self, index: Index, *, most_queries: int = 256, most_waiting: int = 10_000) -> None:
        self._index = index
        self._most_queries = most_queries
        self._most_waiting = most_waiting
        self._waiting: list[_Waiting] = []
        self._queries_waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._running: asyncio.Task[None] | None = None
        self.calls = 0  # of the index so far

    async def search(self, queries: Sequence[str], k: int, mode: Mode) -> list[list[Hit]]:
        """Return the hits of each query. Raises TooBusy."""
        if self._queries_waiting + len(queries) > self._most_waiting:
            raise TooBusy(f"{self._queries_waiting} queries wait already; at most {self._most_waiting} may")
        own = _Waiting(queries, k, mode, asyncio.get_running_loop().create_future())
        self._waiting.append(own)
        self._queries_waiting += len(queries)
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await own.result

    async def close(self) -> None:
        """Wait for the searches that are going on, and end the thread."""
        if self._running is not None:
            await self._running
        self._thread.shutdown()

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._search(self._take())
        finally:
            self._running = None

    def _take(self) -> list[_Waiting]:
        """Remove the oldest waiting requests of one mode; those whose caller has gone are not searched."""
        mode = self._waiting[0].mode
        taken: list[_Waiting] = []
        kept: list[_Waiting] = []
        count = 0
        for one in self._waiting:
            if one.result.done():
                self._queries_waiting -= len(one.queries)
            elif one.mode == mode and (not taken or count + len(one.queries) <= self._most_queries):
                taken.append(one)
                count += len(one.queries)
            else:
                kept.append(one)
        self._waiting = kept
        self._queries_waiting -= count
        return taken

    async def _search(self, taken: Sequence[_Waiting]) -> None:
        if not taken:
            return
        queries = [query for one in taken for query in one.queries]
        most, mode = max(one.k for one in taken), taken[0].mode
        self.calls += 1
        try:
            found = await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: self._index.search(queries, k=most, mode=mode)
            )
        except Exception as error:  # each caller gets the error of its search
            for one in taken:
                if not one.result.done():
                    one.result.set_exception(error)
            return
        begin = 0
        for one in taken:
            end = begin + len(one.queries)
            if not one.result.done():  # its caller may have gone meanwhile
                one.result.set_result([hits[: one.k] for hits in found[begin:end]])
            begin = end
