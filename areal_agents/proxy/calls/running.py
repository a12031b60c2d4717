"""A model call while it runs, and the clients that wait for it.

One call may have several clients: a retry of a request that is still under way joins it, and gets the same
sample from its first piece on. When the last client has hung up, the generation is aborted at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from areal_agents.core.messages import Message
from areal_agents.errors import EngineUnavailable
from areal_agents.proxy.calls.request import CompletedTurn
from areal_agents.rendering import Delta


@dataclass(frozen=True, slots=True)
class Retry:
    """What a client says about sending a request again.

    Attributes:
        count: of earlier attempts, as the Stainless SDKs count them.
        idempotency_key: names the request; "" if the client gives none.
    """

    count: int = 0
    idempotency_key: str = ""


class Call:
    """One or several replies to one request, as they are sampled.

    Attributes:
        turn_ids: of the turns that will be recorded, one per choice.
        created_at: seconds since the epoch.
        deltas: (choice, piece) of a streamed call, in the order of arrival.
        task: ends with the recorded turns, or with the error of the call.
        is_repeated: whether it is answered with turns that were recorded before.
        is_abandoned: whether its last client has gone, so that it ends without a reply.
    """

    def __init__(
        self,
        turn_ids: Sequence[str],
        created_at: float,
        run: Callable[[Call], Awaitable[tuple[CompletedTurn, ...]]],
        *,
        is_repeated: bool = False,
    ) -> None:
        self.turn_ids = tuple(turn_ids)
        self.created_at = created_at
        self.deltas: list[tuple[int, Delta]] = []
        self.is_repeated = is_repeated
        self.is_abandoned = False
        self._clients = 0
        self._served = False
        self._waiting: set[asyncio.Future[None]] = set()
        self.task: asyncio.Task[tuple[CompletedTurn, ...]] = asyncio.ensure_future(run(self))
        self.task.add_done_callback(lambda _: self._wake())

    def put(self, choice: int, deltas: Iterable[Delta]) -> None:
        """Add pieces for every client."""
        before = len(self.deltas)
        self.deltas.extend((choice, delta) for delta in deltas)
        if len(self.deltas) > before:
            self._wake()

    def join(self) -> None:
        """One more client waits."""
        self._clients += 1

    def leave(self, *, served: bool) -> bool:
        """A client was served, or has gone. Without any left, what still runs is aborted.

        True if the reply was sampled and no client got it.
        """
        self._clients -= 1
        self._served = self._served or served
        if self._clients:
            return False
        if not self.task.done():
            self.is_abandoned = True
            self.task.cancel()
            return False
        return not self._served and not self.has_failed

    @property
    def has_client(self) -> bool:
        """Whether anybody waits for the call."""
        return self._clients > 0

    @property
    def has_failed(self) -> bool:
        """Whether the call ended without a reply."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def failure(self) -> Exception | None:
        """The error that ended the call."""
        if not self.task.done():
            return None
        if self.task.cancelled():
            return EngineUnavailable("the call was ended")
        error = self.task.exception()
        return error if isinstance(error, Exception) else None

    async def news(self, seen: int, gone: asyncio.Future[None], timeout_s: float) -> bool:
        """Wait until there are more than `seen` pieces, the call has ended or the client has `gone`.

        False if none of it happened in time.
        """
        if len(self.deltas) > seen or self.task.done() or gone.done():
            return True
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await asyncio.wait((waiting, gone), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return waiting.done() or gone.done()
        finally:
            self._waiting.discard(waiting)

    async def end(self, gone: asyncio.Future[None]) -> None:
        """Wait until the call has ended, or the client has `gone`."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake(_: asyncio.Future[Any]) -> None:
            if not ended.done():
                ended.set_result(None)

        self.task.add_done_callback(wake)
        gone.add_done_callback(wake)
        try:
            await ended
        finally:
            self.task.remove_done_callback(wake)
            gone.remove_done_callback(wake)

    def _wake(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)


def answered_call(done: Sequence[CompletedTurn]) -> Call:
    """A call that was answered before: its recorded turns, and their pieces for a client that streams."""

    async def recorded(call: Call) -> tuple[CompletedTurn, ...]:
        for choice, item in enumerate(done):
            call.put(choice, pieces_of(item.turn.reply))
        return tuple(done)

    return Call([item.turn.id for item in done], done[0].created_at, recorded, is_repeated=True)


def pieces_of(reply: Message) -> list[Delta]:
    """A whole reply as pieces, for a client that streams what was not sampled as a stream."""
    texts = [Delta("reasoning", reply.reasoning), Delta("content", reply.content)]
    return [*(piece for piece in texts if piece.text), *(Delta("call", call=c) for c in reply.tool_calls)]
