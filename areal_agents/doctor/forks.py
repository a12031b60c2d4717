"""Explains each reason for a branch in a sentence, with what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal_agents.core.trajectory import Fork, ForkReason


@dataclass(frozen=True, slots=True)
class Explanation:
    """A reason for the user: what happened, and the fix; `is_normal` where nothing needs one."""

    sentence: str
    fix: str
    is_normal: bool = False


EXPLANATIONS: Mapping[ForkReason, Explanation] = {
    "new conversation": Explanation(
        "It shares no message with what was recorded: a sub-agent, or a second conversation.",
        "Nothing to fix. To leave such calls out of training, send the header X-Episode-Label with them and "
        "name the label in `algorithm.exclude_labels`.",
        is_normal=True,
    ),
    "resampled": Explanation(
        "The same prompt was sampled again.",
        "Nothing to fix: each sample is a branch of its own.",
        is_normal=True,
    ),
    "edited": Explanation(
        "A message came back other than it was recorded.",
        "Send earlier messages back as they were, above all the model's own: do not strip, shorten or "
        "rewrite them, and put nothing in between.",
    ),
    "reordered": Explanation(
        "The recorded messages came back in another order.",
        "Only append to the history; do not sort or move its messages.",
    ),
    "template strips reasoning": Explanation(
        "The chat template drops earlier reasoning at a new user message, so the tokens cannot continue.",
        "Set `proxy.reasoning: keep`, and serve the trained model so as well; or accept one branch "
        "per user message.",
    ),
    "template cannot extend": Explanation(
        "The model's chat template rewrites earlier parts of the prompt.",
        "Take a model whose template only appends, or accept a branch for each such call.",
    ),
    "tools changed": Explanation(
        "The call offers other tools than the call before it, and tools are at the beginning of the prompt.",
        "Offer the same tools, in the same order, in every call of a conversation.",
    ),
    "context compacted": Explanation(
        "Earlier messages were dropped or replaced by a summary.",
        "Expected of an agent that compacts its context; else raise the length at which it does.",
    ),
    "unknown": Explanation(
        "The conversation is like a recorded one, but where they part could not be told.",
        "Compare the messages of both turns: GET /episodes/{id} shows them.",
    ),
}

_HEAD_CHANGED = Explanation(
    "The first message changed, so nothing after it could continue: another agent took over, or it holds "
    "something that changes, such as the time.",
    "Keep the system message as it is within a conversation. A hand-off to another agent needs no fix.",
)


def explanation_of(fork: Fork) -> Explanation:
    """What to tell the user about one fork."""
    if fork.reason == "edited" and fork.diverged_at == 0:
        return _HEAD_CHANGED
    return EXPLANATIONS[fork.reason]
