"""A recorded model call, and the path of calls that leads to it.

Each turn stores only the tokens it adds; a root-to-leaf path is exactly what the model read and
sampled. A child's prompt is its parent's prompt, plus its parent's completion, plus
`new_prompt_ids`; this holds by construction, because nothing else is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from areal_agents.core.completion import (
    Completion,
    Logprobs,
    Routing,
    SamplingParams,
    TokenIds,
    Versions,
    as_token_ids,
)
from areal_agents.core.messages import Message

ForkReason = Literal[
    "new conversation",
    "resampled",
    "edited",
    "reordered",
    "template strips reasoning",
    "template cannot extend",
    "tools changed",
    "context compacted",
    "unknown",
]


@dataclass(frozen=True, slots=True)
class Fork:
    """Why a turn is a new root although the episode already had turns.

    Attributes:
        turn: id of the recorded turn with the longest common history; None if nothing is shared.
        reason: why its tokens could not be continued.
        diverged_at: index of the first message that is not shared.
    """

    turn: str | None
    reason: ForkReason
    diverged_at: int

    def __post_init__(self) -> None:
        if self.reason not in get_args(ForkReason):
            raise ValueError(f"reason must be one of {get_args(ForkReason)}, got {self.reason!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One model call: what was added to the prompt, and what was sampled.

    Attributes:
        id: unique; also the id of the completion that the client received.
        parent: id of the turn whose tokens this one continues, None for a root.
        new_messages: the messages added since the parent's reply.
        new_prompt_ids: [P] prompt tokens added since the parent's completion (all, for a root).
        completion: what the policy sampled.
        reply: the completion, parsed, as the client got it.
        sampling: the parameters it was sampled with.
        tools_id: digest of the tools that were offered.
        label: the caller, for example a sub-agent; "" for the main agent.
        session: the session header of the call, "" for none.
        forked_from: set on a root that is not the first conversation of its episode.
        constrained: whether it was sampled under a grammar or with a lifted pin (not trained by default).
        overrides: sampling fields of the request that were replaced by the pinned values.
        has_instructions: the first message is the `instructions` of a Responses call, which a response that
            continues this one does not inherit.
        discarded: why the turn is not trained: the client never received it, or the file that it was
            imported from says so; "" for nearly all.
        recorded_before: how many turns of the episode were recorded when this turn's call began; None in
            episodes of earlier releases, which did not record it.
        special_tokens_as_text: the number of special tokens in the new messages, and in the tools of a root,
            that the prompt contains as plain text.
        volatile_as_first_seen: the number of texts of the conversation that `proxy.volatile` names and that
            the client had changed: the prompt contains them as they were first recorded.
    """

    id: str
    parent: str | None
    new_messages: tuple[Message, ...]
    new_prompt_ids: TokenIds
    completion: Completion
    reply: Message
    sampling: SamplingParams
    tools_id: str = ""
    label: str = ""
    session: str = ""
    forked_from: Fork | None = None
    constrained: bool = False
    overrides: tuple[str, ...] = ()
    has_instructions: bool = False
    discarded: str = ""
    recorded_before: int | None = None
    special_tokens_as_text: int = 0
    volatile_as_first_seen: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "new_prompt_ids", as_token_ids(self.new_prompt_ids))
        if not self.id:
            raise ValueError("a turn must have an id, got an empty string")
        if not self.new_messages:
            raise ValueError(f"turn {self.id} must add at least one message to its conversation")
        if self.parent is None and not len(self.new_prompt_ids):
            raise ValueError(f"turn {self.id} is a root, so its prompt must have at least one token")
        if self.recorded_before is not None and self.recorded_before < 0:
            raise ValueError(
                f"turn {self.id}: recorded_before must be at least 0, got {self.recorded_before}"
            )
        if self.parent is not None and self.forked_from is not None:
            raise ValueError(f"turn {self.id} continues {self.parent}, so it cannot also be a fork")
        routed, added = self.completion.routed_experts, len(self.new_prompt_ids) + len(self.completion)
        if routed is not None and len(routed) > added - (self.parent is None):
            raise ValueError(
                f"turn {self.id} adds {added} tokens, so it can have the routed experts of at most "
                f"{added - (self.parent is None)}: of all that it adds except the last, and for a child of "
                f"the token before them; got those of {len(routed)}"
            )
        if self.reply.role != "assistant":
            raise ValueError(
                f"the reply of a turn must be an assistant message, got role {self.reply.role!r}"
            )


@dataclass(frozen=True, slots=True)
class Continuation:
    """The point at which a conversation continues.

    Attributes:
        parent: the recorded turn whose reply it continues, None for a new root.
        new_messages: the messages after that reply (all of them for a new root).
        fork: why it is a new root, None if it has a parent or the episode was empty.
    """

    parent: Turn | None
    new_messages: tuple[Message, ...]
    fork: Fork | None


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One root-to-leaf path, and its tokens in the order in which the model saw them."""

    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError("a trajectory must have at least one turn, got none")
        for parent, turn in zip((None, *self.turns), self.turns, strict=False):
            if turn.parent != (parent.id if parent else None):
                follows = parent.id if parent else None
                raise ValueError(f"turn {turn.id} has the parent {turn.parent}, but follows {follows}")

    @property
    def token_ids(self) -> TokenIds:
        """[L] prompt and sampled ids."""
        return self._concatenate(lambda t: t.new_prompt_ids, lambda t: t.completion.token_ids, np.int32)

    @property
    def sampled_mask(self) -> npt.NDArray[np.bool_]:
        """[L] True where the token was sampled."""
        return self._concatenate(_zeros_prompt, lambda t: np.ones(len(t.completion)), np.bool_)

    @property
    def behavior_logprobs(self) -> Logprobs:
        """[L] behavior logprobs, 0 at prompt tokens, NaN at imported ones."""

        def of_completion(turn: Turn) -> npt.NDArray[np.float32]:
            known = turn.completion.logprobs
            return np.full(len(turn.completion), np.nan, np.float32) if known is None else known

        return self._concatenate(_zeros_prompt, of_completion, np.float32)

    @property
    def versions(self) -> Versions:
        """[L] policy versions, -1 at prompt tokens and at imported ones."""
        return self._concatenate(lambda t: _zeros_prompt(t) - 1, lambda t: t.completion.versions, np.int32)

    @property
    def temperatures(self) -> npt.NDArray[np.float32]:
        """[L] sampling temperature of each sampled token, 1 at prompt tokens."""
        return self._concatenate(
            lambda t: _zeros_prompt(t) + 1,
            lambda t: np.full(len(t.completion), t.sampling.temperature),
            np.float32,
        )

    @property
    def routed_experts(self) -> Routing | None:
        """[L, layers, k] the experts that processed each token; None if no turn recorded any.

        They are -1 if unknown, as for the last token of the path. A turn records those of the tokens that it
        adds except the last, and of the token before them. ValueError if the turns were sampled from models
        of different shapes.
        """
        shapes = {r.shape[1:] for turn in self.turns if (r := turn.completion.routed_experts) is not None}
        if not shapes:
            return None
        if len(shapes) > 1:
            raise ValueError(
                "the routed experts of an episode must have one shape [layers, k], got "
                f"{', '.join(map(str, sorted(shapes)))}"
            )
        ends = np.cumsum([len(turn.new_prompt_ids) + len(turn.completion) for turn in self.turns])
        routing = np.full((int(ends[-1]), *shapes.pop()), -1, np.int16)
        for turn, end in zip(self.turns, ends.tolist(), strict=True):
            known = turn.completion.routed_experts
            if known is not None:
                routing[end - 1 - len(known) : end - 1] = known
        return routing

    @property
    def turn_index(self) -> npt.NDArray[np.int32]:
        """[L] index into `turns` of the turn that added each token."""
        sizes = [len(t.new_prompt_ids) + len(t.completion) for t in self.turns]
        return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)

    def _concatenate(self, prompt, completion, dtype):
        parts = [part(turn) for turn in self.turns for part in (prompt, completion)]
        return np.concatenate(parts).astype(dtype)


def _zeros_prompt(turn: Turn) -> npt.NDArray[np.float64]:
    return np.zeros(len(turn.new_prompt_ids))
