"""The errors by which a caller distinguishes why the store refuses."""

from __future__ import annotations

from areal_agents.errors import StoreError


class NotFound(StoreError):
    """No row of that id."""


class Conflict(StoreError):
    """A state transition that is not allowed: a sealed episode, a leased group, a taken place."""


class SessionTaken(Conflict):
    """Another open episode already has the session name of the episode to be opened."""


class NoTurn(Conflict):
    """An episode that was to be finished with at least one model call has none."""
