"""Finds or opens implicit episodes, for calls of agents that do not open episodes themselves.

A call without an episode key belongs to the open implicit episode that its session header names. Without such
a header it belongs to the episode whose conversation it continues, or whose first call it repeats. If there
is no such episode, the call opens one. An implicit episode is written to the store with its first turn, so a
refused call leaves no episode.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from areal_agents.core.messages import Message, empty_history, extend_digest, history_digests
from areal_agents.core.rollout import Split, Task
from areal_agents.core.trajectory import Turn
from areal_agents.lru import LruCache
from areal_agents.proxy.auth import Caller, key_hash, new_episode_key
from areal_agents.proxy.calls.labels import USER
from areal_agents.proxy.calls.request import ModelRequest
from areal_agents.proxy.calls.retries import Repeated
from areal_agents.proxy.calls.shared_reply import SharedReply
from areal_agents.proxy.episodes.sessions import Session, Sessions
from areal_agents.proxy.workers.ownership import Ownership
from areal_agents.store import EpisodeRow, NewEpisode, Store

_HEADERS = ("session-id", "x-claude-code-session-id")
_BY_ROOT = "root"
_MOST_COMPARED = 256  # episodes with the same first messages that a retry is compared with
_UNANSWERED_KEPT = 4096  # requests whose unanswered attempts are counted


def session_name(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """Return the session that a request names with a header or with `prompt_cache_key`, or None."""
    for header in _HEADERS:
        if headers.get(header):
            return f"{header}:{headers[header]}"
    cache_key = body.get("prompt_cache_key")
    return f"prompt_cache_key:{cache_key}" if isinstance(cache_key, str) and cache_key else None


def implicit_key(caller: Caller, name: str | None) -> str:
    """Return the `implicit_key` in the store of the implicit episodes of a caller and a session name."""
    return f"{caller.identity}/{name or _BY_ROOT}"


def is_named(key: str) -> bool:
    """Whether an implicit key has a session name, so that at most one open episode has it."""
    return key.partition("/")[2] != _BY_ROOT


def home_key(key: str, messages: Sequence[Message]) -> bytes:
    """Return the key that selects the worker of an implicit episode; it is the same for a whole conversation.

    It is derived from the session name if there is one, else from the messages before the first reply, which
    do not change while the conversation continues.
    """
    if is_named(key):
        return key.encode()
    identity = key.partition("/")[0]
    roles = [message.role for message in messages]
    leading = messages[: roles.index("assistant")] if "assistant" in roles else messages
    return history_digests(leading, identity)[-1] if leading else empty_history(identity)


def home_key_of(row: EpisodeRow, turns: Sequence[Turn]) -> bytes:
    """Return the `home_key` of an implicit episode in the store."""
    root = next((turn for turn in turns if turn.parent is None), None)
    return home_key(str(row.implicit_key), root.new_messages if root is not None else ())


class ImplicitEpisodes:
    """The open implicit episodes, found by session name or by conversation.

    Each caller has its own episodes: the same session name with another API key is another episode. With
    `in_groups` each is a group of one, with its own id.
    """

    def __init__(
        self,
        store: Store,
        sessions: Sessions,
        *,
        split: Split,
        in_groups: bool = False,
        ownership: Ownership | None = None,
    ) -> None:
        self._store = store
        self._ownership = ownership
        self._sessions = sessions
        self._split = split
        self._in_groups = in_groups
        self._index = EpisodeIndex()
        self._unanswered: LruCache[Hashable, int] = LruCache(
            _UNANSWERED_KEPT
        )  # number of attempts without a sample
        self._opening = asyncio.Lock()

    def __contains__(self, episode_id: str) -> bool:
        return episode_id in self._index

    async def restore(self) -> None:
        """Load the open implicit episodes of earlier processes; a worker loads only its own."""
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
        """Return the open session that a call names or whose turn it refers to, None if none is known."""
        found = self._index.latest(("name", implicit_key(caller, name)) if name else ("turn", turn_id))
        session = self._sessions.get(found) if found is not None else None
        return session if session is not None and _identity(session) == caller.identity else None

    async def session(
        self,
        caller: Caller,
        name: str | None,
        request: ModelRequest,
        repeated: Callable[[Session], Repeated | None],
        task: Task | None = None,
        user: str = "",
    ) -> Session:
        """Return the session that a call without an episode key belongs to; open one in memory if needed.

        The caller of this method must start the model call without an await in between, and must report its
        end to `call_ended`.

        Args:
            caller: the sender of the call.
            name: the session name of the call, or None.
            request: the canonical request.
            repeated: returns what the request repeats in a session that began with the same messages.
            task: the task of the episode if one is opened.
            user: the name of the user whose episode it is, if one is opened; "" if it is not known. Without
                a session name, conversations of different users are never the same one.
        """
        async with self._opening:  # wait for `adopt`, which may load this call's episode
            if name:
                found = self._index.latest(("name", implicit_key(caller, name)))
            else:
                found = self._continued(caller, request) or self._repeated(caller, request, repeated)
            session = self._sessions.get(found) if found is not None else None
            if session is not None and not name and user not in ("", session.row.metadata.get(USER, "")):
                session = None
            return session or self._open(caller, name, request, task, user)

    def call_ended(self, session: Session, request: ModelRequest, call: SharedReply) -> None:
        """Drop an episode that is empty after a call that was refused or whose client disconnected."""
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
        """Remove a sealed episode from the index."""
        self._index.forget(episode_id)

    def _open(
        self, caller: Caller, name: str | None, request: ModelRequest, task: Task | None, user: str
    ) -> Session:
        key = implicit_key(caller, name)
        episode_id = f"implicit-{secrets.token_hex(8)}"
        session = self._sessions.begin(
            NewEpisode(
                id=episode_id,
                group_id=episode_id if self._in_groups else None,
                group_size=1 if self._in_groups else None,
                key_hash=key_hash(new_episode_key()),
                task=task,
                split=self._split,
                metadata={USER: user} if user else {},
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
        """Return the episode without a session name that an earlier attempt at the same first call opened.

        None if there is none, or if the earlier attempt has no sample, even if an equal call of another agent
        has one.
        """
        best: tuple[Repeated, str] | None = None
        opened = self._index.latest_first(_opening_key(caller.identity, request.messages))
        for episode_id in itertools.islice(opened, _MOST_COMPARED):
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
        """Add a session, and index it by its turns and by those that will be recorded in it."""
        self._sessions.add(session)
        self._index.begin(session.id)
        key = str(session.row.implicit_key)
        if is_named(key):
            self._index.add(session.id, ("name", key))
        for turn in session.forest.turns:
            self._recorded(session, turn)
        session.on_recorded = lambda turn: self._recorded(session, turn)
        session.when_lost(lambda: self._index.forget(session.id))

    def _continued(self, caller: Caller, request: ModelRequest) -> str | None:
        """Return the episode that recorded the latest known reply of a conversation, or None."""
        digests = history_digests(request.messages, caller.identity)
        for message, digest in zip(reversed(request.messages[:-1]), reversed(digests[:-1]), strict=True):
            if message.role == "assistant" and (found := self._index.latest(("reply", digest))) is not None:
                return found
        for message in reversed(request.messages):
            for call in message.tool_calls:  # some clients drop the text, but all keep the ids
                if (found := self._index.latest(("call", caller.identity, call.id))) is not None:
                    return found
        return None

    def _recorded(self, session: Session, turn: Turn) -> None:
        """Index a turn, so that a conversation that continues it is recognised."""
        if session.id not in self._index:
            return  # the episode was sealed in the meantime
        identity = _identity(session)
        # Tools are left out: a conversation that changes them is still the same one.
        history = history_digests(session.forest.history(turn.id), identity)[-1]
        self._index.add(session.id, ("reply", extend_digest(history, turn.reply)))
        for call in turn.reply.tool_calls:
            self._index.add(session.id, ("call", identity, call.id))
        self._index.add(session.id, ("turn", turn.id))
        if turn.parent is None and not is_named(str(session.row.implicit_key)):
            self._index.add(session.id, _opening_key(identity, turn.new_messages))


def _opening_key(identity: str, messages: Sequence[Message]) -> Hashable:
    """Return the index key of a caller's episodes without a session name that began with `messages`."""
    return ("opening", history_digests(messages, identity)[-1])


def _identity(session: Session) -> str:
    """Return the `Caller.identity` of the caller that opened an implicit episode."""
    return str(session.row.implicit_key).partition("/")[0]


class EpisodeIndex:
    """An index of open episodes by session names, conversations, turns and tool calls.

    An episode is in the index from `begin` to `forget`. Several episodes may have the same key; forgetting
    one does not change the keys of the others. Adding a key again makes its episode the latest one.
    """

    def __init__(self) -> None:
        self._episodes: dict[Hashable, dict[str, None]] = {}  # by key, the latest last
        self._keys: dict[str, set[Hashable]] = {}  # by episode

    def __contains__(self, episode_id: str) -> bool:
        return episode_id in self._keys

    def episodes(self) -> list[str]:
        """Return the ids of all indexed episodes."""
        return list(self._keys)

    def begin(self, episode_id: str) -> None:
        """Add an episode without keys."""
        self._keys.setdefault(episode_id, set())

    def add(self, episode_id: str, key: Hashable) -> None:
        """Add a key to an episode, which becomes the latest with that key.

        Raise KeyError if the episode is not in the index.
        """
        self._keys[episode_id].add(key)
        holders = self._episodes.setdefault(key, {})
        holders.pop(episode_id, None)
        holders[episode_id] = None

    def latest(self, key: Hashable) -> str | None:
        """Return the episode that a key was added to last, None if no episode has the key."""
        return next(self.latest_first(key), None)

    def latest_first(self, key: Hashable) -> Iterator[str]:
        """Iterate over the episodes with a key, beginning with the one that it was added to last."""
        return reversed(self._episodes.get(key, {}))

    def forget(self, episode_id: str) -> None:
        """Remove an episode and its keys, if it is in the index."""
        for key in self._keys.pop(episode_id, ()):
            holders = self._episodes[key]
            del holders[episode_id]
            if not holders:
                del self._episodes[key]
