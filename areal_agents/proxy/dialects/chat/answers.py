"""Writes recorded turns as OpenAI chat completions, whole or as a stream of chunks.

A stream has a chunk with the role of each choice, then deltas, then a finish chunk for each choice, a usage
chunk if requested, and [DONE]. No chunk has both content and tool calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
)
from openai.types.chat import chat_completion as whole
from openai.types.chat import chat_completion_chunk as piece
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
    Function,
)
from openai.types.completion_usage import CompletionUsage, PromptTokensDetails

from areal_agents.core.messages import Message, ToolCall
from areal_agents.core.trajectory import Turn
from areal_agents.errors import RequestError
from areal_agents.proxy.calls.request import CompletedTurn
from areal_agents.proxy.dialects.writing import (
    DONE,
    TokenTexts,
    event,
    model_name,
    openai_error,
    to_json,
    typed,
)
from areal_agents.rendering import Tokenizer


def chat_answer(body: Mapping[str, Any], done: Sequence[CompletedTurn], tokenizer: Tokenizer) -> bytes:
    """Return the JSON of a `ChatCompletion`.

    Its id is that of the first choice's turn. With several choices, each has the id of its turn in `turn_id`.
    """
    with_logprobs = bool(body.get("logprobs"))
    response = typed(
        ChatCompletion,
        id=done[0].turn.id,
        object="chat.completion",
        created=int(done[0].created_at),
        model=model_name(body),
        choices=[
            typed(
                whole.Choice,
                index=index,
                finish_reason=item.finish_reason,
                message=_message(item.turn.reply),
                logprobs=None,
            )
            for index, item in enumerate(done)
        ],
        usage=_usage(done),
    )
    if len(done) == 1 and not with_logprobs:
        return to_json(response)
    answer = orjson.loads(to_json(response))
    for choice, item in zip(answer["choices"], done, strict=True):
        if with_logprobs:
            choice["logprobs"] = _logprobs(item.turn, tokenizer)
        if len(done) > 1:
            choice["turn_id"] = item.turn.id  # with which a reward refers to this choice
    return orjson.dumps(answer)


class ChatStream:
    """Writes the chunks of one answer; see `StreamWriter`."""

    def __init__(
        self, body: Mapping[str, Any], turn_ids: Sequence[str], created_at: float, tokenizer: Tokenizer
    ) -> None:
        options = body.get("stream_options")
        self._with_usage = bool(options.get("include_usage")) if isinstance(options, dict) else False
        self._with_logprobs = bool(body.get("logprobs"))
        self._id = turn_ids[0]
        self._created = int(created_at)
        self._model = model_name(body)
        self._choices = len(turn_ids)
        self._calls = [0] * len(turn_ids)
        self._tokenizer = tokenizer

    def start(self) -> bytes:
        """See `StreamWriter.start`."""
        deltas = [typed(piece.ChoiceDelta, role="assistant", content="") for _ in range(self._choices)]
        return b"".join(event(self._chunk(choice, delta)) for choice, delta in enumerate(deltas))

    def reasoning(self, choice: int, text: str) -> bytes:
        """See `StreamWriter.reasoning`."""
        return event(self._chunk(choice, typed(piece.ChoiceDelta, reasoning_content=text)))

    def content(self, choice: int, text: str) -> bytes:
        """See `StreamWriter.content`."""
        return event(self._chunk(choice, typed(piece.ChoiceDelta, content=text)))

    def call(self, choice: int, call: ToolCall) -> bytes:
        """See `StreamWriter.call`."""
        index = self._calls[choice]
        self._calls[choice] += 1
        function = typed(piece.ChoiceDeltaToolCallFunction, name=call.name, arguments=call.arguments)
        item = typed(piece.ChoiceDeltaToolCall, index=index, id=call.id, type="function", function=function)
        return event(self._chunk(choice, typed(piece.ChoiceDelta, tool_calls=[item])))

    def finish(self, done: Sequence[CompletedTurn]) -> bytes:
        """See `StreamWriter.finish`."""
        out = []
        for choice, item in enumerate(done):
            last = self._chunk(choice, typed(piece.ChoiceDelta), item.finish_reason)
            if self._with_logprobs:
                chunk = orjson.loads(last)
                chunk["choices"][0]["logprobs"] = _logprobs(item.turn, self._tokenizer)
                last = orjson.dumps(chunk)
            out.append(event(last))
        if self._with_usage:
            out.append(event(to_json(self._response(choices=[], usage=_usage(done)))))
        return b"".join([*out, DONE])

    def error(self, refusal: RequestError) -> bytes:
        """See `StreamWriter.error`. OpenAI's clients raise an exception for an event with an error."""
        return event(openai_error(refusal)) + DONE

    def _chunk(self, choice: int, delta: Any, finish_reason: str | None = None) -> bytes:
        item = typed(piece.Choice, index=choice, delta=delta, finish_reason=finish_reason, logprobs=None)
        return to_json(self._response(choices=[item]))

    def _response(self, **fields: Any) -> ChatCompletionChunk:
        if self._with_usage:
            fields.setdefault("usage", None)
        return typed(
            ChatCompletionChunk,
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            **fields,
        )


def _message(reply: Message) -> ChatCompletionMessage:
    fields: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.tool_calls:
        fields["content"] = reply.content or None  # with tool calls, OpenAI's API has null for empty content
        fields["tool_calls"] = [
            typed(
                ChatCompletionMessageFunctionToolCall,
                id=call.id,
                type="function",
                function=typed(Function, name=call.name, arguments=call.arguments),
            )
            for call in reply.tool_calls
        ]
    if reply.reasoning:
        fields["reasoning_content"] = reply.reasoning
    return typed(ChatCompletionMessage, **fields)


def _usage(done: Sequence[CompletedTurn]) -> CompletionUsage:
    completion_tokens = sum(len(item.turn.completion) for item in done)
    return typed(
        CompletionUsage,
        prompt_tokens=done[0].prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=done[0].prompt_tokens + completion_tokens,
        prompt_tokens_details=typed(PromptTokensDetails, cached_tokens=done[0].reused_tokens),
    )


def _logprobs(turn: Turn, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the logprobs of a completion in OpenAI's form, with the alternatives if they were requested."""
    return {"content": TokenTexts(tokenizer).entries(turn.completion), "refusal": None}
