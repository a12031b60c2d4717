"""Explains each reason for a branch, and its fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal_agents.core.trajectory import Fork, ForkReason


@dataclass(frozen=True, slots=True)
class Explanation:
    """A finding in one sentence for the user, and its fix; `is_normal` if there is nothing to fix."""

    sentence: str
    fix: str
    is_normal: bool = False


EXPLANATIONS: Mapping[ForkReason, Explanation] = {
    "new conversation": Explanation(
        "The call shares no message with a recorded turn: it is a sub-agent or a second conversation.",
        "Nothing to fix. To exclude such calls from training, send them with the header X-Episode-Label and "
        "name the label in `algorithm.exclude_labels`.",
        is_normal=True,
    ),
    "resampled": Explanation(
        "The same prompt was sampled again.",
        "Nothing to fix: each sample is a branch of its own.",
        is_normal=True,
    ),
    "edited": Explanation(
        "A message differs from the recorded one.",
        "Send earlier messages back unchanged, especially the model's own: do not strip, shorten or "
        "rewrite them, and insert nothing between them. Where the framework does that by itself (smolagents "
        "writes calls as text), nothing is wrong: each such call is trained as a branch of its own, only its "
        "prompt is computed anew.",
    ),
    "reordered": Explanation(
        "The recorded messages were sent back in another order.",
        "Only append to the history; do not sort or move its messages. Where the framework does that by "
        "itself (camel-ai), each such call is trained as a branch of its own.",
    ),
    "template strips reasoning": Explanation(
        "The chat template drops earlier reasoning at a new user message, so recorded tokens cannot be "
        "continued.",
        "Set `proxy.reasoning: keep`, and serve the trained model in the same way; or accept one branch per "
        "user message.",
    ),
    "template cannot extend": Explanation(
        "The model's chat template rewrites earlier parts of the prompt.",
        "Use a model whose template only appends, or accept a branch for each such call.",
    ),
    "tools changed": Explanation(
        "The call offers other tools than the previous call, and tools are at the beginning of the prompt.",
        "Offer the same tools, in the same order, in every call of a conversation.",
    ),
    "context compacted": Explanation(
        "Earlier messages were dropped or replaced by a summary.",
        "This is expected if the agent compacts its context; otherwise raise the length at which it does.",
    ),
    "unknown": Explanation(
        "The conversation resembles a recorded one, but the difference could not be located.",
        "Compare the messages of both turns, which GET /episodes/{id} shows.",
    ),
}

_HEAD_CHANGED = Explanation(
    "The first message changed, so no recorded tokens could be continued: another agent took over, or the "
    "message contains something that changes, such as the time.",
    "Keep the system message unchanged within a conversation. A hand-off to another agent needs no fix.",
)


def explanation_of(fork: Fork) -> Explanation:
    """Return the explanation of one fork."""
    if fork.reason == "edited" and fork.diverged_at == 0:
        return _HEAD_CHANGED
    return EXPLANATIONS[fork.reason]
