"""Implicit episodes: what an agent does that only changed its base_url.

A call without an episode belongs to the open implicit episode that its session header names; without
such a header, to the one that holds the conversation which it goes on from; otherwise it opens one.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from areal_agents.core.messages import Message, extend_digest, history_digests
from areal_agents.core.rollout import Split
from areal_agents.core.trajectory import Turn
from areal_agents.proxy.auth import Caller, key_hash, new_episode_key
from areal_agents.proxy.request import ModelRequest
from areal_agents.proxy.sessions import Session, Sessions
from areal_agents.store import NewEpisode, Store

_HEADERS = ("session-id", "x-claude-code-session-id")
_BY_ROOT = "root"


def session_name(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """The session that a request names by a header or by its `prompt_cache_key`."""
    for header in _HEADERS:
        if headers.get(header):
            return f"{header}:{headers[header]}"
    cache_key = body.get("prompt_cache_key")
    return f"prompt_cache_key:{cache_key}" if isinstance(cache_key, str) and cache_key else None


class ImplicitEpisodes:
    """The open implicit episodes: by session name, and by each conversation that they hold.

    Callers are told apart: the same session name under another key is another episode.
    """

    def __init__(self, store: Store, sessions: Sessions, *, split: Split) -> None:
        self._store = store
        self._sessions = sessions
        self._split = split
        self._by_name: dict[str, str] = {}  # implicit key → episode id
        self._by_conversation: dict[bytes, str] = {}  # digest of history and reply → episode id
        self._digests: dict[str, list[bytes]] = {}  # episode id → its entries in the above
        self._opening = asyncio.Lock()

    def __contains__(self, episode_id: str) -> bool:
        return episode_id in self._digests

    async def restore(self) -> None:
        """Load the implicit episodes that an earlier process left open."""
        for row, turns in await asyncio.to_thread(self._store.open_implicit_episodes):
            session = self._sessions.add(Session(row, turns))
            self._remember(session)
            caller = str(row.implicit_key).partition("/")[0]
            for turn in turns:
                self._index(session.id, caller, session.forest.history(turn.id), turn)

    async def session(self, caller: Caller, name: str | None, request: ModelRequest) -> Session:
        """The session that a bare call belongs to, opened if there is none."""
        key = f"{caller.identity}/{name or _BY_ROOT}"
        async with self._opening:  # two first calls of one session must not open it twice
            found = self._by_name.get(key) if name else self._continued(caller, request)
            session = self._sessions.get(found) if found is not None else None
            if session is None:
                secret = new_episode_key()
                session = await self._sessions.open(
                    NewEpisode(
                        id=f"implicit-{secrets.token_hex(8)}",
                        key_hash=key_hash(secret),
                        split=self._split,
                        implicit_key=key,
                    )
                )
                self._remember(session)
        return session

    def record(self, session: Session, caller: Caller, request: ModelRequest, turn: Turn) -> None:
        """Note a turn, so that the conversation which goes on from it is recognised."""
        self._index(session.id, caller.identity, request.messages, turn)

    def forget(self, episode_id: str) -> None:
        """Let go of an episode that is sealed."""
        for digest in self._digests.pop(episode_id, ()):
            if self._by_conversation.get(digest) == episode_id:
                del self._by_conversation[digest]
        for key in [key for key, held in self._by_name.items() if held == episode_id]:
            del self._by_name[key]

    def _continued(self, caller: Caller, request: ModelRequest) -> str | None:
        digests = history_digests(request.messages, caller.identity)
        for message, digest in zip(reversed(request.messages[:-1]), reversed(digests[:-1]), strict=True):
            if message.role == "assistant" and digest in self._by_conversation:
                return self._by_conversation[digest]
        return None

    def _remember(self, session: Session) -> None:
        self._digests.setdefault(session.id, [])
        key = str(session.row.implicit_key)
        if key.partition("/")[2] != _BY_ROOT:
            self._by_name[key] = session.id

    def _index(self, episode_id: str, identity: str, history: Sequence[Message], turn: Turn) -> None:
        # Tools are left out: a conversation that changes them is still the same one.
        digest = extend_digest(history_digests(history, identity)[-1], turn.reply)
        self._by_conversation[digest] = episode_id
        self._digests.setdefault(episode_id, []).append(digest)
