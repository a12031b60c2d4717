"""Derives the label of a call within an episode, with which training can exclude parts of an agent.

The label is the header X-Episode-Label; else the id that a coding agent gives its sub-agent; else the session
header, if it differs from the first one in the episode.
"""

from __future__ import annotations

from collections.abc import Mapping

LABEL_HEADER = "x-episode-label"
_AGENT_HEADER = "x-claude-code-agent-id"
_SESSION_HEADER = "session-id"
_LONGEST = 200


def label_of(headers: Mapping[str, str], main_session: str) -> str:
    """Return the label of a call, "" for the main agent."""
    if label := headers.get(LABEL_HEADER):
        return label[:_LONGEST]
    if agent := headers.get(_AGENT_HEADER):
        return f"sub-agent/{agent}"[:_LONGEST]
    session = headers.get(_SESSION_HEADER, "")
    if session and main_session and session != main_session:
        return f"sub-agent/{session}"[:_LONGEST]
    return ""


def session_of(headers: Mapping[str, str]) -> str:
    """Return the session header of a call, "" without one."""
    return headers.get(_SESSION_HEADER, "")
