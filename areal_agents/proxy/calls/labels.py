"""The label of a call within an episode, by which training can leave parts of an agent out.

A label is what the header X-Episode-Label says; else the id that a coding agent gives its sub-agent; else a
session other than the first one that was seen in the episode.
"""

from __future__ import annotations

from collections.abc import Mapping

LABEL_HEADER = "x-episode-label"
_AGENT_HEADER = "x-claude-code-agent-id"
_SESSION_HEADER = "session-id"
_LONGEST = 200


def label_of(headers: Mapping[str, str], main_session: str) -> str:
    """The label of a call; "" for the agent itself."""
    if label := headers.get(LABEL_HEADER):
        return label[:_LONGEST]
    if agent := headers.get(_AGENT_HEADER):
        return f"sub-agent/{agent}"[:_LONGEST]
    session = headers.get(_SESSION_HEADER, "")
    if session and main_session and session != main_session:
        return f"sub-agent/{session}"[:_LONGEST]
    return ""


def session_of(headers: Mapping[str, str]) -> str:
    """The session that a call names, "" for none."""
    return headers.get(_SESSION_HEADER, "")
