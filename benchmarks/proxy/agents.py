"""The agents of the proxy's benchmark: they open episodes, play turns, and finish."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import orjson

from areal_agents.errors import EngineError
from benchmarks.proxy.load import Call, Connection, Conversation, Tally, all_at_once
from benchmarks.proxy.processes import Server
from benchmarks.proxy.texts import TOOLS, Texts

# the admin key of the proxy, and the key for proxies without episodes
ADMIN_KEY, BARE_KEY = "benchmark-admin-key", "sk-benchmark"


@dataclass(frozen=True)
class Length:
    """A prompt length at which calls are timed.

    Args:
        output: sampled tokens of every reply.
        warm_turns, warm_result: turns before the timed ones, and the tokens of the tool result in each.
        timed_turns: timed turns per episode; the mean prompt length over them is the nominal length.
    """

    output: int
    warm_turns: int
    warm_result: int
    timed_turns: int
    system: int = 600
    newest: int = 250


class Agents:
    """Creates conversations with a server and makes their calls; `tally` counts other failures."""

    def __init__(self, texts: Texts, tally: Tally) -> None:
        self._texts = texts
        self._tally = tally

    async def episodes(self, proxy: Server, count: int, *, system: int = 600) -> list[Conversation]:
        """Open episodes on the proxy, each with its own connection."""
        control = await Connection.open(proxy.url)
        conversations = []
        for _ in range(count):
            status, raw = await control.post("/episodes", b"{}", ADMIN_KEY)
            if status != 200:
                raise EngineError(f"the proxy opened no episode: {status} {raw[:300].decode()}")
            opened = orjson.loads(raw)
            base = urlsplit(opened["base_url"])
            connection = await Connection.open(f"{base.scheme}://{base.netloc}")
            path = f"{base.path}/chat/completions"
            conversation = self._conversation(connection, path, opened["key"], system)
            conversation.episode_id = opened["id"]
            conversations.append(conversation)
        control.close()
        return conversations

    async def finish(self, proxy: Server, episodes: Sequence[Conversation]) -> None:
        """Finish episodes, so that the proxy can release them, and close their connections."""
        control = await Connection.open(proxy.url)
        for episode in episodes:
            status, raw = await control.post(f"/episodes/{episode.episode_id}/finish", b"{}", ADMIN_KEY)
            if status != 200:
                self._tally.failed(f"{status} {raw[:300].decode(errors='replace')}")
            episode.close()
        control.close()

    async def bare(self, server: Server, count: int, *, system: int) -> list[Conversation]:
        """Conversations with a proxy that has no episodes."""
        path = "/v1/chat/completions"
        return [
            self._conversation(await Connection.open(server.url), path, BARE_KEY, system)
            for _ in range(count)
        ]

    def _conversation(self, connection: Connection, path: str, key: str, system: int) -> Conversation:
        task = self._texts.prose(60)
        return Conversation(
            connection, system=self._texts.prose(system), task=task, tools=TOOLS, path=path, key=key
        )

    def turns(
        self, conversations: Sequence[Conversation], turns: int, output: int, result: int, tally: Tally
    ) -> list[Call]:
        """The calls, round by round: in each round, the next turn of every conversation."""
        texts = itertools.cycle(self._texts.results(result))
        return [
            functools.partial(conversation.call, output, tally, next(texts))
            for _ in range(turns)
            for conversation in conversations
        ]

    async def play(
        self, conversations: list[Conversation], length: Length, *, turns: int, result: int
    ) -> None:
        """Turns at full speed, the first of which answers the task."""
        first = [functools.partial(c.call, length.output, self._tally) for c in conversations]
        rest = self.turns(conversations, turns - 1, length.output, result, self._tally)
        await all_at_once([*first, *rest], at_a_time=4)
