"""The replies to one request while they are sampled, and the clients that wait for them.

Several clients may share a reply: a retry joins a request that is still running, and gets the same sample
from its first piece. The generation is aborted as soon as the last client has disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from areal_agents.core.messages import Message
from areal_agents.errors import EngineUnavailable
from areal_agents.proxy.calls.request import CompletedTurn
from areal_agents.rendering import Delta


class SharedReply:
    """One or several replies to one request, which may still be running.

    Attributes:
        turn_ids: the ids of the turns that will be recorded, one per choice.
        created_at: seconds since the epoch.
        deltas: the (choice, piece) pairs of a streamed call, in the order of arrival.
        task: the task that returns the recorded turns or raises the error of the call.
        is_repeated: whether the request is answered with turns that were recorded earlier.
        is_abandoned: whether the call was cancelled because its last client disconnected.
    """

    def __init__(
        self,
        turn_ids: Sequence[str],
        created_at: float,
        run: Callable[[], Awaitable[tuple[CompletedTurn, ...]]],
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
        self.task: asyncio.Task[tuple[CompletedTurn, ...]] = asyncio.ensure_future(run())
        self.task.add_done_callback(lambda _: self._wake())

    def put(self, choice: int, deltas: Iterable[Delta]) -> None:
        """Add pieces, and wake the clients."""
        before = len(self.deltas)
        self.deltas.extend((choice, delta) for delta in deltas)
        if len(self.deltas) > before:
            self._wake()

    def join(self) -> None:
        """Add a waiting client."""
        self._clients += 1

    def leave(self, *, served: bool) -> bool:
        """Remove a client that was served or has disconnected; without clients, a running call is aborted.

        Returns:
            True if the reply was sampled and no client received it.
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
        """Whether a client is waiting."""
        return self._clients > 0

    @property
    def has_failed(self) -> bool:
        """Whether the call ended without a reply."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def failure(self) -> Exception | None:
        """The error that ended the call, or None."""
        if not self.task.done():
            return None
        if self.task.cancelled():
            return EngineUnavailable("the call was cancelled")
        error = self.task.exception()
        return error if isinstance(error, Exception) else None

    async def wait_for_progress(self, seen: int, gone: asyncio.Future[None], timeout_s: float) -> bool:
        """Wait until there are more than `seen` pieces, the call has ended, or `gone` is done.

        Returns:
            False if `timeout_s` passed first.
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

    async def wait_until_ended(self, gone: asyncio.Future[None]) -> None:
        """Wait until the call has ended, or `gone` is done."""
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


class RecordedReply(SharedReply):
    """A reply that was recorded earlier, with its pieces for a client that streams."""

    def __init__(self, done: Sequence[CompletedTurn]) -> None:
        async def recorded() -> tuple[CompletedTurn, ...]:
            for choice, item in enumerate(done):
                self.put(choice, pieces_of(item.turn.reply))
            return tuple(done)

        super().__init__([item.turn.id for item in done], done[0].created_at, recorded, is_repeated=True)


def pieces_of(reply: Message) -> list[Delta]:
    """Split a whole reply into pieces, for a client that streams a reply that was not sampled as a stream."""
    texts = [Delta("reasoning", reply.reasoning), Delta("content", reply.content)]
    return [*(piece for piece in texts if piece.text), *(Delta("call", call=c) for c in reply.tool_calls)]
