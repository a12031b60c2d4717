"""What every dialect turns a request into, and what it builds its answer from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from areal_agents.core.messages import Message, history_digests
from areal_agents.core.trajectory import Turn


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
    logit_bias: bool | None = None  # whether any bias is asked for
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One call of the model, whatever its dialect.

    Attributes:
        messages: at least one.
        tools: OpenAI function tools as they came, in order.
        tools_id: digest of `tools`.
        wish: the sampling that is asked for.
        calls: "none": the reply's tool calls are withheld from the client.
        parallel_calls: False: only the first tool call of the reply is handed out.
        label: who calls within the episode, for example a sub-agent.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    tools_id: str
    wish: SamplingWish
    calls: Literal["auto", "none"] = "auto"
    parallel_calls: bool = True
    label: str = ""

    def digest(self) -> bytes:
        """The same for two calls with the same conversation and tools."""
        return history_digests(self.messages, self.tools_id)[-1]


@dataclass(frozen=True, slots=True)
class CompletedTurn:
    """A recorded turn, with what only the answer needs.

    Attributes:
        prompt_tokens: length of the whole prompt.
        created_at: seconds since the epoch.
    """

    turn: Turn
    prompt_tokens: int
    created_at: float

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """Why the reply ended, in OpenAI's words; never "abort"."""
        if self.turn.completion.finish_reason == "length":
            return "length"
        return "tool_calls" if self.turn.reply.tool_calls else "stop"
