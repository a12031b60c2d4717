"""Imports conversations as episodes, for supervised training: every file whole, or nothing.

A conversation becomes the turns that the proxy would have recorded if the model had given its replies: the
same reading of messages, the same prompts, and of each reply the tokens that the model's template writes, or
those that the file recorded, if they answer the same prompt and read as the same reply. No policy of this
store sampled them, so they have neither logprobs nor versions.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_agents.core.completion import Completion, SamplingParams, TokenIds, as_token_ids
from areal_agents.core.forest import Forest
from areal_agents.core.messages import Message
from areal_agents.core.rollout import Reward, Task
from areal_agents.core.trajectory import Turn
from areal_agents.errors import DataError, RenderingError, RequestError
from areal_agents.inspection.formats.reading import (
    Conversation,
    ImportFormat,
    ReadEpisode,
    documents,
    episodes_in,
    format_of,
)
from areal_agents.proxy.auth import key_hash, new_episode_key
from areal_agents.proxy.calls.prompts import Prompt, Prompts
from areal_agents.proxy.calls.request import ModelRequest, refuse_unknown_results
from areal_agents.proxy.dialects.base import ReadContext
from areal_agents.proxy.dialects.chat.dialect import ChatDialect
from areal_agents.proxy.dialects.turn_ids import new_turn_id
from areal_agents.rendering import ChatRenderer
from areal_agents.store import Store
from areal_agents.store.rows import EndedEpisode, NewEpisode
from areal_agents.store.urls import shown_store

SOURCE = "import"  # metadata of imported episodes
REWARD = "imported"  # name of their reward
_MOST_FAULTS = 10  # faulty documents that an error lists
_MOST_MESSAGES = 100_000
_MOST_TOKENS = 2**31 - 1  # a longer conversation than a run can train is refused by the run
_PLACE = re.compile(r"messages\[(\d+)\]")
_LINE = re.compile(r":\d+\Z")  # ends the place of a document that is a line of a file


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import has written.

    Attributes:
        conversations, replies: how many; only the replies that are learned count.
        tokens: of these replies.
        longest: tokens of the longest conversation, through its last reply that is learned.
    """

    conversations: int
    replies: int
    tokens: int
    longest: int


@dataclass(frozen=True, slots=True)
class ReadFiles:
    """What files have to import.

    Attributes:
        held_out: how many episodes of held-out tasks were left out.
        below: how many were left out because their score is not high enough, or not known.
    """

    episodes: Sequence[EndedEpisode]
    held_out: int
    below: int


def read_files(
    files: Sequence[Path],
    form: ImportFormat | None,
    renderer: ChatRenderer,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    reward: float | None = None,
    min_reward: float | None = None,
    held_out: bool = False,
    reasoning: bool = True,
) -> ReadFiles:
    """Return the conversations of files as episodes, each of a task of its own.

    Args:
        form: None: by the ending of each file.
        tools: the tools of conversations that name none.
        reward: the reward of every episode; None: the score that the file names, and 1 where it names none.
        min_reward: the least score that the file must name for an episode; None: any, and none.
        held_out: whether conversations are read that their file names as of split eval.
        reasoning: whether the reasoning of messages is read; a template that has none cannot express it.

    Raises:
        DataError: a document cannot be read, or the template cannot express it; the message names up to ten.
            Or every conversation was left out.
    """
    reader = _Reader(renderer, reasoning=reasoning)
    made, faults, left_out, below = [], [], 0, 0
    try:
        for file in files:
            chosen = form or format_of(file)
            metadata = {"source": SOURCE, "format": chosen, "sha256": _digest(file, chosen)}
            for where, text in documents(file, chosen):
                try:
                    for found in episodes_in(text, chosen, tools):
                        if found.is_held_out and not held_out:
                            left_out += 1
                            continue
                        if min_reward is not None and (found.score is None or found.score < min_reward):
                            below += 1
                            continue
                        turns = asyncio.run(reader.turns(found))
                        own = 1.0 if found.score is None else found.score
                        of_file = {"episode": found.id} if found.id else {}
                        made.append(
                            _episode(
                                turns,
                                {**metadata, "from": where, **of_file},
                                own if reward is None else reward,
                            )
                        )
                except DataError as error:
                    faults.append(f"{where}: {error}")
    finally:
        reader.close()
    if faults:
        more = len(faults) - _MOST_FAULTS
        rest = f"\nand {more} more" if more > 0 else ""
        raise DataError("nothing was imported:\n" + "\n".join(faults[:_MOST_FAULTS]) + rest)
    if left_out and not made and not below:
        raise DataError(
            f"nothing was imported: all {left_out} conversations are of held-out tasks (split eval in the "
            "file); --held-out imports them, to train on"
        )
    if not made:
        raise DataError(
            f"nothing was imported: no episode of the files has a score of at least {min_reward:g} "
            f"(--min-reward); {below} have a lower one or name none"
        )
    return ReadFiles(made, left_out, below)


def write(episodes: Sequence[EndedEpisode], store: Store) -> Imported:
    """Write episodes to a store, all or none.

    Raises:
        DataError: the store already has the episodes of one of the files, or one of the episodes.
    """
    into = shown_store(store.url)
    imported = store.episodes(metadata={"source": SOURCE})
    before = {e.metadata["episode"] for e in imported if "episode" in e.metadata}
    if again := [e.new.metadata["from"] for e in episodes if e.new.metadata.get("episode") in before]:
        raise DataError(
            f"{len(again)} of these episodes have been imported into {into} before, which would train "
            f"on them twice; nothing was imported. Import into a new store. The first is {again[0]}"
        )
    for digest, where in {str(e.new.metadata["sha256"]): e.new.metadata["from"] for e in episodes}.items():
        if known := store.episodes(metadata={"source": SOURCE, "sha256": digest}):
            raise DataError(
                f"{_LINE.sub('', str(where))} has been imported into {into} before ({len(known)} "
                "episodes), which would train on it twice; nothing was imported"
            )
    store.add_ended(episodes).result()
    trained = [turn for e in episodes for turn in e.turns if not turn.discarded]
    return Imported(
        conversations=sum(len(Forest(e.turns).leaves()) for e in episodes),
        replies=len(trained),
        tokens=sum(len(turn.completion) for turn in trained),
        longest=max(_length(e) for e in episodes),
    )


class _Reader:
    """Makes turns of conversations, as the proxy makes them of calls."""

    def __init__(self, renderer: ChatRenderer, *, reasoning: bool) -> None:
        self._left_out = () if reasoning else ("reasoning_content", "reasoning")
        self._prompts = Prompts(renderer)
        self._dialect = ChatDialect()
        self._vocab_size = renderer.vocab_size

    def close(self) -> None:
        self._prompts.close()

    async def turns(self, found: ReadEpisode) -> tuple[Turn, ...]:
        """Return a turn for each reply. Raises DataError with the place of what cannot be a turn."""
        forest, recorded = Forest(), set[bytes]()
        for conversation in found.conversations:
            await self._record(conversation, forest, recorded)
        if all(turn.discarded for turn in forest.turns):
            raise DataError("it has no reply to learn")
        return forest.turns

    async def _record(self, found: Conversation, forest: Forest, recorded: set[bytes]) -> None:
        """Add the turns of a conversation to a forest, except those that it has already.

        Args:
            recorded: a digest for each turn of the forest, of its conversation through its reply.
        """
        request = self._request(found)
        path = hashlib.sha256(request.tools_id.encode())
        for index, message in enumerate(request.messages):
            path.update(message.digest + message.reasoning.encode("utf-8", "surrogatepass") + b"\0")
            if message.role != "assistant" or (index == 0 and found.untrained[0]):
                continue
            if index == 0:
                raise DataError(
                    f"{found.places[0]}: the conversation begins with a reply, which answers nothing"
                )
            if path.digest() in recorded:
                continue
            try:
                forest.record(await self._turn(forest, request, index, found))
            except (RenderingError, RequestError) as error:
                raise DataError(f"{found.places[index]}: {error}") from None
            recorded.add(path.digest())

    def _request(self, found: Conversation) -> ModelRequest:
        """Return the conversation as the proxy reads it in a request of chat completions."""
        context = ReadContext(max_messages=_MOST_MESSAGES, label="", forest=Forest())
        messages = [{k: v for k, v in m.items() if k not in self._left_out} for m in found.messages]
        try:
            request = self._dialect.read({"messages": messages, "tools": found.tools}, context)
            refuse_unknown_results(request.messages)
        except RequestError as error:
            place = _PLACE.match(error.param or "")
            where = found.places[int(place[1])] if place else error.param
            raise DataError(f"{where}: {error}") from None
        for index, message in enumerate(request.messages):
            if message.tool_calls and not request.tools:
                raise DataError(
                    f"{found.places[index]}: it calls a tool, but the document has no tools, without which a "
                    "model cannot call any; give them in the document, or with --tools"
                )
        return request

    async def _turn(self, forest: Forest, request: ModelRequest, index: int, found: Conversation) -> Turn:
        asked = replace(request, messages=request.messages[:index])
        prompt = await self._prompts.prompt(forest, asked, self._vocab_size, most_tokens=_MOST_TOKENS)
        reply = request.messages[index]
        ids = self._recorded(prompt, reply, asked, found.recorded[index])
        if ids is None:
            ids = prompt.renderer.reply_ids(asked.messages, reply, asked.tools)
        where = prompt.where
        return Turn(
            id=new_turn_id(),
            parent=None if where.parent is None else where.parent.id,
            new_messages=where.new_messages,
            new_prompt_ids=prompt.new_ids,
            completion=Completion.imported(ids),
            reply=reply,
            sampling=SamplingParams(max_new_tokens=len(ids)),
            tools_id=asked.tools_id,
            forked_from=where.fork,
            discarded=found.untrained[index],
            recorded_before=prompt.recorded_before,
            special_tokens_as_text=prompt.special_tokens_as_text,
        )

    def _recorded(
        self,
        prompt: Prompt,
        reply: Message,
        asked: ModelRequest,
        recorded: tuple[list[int], list[int]] | None,
    ) -> TokenIds | None:
        """Return the recorded ids of a reply, if they are those of this model and of this reply."""
        if recorded is None or max(recorded[1]) >= self._vocab_size:
            return None
        if not np.array_equal(recorded[0], prompt.ids):
            return None
        ids = as_token_ids(recorded[1])
        read = prompt.renderer.parse(prompt.ids, ids, asked.tools)
        is_same = read.digest == reply.digest and read.reasoning.strip() == reply.reasoning.strip()
        return ids if is_same else None


def _episode(turns: tuple[Turn, ...], metadata: Mapping[str, Any], reward: float) -> EndedEpisode:
    """Return an episode of a task of its own: those of one task would be compared by their rewards."""
    name = f"imported-{secrets.token_hex(8)}"
    new = NewEpisode(
        id=name, key_hash=key_hash(new_episode_key()), task=Task(name, {}), metadata=dict(metadata)
    )
    return EndedEpisode(new, turns, (Reward("episode", "", REWARD, reward),))


def _length(episode: EndedEpisode) -> int:
    """Return the tokens of the longest path of an episode to a reply that is learned."""
    forest = Forest(episode.turns)
    return max(len(forest.context(turn.id)) for turn in episode.turns if not turn.discarded)


def _digest(path: Path, form: ImportFormat) -> str:
    digest = hashlib.sha256()
    for _, text in documents(path, form):
        digest.update(text.encode())
    return digest.hexdigest()
