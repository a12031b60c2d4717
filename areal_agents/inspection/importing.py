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
    conversations_in,
    documents,
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
    """What files have to import; `left_out` is the number of conversations of held-out tasks."""

    episodes: Sequence[EndedEpisode]
    left_out: int


def read_files(
    files: Sequence[Path],
    form: ImportFormat | None,
    renderer: ChatRenderer,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    reward: float = 1.0,
    held_out: bool = False,
) -> ReadFiles:
    """Return the conversations of files as episodes, each of a task of its own.

    Args:
        form: None: by the ending of each file.
        tools: the tools of conversations that name none.
        reward: the reward of every episode.
        held_out: whether conversations are read that their file names as of split eval.

    Raises:
        DataError: a document cannot be read, or the template cannot express it; the message names up to ten.
            Or every conversation was left out.
    """
    reader = _Reader(renderer)
    made, faults, left_out = [], [], 0
    try:
        for file in files:
            chosen = form or format_of(file)
            metadata = {"source": SOURCE, "format": chosen, "sha256": _digest(file, chosen)}
            for where, text in documents(file, chosen):
                try:
                    for found in conversations_in(text, chosen, tools):
                        if found.is_held_out and not held_out:
                            left_out += 1
                            continue
                        turns = asyncio.run(reader.turns(found))
                        made.append(_episode(turns, {**metadata, "from": where}, reward))
                except DataError as error:
                    faults.append(f"{where}: {error}")
    finally:
        reader.close()
    if faults:
        more = len(faults) - _MOST_FAULTS
        rest = f"\nand {more} more" if more > 0 else ""
        raise DataError("nothing was imported:\n" + "\n".join(faults[:_MOST_FAULTS]) + rest)
    if left_out and not made:
        raise DataError(
            f"nothing was imported: all {left_out} conversations are of held-out tasks (split eval in the "
            "file); --held-out imports them, to train on"
        )
    return ReadFiles(made, left_out)


def write(episodes: Sequence[EndedEpisode], store: Store) -> Imported:
    """Write episodes to a store, all or none.

    Raises:
        DataError: the store already has the episodes of one of the files.
    """
    for digest, where in {str(e.new.metadata["sha256"]): e.new.metadata["from"] for e in episodes}.items():
        if known := store.episodes(metadata={"source": SOURCE, "sha256": digest}):
            raise DataError(
                f"{_LINE.sub('', str(where))} has been imported into {store.path} before ({len(known)} "
                "episodes), which would train on it twice; nothing was imported"
            )
    store.add_ended(episodes).result()
    trained = [turn for e in episodes for turn in e.turns if not turn.discarded]
    return Imported(
        conversations=len(episodes),
        replies=len(trained),
        tokens=sum(len(turn.completion) for turn in trained),
        longest=max(_length(e) for e in episodes),
    )


class _Reader:
    """Makes turns of conversations, as the proxy makes them of calls."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._prompts = Prompts(renderer)
        self._dialect = ChatDialect()
        self._vocab_size = renderer.vocab_size

    def close(self) -> None:
        self._prompts.close()

    async def turns(self, found: Conversation) -> tuple[Turn, ...]:
        """Return a turn for each reply. Raises DataError with the place of what cannot be a turn."""
        request = self._request(found)
        forest = Forest()
        for index, message in enumerate(request.messages):
            if message.role != "assistant" or (index == 0 and found.untrained[0]):
                continue
            if index == 0:
                raise DataError(
                    f"{found.places[0]}: the conversation begins with a reply, which answers nothing"
                )
            try:
                forest.record(await self._turn(forest, request, index, found))
            except (RenderingError, RequestError) as error:
                raise DataError(f"{found.places[index]}: {error}") from None
        if all(turn.discarded for turn in forest.turns):
            raise DataError("it has no reply to learn")
        return forest.turns

    def _request(self, found: Conversation) -> ModelRequest:
        """Return the conversation as the proxy reads it in a request of chat completions."""
        context = ReadContext(max_messages=_MOST_MESSAGES, label="", forest=Forest())
        try:
            request = self._dialect.read({"messages": found.messages, "tools": found.tools}, context)
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
