"""The agent's loop: ask the model, run the searches and open the pages that it wants, until it answers.

One conversation is one branch: its messages are only ever appended to, and its tools stay offered to the last
turn. Two limits end it. In the turn before either is exceeded, the model may call no more tools and answers
with what it has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI
from search_backends import Backend, Page, PageNotFound

Message = dict[str, Any]

NO_RESULTS = "No results."
CUT = "\n[cut off here]"
LONGEST_ARGUMENT = 2000  # characters of a query or a URL; search services refuse longer ones
SUMMARY_LABEL = "summary"  # of the calls that condense a page, for algorithm.exclude_labels
_MESSAGE_TOKENS = 32  # at most what a chat format adds to a message
_CHARACTERS_PER_TOKEN = 2.0  # until the model's own is known
_CAUTION = 0.8  # of the measured characters per token: tables and names have fewer than prose

SEARCH_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search for pages. Returns the best results: title, URL and an excerpt of each.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "what to search for"}},
            "required": ["query"],
        },
    },
}
ACCESS_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "access",
        "description": "Open a page and read its text.",
        "parameters": {
            "type": "object",
            "properties": {"url": {"type": "string", "description": "the URL of a search result"}},
            "required": ["url"],
        },
    },
}
SYSTEM_PROMPT = (
    "Find the answer to the question. Search step by step: look up one fact at a time, open a page when its "
    "excerpt is not enough, and check what you are unsure of. Do not answer from memory. When you know the "
    "answer, give it as briefly as possible between <answer> and </answer>."
)
LAST_TURN = "You can search no more. Answer now with what you have found, between <answer> and </answer>."
SUMMARY_PROMPT = (
    "Condense a page for somebody who wants to answer a question. Keep every fact that may help, with names, "
    "numbers and dates as the page gives them. Leave out the rest. If nothing helps, say so in one sentence."
)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an episode.

    Attributes:
        turns: the most model calls of the conversation, the answer included.
        reply_tokens: the most tokens of one reply.
        context_tokens: the most tokens of the conversation, its last reply included; not more than the engine
            serves (`engine.max_context`).
        results: the results of a search.
        excerpt_characters: of one result.
        page_characters: how much of a page is read.
        summary_above: pages of more characters are condensed by a call of the model before they enter the
            conversation; None: no page is.
    """

    turns: int = 16
    reply_tokens: int = 1024
    context_tokens: int = 8192
    results: int = 3
    excerpt_characters: int = 800
    page_characters: int = 8000
    summary_above: int | None = None

    def __post_init__(self) -> None:
        if min(self.turns, self.reply_tokens, self.results) < 1:
            raise ValueError(f"turns, reply_tokens and results must be at least 1, got {self}")
        if self.context_tokens < 2 * self.reply_tokens:
            raise ValueError(
                f"context_tokens must have room for two replies of {self.reply_tokens} tokens, got "
                f"{self.context_tokens}"
            )


@dataclass(frozen=True, slots=True)
class Style:
    """What the model is told.

    Attributes:
        system_prompt: the instructions.
        tools: "search", and "access" where pages can be opened.
        last_turn: what the last result ends with, before an answer that a limit asks for; "" for nothing.
    """

    system_prompt: str = SYSTEM_PROMPT
    tools: Sequence[Mapping[str, Any]] = (SEARCH_TOOL, ACCESS_TOOL)
    last_turn: str = LAST_TURN

    @property
    def opens_pages(self) -> bool:
        """Whether the model can open pages, so that results have a title and a URL."""
        return any(tool["function"]["name"] == "access" for tool in self.tools)

    def opening(self, question: str) -> list[Message]:
        """Return the messages with which a conversation begins."""
        return [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": question}]


async def research(
    client: AsyncOpenAI,
    question: str,
    backend: Backend,
    *,
    limits: Limits,
    style: Style,
    messages: list[Message] | None = None,
) -> str | None:
    """Return the model's last reply; None if it has no text.

    Args:
        messages: an empty list that becomes the conversation.

    Raises:
        BackendError: the backend does not answer.
        openai.OpenAIError: the model does not.
    """
    messages = [] if messages is None else messages
    messages += style.opening(question)
    context = _Context(limits.context_tokens)
    context.add(json.dumps([*style.tools]))
    for message in messages:
        context.add(message["content"])
    for turn in range(1, limits.turns + 1):
        # Besides this reply, results and a last reply have to fit.
        is_last = turn == limits.turns or context.room < 2 * limits.reply_tokens + 2 * _MESSAGE_TOKENS
        if is_last and turn > 1 and style.last_turn:
            # A message of its own would begin a new branch: Qwen's template shows the replies before the last
            # message of a user in another way than those after it.
            messages[-1]["content"] += f"\n\n{style.last_turn}"
        response = await client.chat.completions.create(
            model="policy",
            messages=messages,  # type: ignore[arg-type]
            tools=[*style.tools],  # type: ignore[list-item]
            tool_choice="none" if is_last else "auto",
            max_tokens=limits.reply_tokens,
        )
        reply = response.choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if is_last or not reply.tool_calls:
            return reply.content or None
        if response.usage is None:  # some endpoints report none
            context.add(json.dumps(messages[-1]))
        else:
            context.measure(response.usage.total_tokens, _characters(messages, style))
        for call in reply.tool_calls:
            room = context.room - limits.reply_tokens - 2 * _MESSAGE_TOKENS
            text = await _result(client, question, call.function, backend, limits, style)
            text = context.fitted(text, room)
            context.add(text)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    raise AssertionError("the last turn returns")


async def _result(
    client: AsyncOpenAI, question: str, function: Any, backend: Backend, limits: Limits, style: Style
) -> str:
    """Return the result of a tool call; what the model did wrong is told to it."""
    offered = [tool["function"]["name"] for tool in style.tools]
    if function.name not in offered:
        return f"Error: there is no tool {function.name[:50]}; there is {' and '.join(offered)}."
    name = "query" if function.name == "search" else "url"
    try:
        value = json.loads(function.arguments).get(name)
    except (ValueError, AttributeError):
        value = None
    if not isinstance(value, str) or not value.strip():
        return f"Error: {function.name} needs a {name}."
    if len(value) > LONGEST_ARGUMENT:
        return f"Error: a {name} has at most {LONGEST_ARGUMENT} characters."
    if function.name == "search":
        return await _searched(backend, value, limits, style)
    try:
        page = await backend.access(value.strip())
    except PageNotFound as error:
        return f"Error: {error}"
    return await _read(client, question, page, limits)


async def _searched(backend: Backend, query: str, limits: Limits, style: Style) -> str:
    found = await backend.search(query, limits.results)
    if not found:
        return NO_RESULTS
    lines = []
    for rank, result in enumerate(found, start=1):
        excerpt = _cut(result.text, limits.excerpt_characters)
        head = f"{result.title} <{result.url}>\n" if style.opens_pages else ""
        lines.append(f"[{rank}] {head}{excerpt}")
    return "\n".join(lines)


async def _read(client: AsyncOpenAI, question: str, page: Page, limits: Limits) -> str:
    text = _cut(page.text, limits.page_characters)
    if limits.summary_above is None or len(text) <= limits.summary_above:
        return f"{page.title} <{page.url}>\n{text}"
    room = limits.context_tokens - limits.reply_tokens - 4 * _MESSAGE_TOKENS
    prompt = f"Question: {question}\n\nPage: {page.title} <{page.url}>\n{text}"
    unknown = _Context(limits.context_tokens)
    response = await client.chat.completions.create(
        model="policy",
        messages=[
            {"role": "system", "content": SUMMARY_PROMPT},
            {"role": "user", "content": unknown.fitted(prompt, room - unknown.tokens(SUMMARY_PROMPT))},
        ],
        max_tokens=limits.reply_tokens,
        extra_headers={"X-Episode-Label": SUMMARY_LABEL},
    )
    return f"Summary of {page.title} <{page.url}>\n{response.choices[0].message.content or ''}"


class _Context:
    """How many tokens of the context a conversation has: known after each call, and estimated between."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0.0
        self._characters_per_token = _CHARACTERS_PER_TOKEN

    @property
    def room(self) -> int:
        """The tokens that are left."""
        return int(self._limit - self._used)

    def tokens(self, text: str) -> int:
        """Return about how many tokens a text has, rather too many than too few."""
        return int(len(text) / self._characters_per_token) + 1

    def add(self, text: str) -> None:
        """Count a message that was not sent yet."""
        self._used += self.tokens(text) + _MESSAGE_TOKENS

    def measure(self, tokens: int, characters: int) -> None:
        """Note what the server has counted: the tokens of the whole conversation."""
        self._used = tokens
        self._characters_per_token = max(0.5, min(4.0, _CAUTION * characters / max(1, tokens)))

    def fitted(self, text: str, room: int) -> str:
        """Return a text, cut so that it takes at most `room` tokens."""
        return _cut(text, max(0, int(room * self._characters_per_token)))


def _cut(text: str, characters: int) -> str:
    if len(text) <= characters:
        return text
    return text[: max(0, characters - len(CUT))] + CUT if characters > len(CUT) else ""


def _characters(messages: Sequence[Mapping[str, Any]], style: Style) -> int:
    """Return the characters of a conversation, as far as its tokens are those of texts."""
    texts = [str(message.get("content") or "") for message in messages]
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    calls_text = [call["name"] + call["arguments"] for call in calls]
    return sum(map(len, (*texts, *calls_text, json.dumps([*style.tools]))))
