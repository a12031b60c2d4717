"""Implicit episodes: opened for agents that call the model without opening an episode first.

A call without an episode key belongs to the open implicit episode that its session header names; without
such a header, to the one with the conversation that the call continues, or whose first call it repeats;
otherwise it opens one. An implicit episode is written to the store with its first turn, so a refused call
leaves no episode.

An index of open episodes by the keys that identify them: session names, conversations, turns, tool calls.

Adding a key twice is the same as adding it once. Two episodes may share a key, and forgetting one of them
does not change the keys of the other.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from areal_agents.core.messages import Message, empty_history, extend_digest, history_digests
from areal_agents.core.rollout import Split
from areal_agents.core.trajectory import Turn
from areal_agents.proxy.auth import Caller, key_hash, new_episode_key
from areal_agents.proxy.calls.request import ModelRequest
from areal_agents.proxy.calls.retries import Repeated
from areal_agents.proxy.calls.shared_reply import SharedReply
from areal_agents.proxy.episodes.sessions import Session, Sessions
from areal_agents.proxy.lru import LruCache
from areal_agents.proxy.workers.ownership import Ownership
from areal_agents.store import EpisodeRow, NewEpisode, Store

_HEADERS = ("session-id", "x-claude-code-session-id")
_BY_ROOT = "root"
_MOST_LOOKED_AT = 256  # episodes with the same first messages, among which a retry is looked for
_UNANSWERED_KEPT = 4096  # keys of requests


def session_name(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """The session that a request names by a header or by its `prompt_cache_key`."""
    for header in _HEADERS:
        if headers.get(header):
            return f"{header}:{headers[header]}"
    cache_key = body.get("prompt_cache_key")
    return f"prompt_cache_key:{cache_key}" if isinstance(cache_key, str) and cache_key else None


def implicit_key(caller: Caller, name: str | None) -> str:
    """The key under which the store has the implicit episodes of a caller and a session name."""
    return f"{caller.identity}/{name or _BY_ROOT}"


def is_named(key: str) -> bool:
    """Whether an implicit key has a session name, so that at most one open episode has it."""
    return key.partition("/")[2] != _BY_ROOT


def home_key(key: str, messages: Sequence[Message]) -> bytes:
    """The key that selects the worker of an implicit episode; all calls of a conversation have the same.

    It is made of the session name if there is one, else of the messages before the first reply, which do not
    change while the conversation continues.
    """
    if is_named(key):
        return key.encode()
    identity = key.partition("/")[0]
    roles = [message.role for message in messages]
    leading = messages[: roles.index("assistant")] if "assistant" in roles else messages
    return history_digests(leading, identity)[-1] if leading else empty_history(identity)


def home_key_of(row: EpisodeRow, turns: Sequence[Turn]) -> bytes:
    """`home_key` of an implicit episode in the store."""
    root = next((turn for turn in turns if turn.parent is None), None)
    return home_key(str(row.implicit_key), root.new_messages if root is not None else ())


class ImplicitEpisodes:
    """The open implicit episodes, found by session name or by the conversations that they contain.

    Callers are kept apart: the same session name under another key is another episode.
    """

    def __init__(
        self, store: Store, sessions: Sessions, *, split: Split, ownership: Ownership | None = None
    ) -> None:
        self._store = store
        self._ownership = ownership
        self._sessions = sessions
        self._split = split
        self._index = EpisodeIndex()
        self._unanswered: LruCache[Hashable, int] = LruCache(_UNANSWERED_KEPT)  # attempts without a sample
        self._opening = asyncio.Lock()

    def __contains__(self, episode_id: str) -> bool:
        return episode_id in self._index

    async def restore(self) -> None:
        """Load the implicit episodes that an earlier process left open; a worker loads only its own."""
        for row, turns in await asyncio.to_thread(self._store.open_implicit_episodes):
            key = home_key_of(row, turns)
            if self._ownership is None or await self._ownership.claim_at_home(key, row.id, row.owner):
                self._hold(Session(row, turns))

    async def adopt(self, episode_id: str) -> None:
        """Load an implicit episode that this worker has claimed, unless it is in memory or has ended."""
        async with self._opening:
            if episode_id in self:
                return
            row = await asyncio.to_thread(self._store.episode_row, episode_id)
            if row.status == "open":
                self._hold(Session(row, await asyncio.to_thread(self._store.turns_of, episode_id)))

    def find(self, caller: Caller, name: str | None, turn_id: str | None) -> Session | None:
        """The open session that a call without an episode key names, or whose turn it refers to."""
        found = self._index.latest(("name", implicit_key(caller, name)) if name else ("turn", turn_id))
        session = self._sessions.get(found) if found is not None else None
        return session if session is not None and _identity(session) == caller.identity else None

    async def session(
        self,
        caller: Caller,
        name: str | None,
        request: ModelRequest,
        repeated: Callable[[Session], Repeated | None],
    ) -> Session:
        """The session that a call without an episode key belongs to, opened in memory if there is none.

        The function that calls this one must begin the call without an await in between, and must report its
        end to `call_ended`.

        Args:
            caller: whose key the call has.
            name: the session name of the call, or None.
            request: what the call asks for.
            repeated: returns what the request repeats in a session that began with the same messages.
        """
        async with self._opening:  # wait for `adopt`, whose episode may be the one
            if name:
                found = self._index.latest(("name", implicit_key(caller, name)))
            else:
                found = self._continued(caller, request) or self._repeated(caller, request, repeated)
            session = self._sessions.get(found) if found is not None else None
            return session or self._open(caller, name, request)

    def call_ended(self, session: Session, request: ModelRequest, call: SharedReply) -> None:
        """Drop an episode that is empty after its call, which was refused or whose client disconnected."""
        if not session.is_empty or session.id not in self:
            return
        key = (_identity(session), request.key())
        if call.is_abandoned or session.ledger.was_refused(request):
            self._unanswered.put(key, (self._unanswered.get(key) or 0) + 1)
        self._drop(session)

    def drop_empty(self) -> None:
        """Drop the episodes that have neither a turn nor a running call."""
        for session in [self._sessions.get(episode_id) for episode_id in self._index.episodes()]:
            if session is not None and session.is_empty:
                self._drop(session)

    def forget(self, episode_id: str) -> None:
        """Drop an episode that is sealed."""
        self._index.forget(episode_id)

    def _open(self, caller: Caller, name: str | None, request: ModelRequest) -> Session:
        key = implicit_key(caller, name)
        session = self._sessions.begin(
            NewEpisode(
                id=f"implicit-{secrets.token_hex(8)}",
                key_hash=key_hash(new_episode_key()),
                split=self._split,
                implicit_key=key,
                only_one=self._ownership is not None and is_named(key),
            )
        )
        self._hold(session)
        if name is None:
            self._index.add(session.id, _opening_key(caller.identity, request.messages))
        return session

    def _drop(self, session: Session) -> None:
        self._sessions.forget(session)
        self._index.forget(session.id)

    def _repeated(
        self,
        caller: Caller,
        request: ModelRequest,
        repeated: Callable[[Session], Repeated | None],
    ) -> str | None:
        """The episode without a session name that an earlier attempt at the same first call opened, if any.

        An earlier attempt without a sample has nothing to repeat, even if an equal call of another agent has.
        """
        best: tuple[Repeated, str] | None = None
        opened = self._index.latest_first(_opening_key(caller.identity, request.messages))
        for episode_id in itertools.islice(opened, _MOST_LOOKED_AT):
            session = self._sessions.get(episode_id)
            kind = repeated(session) if session is not None else None
            if kind is not None and (best is None or kind > best[0]):
                best = (kind, episode_id)
        key = (caller.identity, request.key())
        is_by_key = best is not None and best[0] is Repeated.NAMED
        if request.retry.count and not is_by_key and (unanswered := self._unanswered.get(key)):
            self._unanswered.put(key, unanswered - 1)
            return None
        return best[1] if best is not None else None

    def _hold(self, session: Session) -> None:
        """Index a session by the turns that it has and by those that will be recorded in it."""
        self._sessions.add(session)
        self._index.begin(session.id)
        key = str(session.row.implicit_key)
        if is_named(key):
            self._index.add(session.id, ("name", key))
        for turn in session.forest.turns:
            self._recorded(session, turn)
        session.on_recorded = lambda turn: self._recorded(session, turn)

    def _continued(self, caller: Caller, request: ModelRequest) -> str | None:
        """The episode that recorded the latest known reply of a conversation."""
        digests = history_digests(request.messages, caller.identity)
        for message, digest in zip(reversed(request.messages[:-1]), reversed(digests[:-1]), strict=True):
            if message.role == "assistant" and (found := self._index.latest(("reply", digest))) is not None:
                return found
        for message in reversed(request.messages):
            for call in message.tool_calls:  # some clients drop the text, but none the ids
                if (found := self._index.latest(("call", caller.identity, call.id))) is not None:
                    return found
        return None

    def _recorded(self, session: Session, turn: Turn) -> None:
        """Index a turn, so that a conversation that continues it is recognised."""
        if session.id not in self._index:
            return  # it was sealed meanwhile
        identity = _identity(session)
        # Tools are left out: a conversation that changes them is still the same one.
        asked = history_digests(session.forest.history(turn.id), identity)[-1]
        self._index.add(session.id, ("reply", extend_digest(asked, turn.reply)))
        for call in turn.reply.tool_calls:
            self._index.add(session.id, ("call", identity, call.id))
        self._index.add(session.id, ("turn", turn.id))
        if turn.parent is None and not is_named(str(session.row.implicit_key)):
            self._index.add(session.id, _opening_key(identity, turn.new_messages))


def _opening_key(identity: str, messages: Sequence[Message]) -> Hashable:
    """The key of episodes without a session name that began with these messages of this caller."""
    return ("opening", history_digests(messages, identity)[-1])


def _identity(session: Session) -> str:
    """The `Caller.identity` of the caller that opened an implicit episode."""
    return str(session.row.implicit_key).partition("/")[0]


class EpisodeIndex:
    """Maps keys to the episodes that have them. An episode has keys from `begin` until `forget`."""

    def __init__(self) -> None:
        self._episodes: dict[Hashable, dict[str, None]] = {}  # by key, the latest last
        self._keys: dict[str, set[Hashable]] = {}  # by episode

    def __contains__(self, episode_id: str) -> bool:
        return episode_id in self._keys

    def episodes(self) -> list[str]:
        """The ids of all indexed episodes."""
        return list(self._keys)

    def begin(self, episode_id: str) -> None:
        """Index an episode, without keys at first."""
        self._keys.setdefault(episode_id, set())

    def add(self, episode_id: str, key: Hashable) -> None:
        """Add a key to an episode, which becomes the latest with that key. KeyError if it is not indexed."""
        self._keys[episode_id].add(key)
        holders = self._episodes.setdefault(key, {})
        holders.pop(episode_id, None)
        holders[episode_id] = None

    def latest(self, key: Hashable) -> str | None:
        """The episode to which a key was added last; None if no episode has it."""
        return next(self.latest_first(key), None)

    def latest_first(self, key: Hashable) -> Iterator[str]:
        """The episodes that have a key, the one to which it was added last first."""
        return reversed(self._episodes.get(key, {}))

    def forget(self, episode_id: str) -> None:
        """Remove an episode and its keys. Does nothing if it is not indexed."""
        for key in self._keys.pop(episode_id, ()):
            holders = self._episodes[key]
            del holders[episode_id]
            if not holders:
                del self._episodes[key]
