"""The dialect of OpenAI's legacy text completions API: prompts are strings or token ids, not messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import orjson

from areal_agents.core.messages import Message, ToolCall
from areal_agents.core.trajectory import Turn
from areal_agents.errors import RequestError, shown
from areal_agents.proxy.calls.request import RAW_TOOLS_ID, CompletedTurn, ModelRequest, SamplingWish
from areal_agents.proxy.dialects import reading
from areal_agents.proxy.dialects.base import ReadContext
from areal_agents.proxy.dialects.reading import refuse, unsupported
from areal_agents.proxy.dialects.turn_ids import wire_id
from areal_agents.proxy.dialects.writing import (
    COMMENT,
    DONE,
    EVENT_STREAM,
    TokenTexts,
    event,
    model_name,
    openai_error,
)
from areal_agents.rendering import Tokenizer

_DEFAULT_MAX_TOKENS = 16  # the default of OpenAI's API
_MAX_LOGPROBS = 20
_MAX_TOKEN_ID = 2**31 - 1


class Completions:
    """POST /v1/completions; see `Dialect`."""

    name = "completions"
    keepalive = COMMENT

    def referenced_turn(self, body: Mapping[str, Any]) -> str | None:
        """See `Dialect.referenced_turn`. Requests of this API do not refer to turns."""
        return None

    def read(self, body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
        """See `Dialect.read`. The request has one prompt, and one message that represents it.

        Raise RequestError 400 for several prompts, and for echo, suffix and best_of.
        """
        return reading.within_depth(lambda: _canonical(body, context))

    def answer(self, body: Mapping[str, Any], done: Sequence[CompletedTurn], tokenizer: Tokenizer) -> bytes:
        """See `Dialect.answer`. The answer is an OpenAI `Completion`."""
        choices = [
            _choice(
                index,
                each.turn.reply.content,
                logprobs=_logprobs(body, each.turn, tokenizer),
                finish_reason=_finish_reason(each),
            )
            for index, each in enumerate(done)
        ]
        return _completion(body, done[0].turn.id, done[0].created_at, choices=choices, usage=_usage(done))

    def stream(
        self,
        body: Mapping[str, Any],
        request: ModelRequest,
        turn_ids: Sequence[str],
        created_at: float,
        tokenizer: Tokenizer,
    ) -> CompletionStream:
        """See `Dialect.stream`."""
        return CompletionStream(body, turn_ids[0], created_at, tokenizer)

    def error(self, refusal: RequestError) -> bytes:
        """See `Dialect.error`."""
        return openai_error(refusal)


class CompletionStream:
    """Writes chunks of text; the last chunk of a choice has its logprobs. See `StreamWriter`."""

    media_type = EVENT_STREAM

    def __init__(
        self, body: Mapping[str, Any], turn_id: str, created_at: float, tokenizer: Tokenizer
    ) -> None:
        self._body = body
        self._turn_id = turn_id
        self._created_at = created_at
        self._tokenizer = tokenizer

    def start(self) -> bytes:
        """See `StreamWriter.start`. This API has no event before the first text."""
        return b""

    def reasoning(self, choice: int, text: str) -> bytes:
        """See `StreamWriter.reasoning`. Without a chat template, reasoning is part of the text."""
        return self.content(choice, text)

    def content(self, choice: int, text: str) -> bytes:
        """See `StreamWriter.content`."""
        return self._chunk(choices=[_choice(choice, text, logprobs=None, finish_reason=None)])

    def call(self, choice: int, call: ToolCall) -> bytes:
        """See `StreamWriter.call`. It is never called, because a text completion has no tools."""
        raise AssertionError(f"a text completion has no tool calls, got one of {call.name!r}")

    def finish(self, done: Sequence[CompletedTurn]) -> bytes:
        """See `StreamWriter.finish`. The stream ends with a chunk per choice, requested usage and [DONE]."""
        out = b""
        for index, each in enumerate(done):
            last = _choice(
                index,
                "",
                logprobs=_logprobs(self._body, each.turn, self._tokenizer),
                finish_reason=_finish_reason(each),
            )
            out += self._chunk(choices=[last])
        options = self._body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            out += self._chunk(choices=[], usage=_usage(done))
        return out + DONE

    def error(self, refusal: RequestError) -> bytes:
        """See `StreamWriter.error`. OpenAI's clients raise an exception for an event with an error."""
        return event(openai_error(refusal)) + DONE

    def _chunk(self, **fields: Any) -> bytes:
        return event(_completion(self._body, self._turn_id, self._created_at, **fields))


def _canonical(body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
    prompt = _prompt(body.get("prompt"))
    choices = reading.choices(body)
    reading.refuse_fields_of_other_servers(body)
    for name in ("echo", "suffix"):
        if body.get(name):
            unsupported(f"{name} is not supported; remove it from the request", name)
    if body.get("best_of") not in (None, choices):
        unsupported("best_of is not supported; use n", "best_of")
    logprobs = reading.integer(body, "logprobs") or 0
    if not 0 <= logprobs <= _MAX_LOGPROBS:
        refuse(f"logprobs must be from 0 to {_MAX_LOGPROBS}, got {logprobs}", "logprobs")
    return ModelRequest(
        messages=(Message("user", prompt if isinstance(prompt, str) else ""),),
        tools=(),
        tools_id=RAW_TOOLS_ID,
        wish=SamplingWish(
            max_tokens=reading.positive(body, "max_tokens") or _DEFAULT_MAX_TOKENS,
            temperature=reading.number(body, "temperature"),
            top_p=reading.number(body, "top_p"),
            top_k=reading.top_k(body),
            min_p=reading.number(body, "min_p"),
            frequency_penalty=reading.number(body, "frequency_penalty"),
            presence_penalty=reading.number(body, "presence_penalty"),
            logit_bias=True if body.get("logit_bias") else None,
            seed=reading.integer(body, "seed"),
            stop=reading.stops(body.get("stop")),
            top_logprobs=logprobs,
        ),
        choices=choices,
        raw_prompt=prompt,
        logprobs=body.get("logprobs") is not None,
        label=context.label,
    )


def _prompt(value: Any) -> str | tuple[int, ...]:
    """Return the prompt: a string or token ids, or a list that has one of these."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            unsupported(f"a request may have only one prompt, got {len(value)}; send one for each", "prompt")
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        for token_id in value:
            if type(token_id) is not int or not 0 <= token_id <= _MAX_TOKEN_ID:
                refuse(f"a token id must be an integer of at least 0, got {shown(token_id)}", "prompt")
        return tuple(value)
    refuse(f"prompt must be a non-empty string or list of token ids, got {shown(value)}", "prompt")


def _completion(body: Mapping[str, Any], turn_id: str, created_at: float, **fields: Any) -> bytes:
    """Return the JSON of a whole answer, or of a chunk of one."""
    answer = {
        "id": wire_id(turn_id, "cmpl-"),
        "object": "text_completion",
        "created": int(created_at),
        "model": model_name(body),
        **fields,
    }
    return orjson.dumps(answer)


def _choice(
    index: int, text: str, *, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason}


def _finish_reason(done: CompletedTurn) -> str:
    return "length" if done.finish_reason == "length" else "stop"


def _usage(done: Sequence[CompletedTurn]) -> dict[str, Any]:
    prompt, completion = done[0].prompt_tokens, sum(len(each.turn.completion) for each in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": done[0].reused_tokens},
    }


def _logprobs(body: Mapping[str, Any], turn: Turn, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the logprobs of all sampled tokens, also of one that ends the text, if they were requested.

    The offsets are into the concatenation of `tokens`.
    """
    if body.get("logprobs") is None:
        return None
    completion, texts = turn.completion, TokenTexts(tokenizer)
    tokens = [texts.text(token_id) for token_id in completion.token_ids.tolist()]
    return {
        "tokens": tokens,
        "token_logprobs": completion.behavior_logprobs.tolist(),
        "top_logprobs": [_best(best, texts) for best in completion.top_logprobs] or None,
        "text_offset": list(accumulate((len(token) for token in tokens[:-1]), initial=0)) if tokens else [],
    }


def _best(best: Sequence[tuple[int, float]], texts: TokenTexts) -> dict[str, float]:
    """Return text → logprob; of tokens with the same text (parts of a character), the most probable one."""
    return {texts.text(token_id): logprob for token_id, logprob in reversed(best)}
