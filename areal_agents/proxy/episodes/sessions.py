"""Keeps the open episodes in memory, and loads them from the store when needed.

The store is authoritative. A session caches the forest of one episode, and has state that lasts only as long
as the process (running calls, time of the last use). Nothing that was acknowledged is lost with a session,
even by kill -9.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from areal_agents.core.forest import Forest
from areal_agents.core.rollout import EpisodeStatus
from areal_agents.core.trajectory import Turn
from areal_agents.errors import RequestError
from areal_agents.proxy.auth import key_hash
from areal_agents.proxy.calls.ledger import CallLedger
from areal_agents.proxy.calls.recorded_start import RecordedStart
from areal_agents.proxy.calls.sampling import SampleSeeds
from areal_agents.proxy.dialects.replayed import MessageMemo
from areal_agents.store import (
    EpisodeRow,
    EpisodeState,
    NewEpisode,
    NotFound,
    NoTurn,
    OwnedElsewhere,
    SealedStatus,
    Store,
    opened_row,
)

EpisodeEnded = Callable[[EpisodeRow, EpisodeStatus, str | None], None]

NO_MODEL_CALL = "the model was never called; does the agent's client use the episode's base_url and key?"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """The limits of an episode; None means no limit.

    Attributes:
        max_turns: number of model calls.
        max_tokens: sampled tokens of all calls together; concurrent calls may exceed it.
        max_completion_tokens: sampled tokens of one call.
        context_tokens: tokens of a prompt with its completion.
        time_s: seconds from the opening of the episode to the start of a call. For an episode that was opened
            before this process started, they count from when it was loaded.
    """

    max_turns: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    context_tokens: int | None = None
    time_s: float | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EpisodeLimits:
        """Return the limits in `data`. Raise ValueError for an unknown limit or an invalid value."""
        unknown = sorted(set(data) - set(cls.__slots__))
        if unknown:
            raise ValueError(f"unknown limit {unknown[0]!r}; the limits are {', '.join(cls.__slots__)}")
        for name, value in data.items():
            number = (int, float) if name == "time_s" else int
            if value is not None and (isinstance(value, bool) or not isinstance(value, number) or value <= 0):
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        return cls(**data)


class Session:
    """One open episode. It is used on the event loop only.

    Until its first turn is written, an implicit episode is not in the store, and `opening` has what will be
    written. An episode whose calls are all refused is thus never written.

    Attributes:
        forest: the recorded turns.
        ledger: the calls that retries and the outcome of the episode depend on.
        seeds: computes the seeds of the samples, if the episode has a base seed.
        limit_reached: the first limit that the episode reached, or None.
        pending_calls: number of replies that were admitted and are not recorded yet.
        pending_writes: number of writes of turns that are not in the forest yet.
        main_session: the session header of the main agent; other session headers are those of sub-agents.
        start: the turns of another episode that a forked one repeats; None for all other episodes.
    """

    def __init__(self, row: EpisodeRow, turns: list[Turn], *, opening: NewEpisode | None = None) -> None:
        self.row = row
        self.opening = opening
        self.forest = Forest(turns)
        self.start: RecordedStart | None = None
        self.ledger = CallLedger(turn.id for turn in turns if turn.discarded)
        self.limits = EpisodeLimits.from_dict(row.limits)
        self.limit_reached = row.limit_reached
        self.sampled_tokens = sum(len(turn.completion) for turn in turns)
        self.status: EpisodeStatus = row.status
        self.pending_calls = 0
        self.pending_writes = 0
        self.memo = MessageMemo()
        self.seeds = SampleSeeds(turns)
        self.main_session = next((turn.session for turn in turns if turn.session and not turn.label), "")
        self.opened_at = self.last_used = time.monotonic()  # changes of the system clock end no episode
        self.on_recorded: Callable[[Turn], None] = lambda turn: None  # called with every recorded turn
        self.owner: str | None = None  # the process that must own the episode when it writes; None: any
        self._generations: set[asyncio.Task[Any]] = set()
        self._when_lost: list[Callable[[], None]] = []

    @property
    def id(self) -> str:
        """The episode's id."""
        return self.row.id

    @property
    def is_empty(self) -> bool:
        """Whether the episode has no turn, no row in the store, no running call and no pending write."""
        return (
            self.opening is not None
            and not len(self.forest)
            and not self.ledger.running_calls
            and not self.pending_writes
        )

    def refuse_if_sealed(self) -> None:
        """Raise RequestError 409 unless the episode is open."""
        if self.status != "open":
            raise sealed(self.id, self.status)

    def touch(self) -> None:
        """Set the time of the last use to now."""
        self.last_used = time.monotonic()

    def name_main_session(self, name: str) -> None:
        """Set the session header of the main agent, unless an earlier call has set it."""
        self.main_session = self.main_session or name

    @contextmanager
    def admitted(self, replies: int) -> Iterator[None]:
        """Count `replies` as pending within the with-block."""
        self.pending_calls += replies
        try:
            yield
        finally:
            self.pending_calls -= replies
            self.touch()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Within the with-block, let the end of the episode cancel the current task."""
        task = asyncio.current_task()
        assert task is not None
        self._generations.add(task)
        try:
            yield
        finally:
            self._generations.discard(task)

    def reach_limit(self, limit: str) -> bool:
        """Record that the episode reached a limit; False if it had reached one earlier."""
        if self.limit_reached is not None:
            return False
        self.limit_reached = limit
        return True

    def record(self, turns: Iterable[Turn]) -> None:
        """Add turns that are in the store, in the order of their rows."""
        for turn in turns:
            if turn.completion.routed_experts is not None:  # large, and used only by the trainer
                turn = replace(turn, completion=replace(turn.completion, routed_experts=None))
            self.forest.record(turn)
            self.sampled_tokens += len(turn.completion)
            self.on_recorded(turn)

    def write_begins(self) -> None:
        """Count a write of turns that will be recorded once the store has them."""
        self.pending_writes += 1

    def write_ends(self, turns: Iterable[Turn], *, failed: bool) -> None:
        """Remove a write that has ended from the count, and record its turns unless it failed."""
        self.pending_writes -= 1
        if not failed:
            self.opening = None
            self.record(turns)

    def watch_write(self, write: Future[None], turn_ids: Sequence[str]) -> None:
        """Fail the episode if a write of turns fails after their reply was sent (`durability: batched`)."""
        loop = asyncio.get_running_loop()

        def check(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                turns = ", ".join(turn_ids)
                _logger.error("episode %s fails: turns %s were not recorded: %s", self.id, turns, error)
                if isinstance(error, OwnedElsewhere):
                    loop.call_soon_threadsafe(self.lose)
                else:
                    loop.call_soon_threadsafe(self._lose_turns, tuple(turn_ids))

        write.add_done_callback(check)

    def _lose_turns(self, turn_ids: tuple[str, ...]) -> None:
        """Refuse further calls: the store lacks turns that the agent has, or has ended the episode."""
        self.ledger.lose(turn_ids)
        if self.status == "open":
            self.end("failed")

    def when_lost(self, act: Callable[[], None]) -> None:
        """Call `act` when the session is lost."""
        self._when_lost.append(act)

    def lose(self) -> None:
        """Drop the session, because another process has the episode or had it meanwhile."""
        for act in self._when_lost:
            act()

    def end(self, status: EpisodeStatus) -> None:
        """Set the final status of a sealed episode, and cancel its running generations."""
        self.status = status
        for generation in self._generations:
            generation.cancel()


class Sessions:
    """The sessions of this process, by episode and by key.

    With several workers, `owner` is the name with which this worker opens episodes. `starts` has what forked
    episodes repeat, by the id of the episode. `ended` is called with each episode that ends here, its status,
    and the error that ended it.
    """

    def __init__(
        self,
        store: Store,
        owner: str | None = None,
        starts: Mapping[str, RecordedStart] | None = None,
        *,
        ended: EpisodeEnded | None = None,
    ) -> None:
        self._store = store
        self._starts = starts or {}
        self._owner = owner
        self._ended = ended
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._loading: dict[str, asyncio.Task[Session]] = {}
        self._sealed_meanwhile: dict[str, EpisodeStatus] = {}  # episodes sealed while a session is loaded
        self._over_sampled: set[str] = set()  # groups whose surplus episodes the store aborts

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def owner(self) -> str | None:
        """The name with which this process owns episodes; None if it is the only one."""
        return self._owner

    async def open(self, new: NewEpisode) -> Session:
        """Open an episode in the store and in memory. Raise Conflict if its group is full."""
        row = await asyncio.wrap_future(self._store.open_episode(replace(new, owner=self._owner)))
        if new.surplus and row.group_id is not None:
            self._over_sampled.add(row.group_id)
        return self.add(Session(row, []))

    def begin(self, new: NewEpisode) -> Session:
        """Open an implicit episode in memory only; it is written to the store with its first turn."""
        new = replace(new, owner=self._owner)
        task_id = new.task.id if new.task is not None else new.id
        row = opened_row(new, index=0, task_id=task_id, created_at=time.time())
        return self.add(Session(row, [], opening=new))

    async def by_key(self, key: str) -> Session:
        """Return the open session of a key.

        Raise RequestError 401 if no episode has the key, 409 if the episode is sealed.
        """
        digest = key_hash(key)
        session = self._by_key.get(digest)
        if session is None:
            loading = self._loading.get(digest)
            if loading is None:  # concurrent calls share one load
                loading = asyncio.create_task(self._load(digest))
                self._loading[digest] = loading
                loading.add_done_callback(lambda _: self._loaded(digest))
            session = await asyncio.shield(loading)
        session.touch()
        session.refuse_if_sealed()
        return session

    def holds(self, key: str) -> bool:
        """Whether the session of a key is in memory."""
        return key_hash(key) in self._by_key

    def memo_of(self, key: str) -> MessageMemo | None:
        """Return the conversations of a key's session if it is in memory, else None."""
        session = self._by_key.get(key_hash(key))
        return None if session is None else session.memo

    def get(self, episode_id: str) -> Session | None:
        """Return the session of an episode if it is in memory, else None."""
        return self._by_id.get(episode_id)

    def add(self, session: Session) -> Session:
        """Add a session, and return it."""
        session.owner = self._owner
        session.when_lost(lambda: self.forget(session))
        self._by_id[session.id] = session
        self._by_key[session.row.key_hash] = session
        return session

    async def _was_called(self, episode_id: str) -> bool:
        """Whether the model was called in an episode without turns: a call is running, or met a limit."""
        session = self._by_id.get(episode_id)
        if session is not None:
            return session.limit_reached is not None or session.ledger.running_calls > 0
        row = await asyncio.to_thread(self._store.episode_row, episode_id)
        return row.limit_reached is not None

    async def seal(self, episode_id: str, status: SealedStatus, **how: Any) -> EpisodeState:
        """End an episode, first in the store with the arguments of `Store.seal`, and return its state.

        An episode that would be finished or truncated is failed instead, without the rewards in `how`, if the
        model was never called, or if a call was lost and its retry was never answered, even if the agent
        handled the error. With `require_turn`, NoTurn is raised if no call was recorded, also if one was
        refused because of a limit or is running.
        """
        session = self._by_id.get(episode_id)
        ending = await self._row_to_end(episode_id) if self._ended is not None else None
        is_success = status in ("finished", "truncated")
        if session is not None and session.ledger.has_lost and is_success:
            status, how = "failed", {"error": "the engine failed on a model call that was never answered"}
            is_success = False
        how = {**how, "owner": self._owner}
        try:
            sealing = self._store.seal(episode_id, status, **{**how, "require_turn": is_success})
            state = await asyncio.wrap_future(sealing)
        except OwnedElsewhere:
            self.lose(episode_id)
            raise
        except NoTurn:
            if how.get("require_turn"):
                raise
            if not await self._was_called(episode_id):
                status, how = "failed", {"error": NO_MODEL_CALL, "owner": self._owner}
            state = await asyncio.wrap_future(self._store.seal(episode_id, status, **how))
        if self._loading:
            self._sealed_meanwhile[episode_id] = state.status  # a load may have read the earlier status
        session = self._by_id.get(episode_id)
        if session is not None:
            session.end(state.status)
            self.forget(session)
            if session.row.group_id in self._over_sampled:
                await self.end_aborted(session.row.group_id)
        if self._ended is not None and ending is not None:
            self._ended(ending, state.status, how.get("error"))
        return state

    async def _row_to_end(self, episode_id: str) -> EpisodeRow | None:
        """Return the row of an episode that is open; None if it has ended already, or does not exist."""
        if (session := self._by_id.get(episode_id)) is not None:
            return session.row if session.status == "open" else None
        try:
            row = await asyncio.to_thread(self._store.episode_row, episode_id)
        except NotFound:  # `seal` raises it
            return None
        return row if row.status == "open" else None

    @property
    def has_over_sampled(self) -> bool:
        """Whether a group with surplus episodes may have open ones."""
        return bool(self._over_sampled)

    async def end_aborted(self, group_id: str) -> None:
        """End the sessions of the surplus episodes that the store has aborted with their group."""
        members = [session for session in self._by_id.values() if session.row.group_id == group_id]
        for session in members:
            row = await asyncio.to_thread(self._store.episode_row, session.id)
            if row.status != "open" and session.status == "open":
                session.end(row.status)
                self.forget(session)
                if self._ended is not None:
                    self._ended(session.row, row.status, row.error)
        if not any(session.status == "open" for session in members):
            self._over_sampled.discard(group_id)

    def forget_idle(self, idle_s: float) -> None:
        """Drop from memory the episodes with a key that were idle for `idle_s`; a call loads them again."""
        limit = time.monotonic() - idle_s
        for session in list(self._by_id.values()):
            is_idle = session.last_used < limit and not session.pending_calls and not session.pending_writes
            if is_idle and session.row.implicit_key is None:
                self.forget(session)

    def used_since(self, episode_id: str, since: float) -> bool:
        """Whether an episode is in memory, and has a running call or had one after a monotonic time."""
        session = self._by_id.get(episode_id)
        return session is not None and (session.pending_calls > 0 or session.last_used > since)

    def last_used(self) -> dict[str, float]:
        """Return the monotonic time of the last call of each episode in memory; now if a call is running."""
        now = time.monotonic()
        return {id: now if s.pending_calls else s.last_used for id, s in self._by_id.items()}

    async def _load(self, digest: str) -> Session:
        try:
            row, turns = await asyncio.to_thread(self._store.episode_by_key, digest)
        except NotFound:
            raise RequestError(
                "no episode has this API key; use the key that POST /episodes returned",
                status=401,
                code="invalid_api_key",
            ) from None
        session = Session(row, turns)
        session.start = self._starts.get(row.id)
        status = self._sealed_meanwhile.get(row.id, row.status)
        if status != "open":
            raise sealed(row.id, status)
        return self.add(session)

    def _loaded(self, digest: str) -> None:
        del self._loading[digest]
        if not self._loading:
            self._sealed_meanwhile.clear()

    def lose(self, episode_id: str) -> None:
        """Drop what is in memory of an episode that another process has or had meanwhile: it is outdated."""
        if (session := self._by_id.get(episode_id)) is not None:
            session.lose()

    def forget(self, session: Session) -> None:
        """Drop a session from memory."""
        if self._by_id.get(session.id) is session:
            del self._by_id[session.id]
            self._by_key.pop(session.row.key_hash, None)


def sealed(episode_id: str, status: str) -> RequestError:
    """Return the error for a model call of an episode that has ended."""
    return RequestError(
        f"episode {episode_id} is {status}: it takes no more model calls; open a new episode",
        status=409,
        code="episode_sealed",
    )
