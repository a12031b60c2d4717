"""Reads what the headers of a call say about it: its label, its session, and the task and the user of its
episode.

With a label, training can exclude parts of an agent.

The label is the header X-Episode-Label; else the id that a coding agent gives its sub-agent; else the session
header, if it differs from the first one in the episode.
"""

from __future__ import annotations

from collections.abc import Mapping

from areal_agents.core.rollout import Task
from areal_agents.errors import RequestError

LABEL_HEADER = "x-episode-label"
TASK_HEADER = "x-episode-task"
USER_HEADER = "x-episode-user"
USER = "user"  # the key of the user's name in the metadata of an episode
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


def task_of(headers: Mapping[str, str]) -> Task | None:
    """Return the task that the header X-Episode-Task names, None without one.

    Implicit episodes of one task form a group when they are trained on.

    Raises:
        RequestError: 400 if the name is too long.
    """
    name = headers.get(TASK_HEADER, "").strip()
    if len(name) > _LONGEST:
        raise RequestError(f"X-Episode-Task may have at most {_LONGEST} characters, got {len(name)}")
    return Task(name, {}) if name else None


def user_of(headers: Mapping[str, str]) -> str:
    """Return the user whom the header X-Episode-User names, "" without one.

    The episodes of a user can be listed and deleted by this name.

    Raises:
        RequestError: 400 if the name is too long.
    """
    name = headers.get(USER_HEADER, "").strip()
    if len(name) > _LONGEST:
        raise RequestError(f"X-Episode-User may have at most {_LONGEST} characters, got {len(name)}")
    return name


def session_of(headers: Mapping[str, str]) -> str:
    """Return the session header of a call, "" without one."""
    return headers.get(_SESSION_HEADER, "")
