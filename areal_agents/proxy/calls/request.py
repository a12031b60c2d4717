"""The canonical form of a model call: the request that a dialect produces, and the result it answers with."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from areal_agents.core.completion import Grammar
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Turn
from areal_agents.errors import RequestError, shown

CallPolicy = Literal["auto", "none", "required"]
RAW_TOOLS_ID = "raw prompt"  # represents the tools of a call that no chat template renders


@dataclass(frozen=True, slots=True)
class SamplingWish:
    """The sampling parameters that a request sets; None for those that it does not set."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: bool | None = None  # whether any bias is requested
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Retry:
    """What a client's headers say about retries.

    Attributes:
        count: number of earlier attempts, from the header x-stainless-retry-count.
        idempotency_key: the header Idempotency-Key, "" without one.
    """

    count: int = 0
    idempotency_key: str = ""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One model call, independent of its dialect.

    Attributes:
        messages: at least one message. A replayed reply has the handle of its turn if the client kept it.
        tools: OpenAI chat function tools ({"type": "function", "function": {…}}), in the order of the
            request.
        tools_id: digest of `tools` and `template_options`, "" without either.
        wish: the requested sampling parameters.
        calls: "auto"; "none", to withhold the reply's tool calls from the client; or "required", to force
            the reply to be a call.
        callable_tools: with calls "required", the tools that may be called; () for all of them.
        parallel_calls: if False, the client receives only the first tool call of the reply.
        output: a grammar that the reply must match (response_format), or None.
        choices: number of replies to sample (`n`), at least 1.
        template_options: options of the chat template that this request sets, for example
            {"enable_thinking": False}.
        has_instructions: whether the first message comes from `instructions` of the Responses API, which a
            later response that continues this one does not inherit.
        raw_prompt: a prompt without a chat template, as a string or as token ids, or None. With it,
            `messages` has one message that represents it, and `tools_id` is RAW_TOOLS_ID.
        logprobs: whether the answer lists the tokens with their logprobs.
        label: label of the caller within the episode, for example a sub-agent.
        session: the session header of the call, "" without one.
        retry: what the headers say about retries.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    tools_id: str
    wish: SamplingWish
    calls: CallPolicy = "auto"
    callable_tools: tuple[str, ...] = ()
    parallel_calls: bool = True
    output: Grammar | None = None
    choices: int = 1
    template_options: Mapping[str, Any] = field(default_factory=dict)
    has_instructions: bool = False
    raw_prompt: str | tuple[int, ...] | None = None
    logprobs: bool = False
    label: str = ""
    session: str = ""
    retry: Retry = Retry()

    def key(self) -> Hashable:
        """Return a value that two calls have in common if and only if they request the same."""
        messages = b"".join([message.digest for message in self.messages])
        calls = (self.calls, self.callable_tools, self.parallel_calls)
        options = (self.wish, calls, self.output, self.choices)
        return (self.tools_id, messages, options, _digest(self.raw_prompt))


def _digest(raw: str | tuple[int, ...] | None) -> tuple[str, bytes] | None:
    """Return a digest of a raw prompt, because keys are kept and the prompt may be large."""
    if raw is None:
        return None
    data = raw.encode(errors="surrogatepass") if isinstance(raw, str) else np.asarray(raw, np.int64).tobytes()
    return type(raw).__name__, hashlib.blake2b(data, digest_size=16).digest()


def refuse_unknown_results(messages: Sequence[Message]) -> None:
    """Raise RequestError 400 if a tool result answers a call that is nowhere before it in the conversation.

    The model would read an answer to a question that it never asked: the client has dropped or replaced the
    message with the call. A call without an id can be answered by any result, and a result without an id
    names no call: agents that write their calls as text send such results.
    """
    known: set[str] = set()
    for index, message in enumerate(messages):
        if message.tool_calls:
            for call in message.tool_calls:  # nearly always one, and this runs for every message of a request
                known.add(call.id)
        elif message.tool_call_id is not None and message.tool_call_id not in known and "" not in known:
            raise RequestError(
                f"message {index} is the result of the tool call {shown(message.tool_call_id)}, but no "
                "message before it has this call; send the assistant's message with the call, too",
                code="invalid_conversation",
                param="messages",
            )


@dataclass(frozen=True, slots=True)
class CompletedTurn:
    """A recorded turn, with the values that only its answer needs.

    Attributes:
        turn: the recorded turn.
        prompt_tokens: length of the whole prompt.
        created_at: seconds since the epoch.
        reused_tokens: number of prompt tokens that are recorded ids of earlier turns.
    """

    turn: Turn
    prompt_tokens: int
    created_at: float
    reused_tokens: int = 0

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """Why the reply ended, as OpenAI's finish_reason; never "abort"."""
        if self.turn.completion.finish_reason == "length":
            return "length"
        return "tool_calls" if self.turn.reply.tool_calls else "stop"
