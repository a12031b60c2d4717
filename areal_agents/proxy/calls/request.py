"""The canonical request that each dialect reads, and the result from which it builds its answer."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from areal_agents.core.completion import Grammar
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Turn

CallPolicy = Literal["auto", "none", "required"]
RAW_TOOLS_ID = "raw prompt"  # represents the tools of a call that no chat template renders


@dataclass(frozen=True, slots=True)
class SamplingWish:
    """The sampling parameters that a request names; None where it names none."""

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
    """What a client says about sending a request again.

    Attributes:
        count: the number of earlier attempts, as the Stainless SDKs count them.
        idempotency_key: the name of the request; "" if the client gives none.
    """

    count: int = 0
    idempotency_key: str = ""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One call of the model, whatever its dialect.

    Attributes:
        messages: at least one. A replayed reply carries the handle of its turn where the client kept it.
        tools: OpenAI chat function tools ({"type": "function", "function": {…}}), in order, whatever the
            dialect they came in.
        tools_id: digest of `tools` and `template_options`; "" without either.
        wish: the sampling that is requested.
        calls: "none": the reply's tool calls are withheld from the client; "required": the reply is forced
            to be a call.
        named_tool: with calls "required", the one tool that must be called; None for any.
        parallel_calls: False: only the first tool call of the reply is handed out.
        output: a grammar that the reply must match (response_format), or None.
        choices: how many replies to sample (`n`), at least 1.
        template_options: options of the chat template that this request sets, for example
            {"enable_thinking": False}.
        has_instructions: the first message came from the `instructions` of the Responses API, which a
            response that continues this one does not inherit.
        raw_prompt: a string or token ids: the prompt itself, without a chat template; the messages and
            `tools_id` RAW_TOOLS_ID then represent it.
        logprobs: whether the answer lists the tokens with their logprobs.
        label: who calls within the episode, for example a sub-agent.
        session: the session header of the call, "" for none.
        retry: what the headers say about earlier attempts.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    tools_id: str
    wish: SamplingWish
    calls: CallPolicy = "auto"
    named_tool: str | None = None
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
        """A value that is equal for two calls that request the same."""
        said = b"".join([message.digest for message in self.messages])
        asked = (self.wish, self.calls, self.named_tool, self.parallel_calls, self.output, self.choices)
        return (self.tools_id, said, asked, _digest(self.raw_prompt))


def _digest(raw: str | tuple[int, ...] | None) -> tuple[str, bytes] | None:
    """A digest of a raw prompt for keys that are kept, since the prompt itself may be large."""
    if raw is None:
        return None
    data = raw.encode(errors="surrogatepass") if isinstance(raw, str) else np.asarray(raw, np.int64).tobytes()
    return type(raw).__name__, hashlib.blake2b(data, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class CompletedTurn:
    """A recorded turn, with what only the answer needs.

    Attributes:
        prompt_tokens: length of the whole prompt.
        reused_tokens: prompt tokens that are recorded ids of earlier turns, not rendered again.
        created_at: seconds since the epoch.
    """

    turn: Turn
    prompt_tokens: int
    created_at: float
    reused_tokens: int = 0

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """Why the reply ended, in OpenAI's words; never "abort"."""
        if self.turn.completion.finish_reason == "length":
            return "length"
        return "tool_calls" if self.turn.reply.tool_calls else "stop"
