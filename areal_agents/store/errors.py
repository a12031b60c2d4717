"""Errors of the store that callers handle differently."""

from __future__ import annotations

from areal_agents.errors import StoreError


class NotFound(StoreError):
    """No row has the given id."""


class Conflict(StoreError):
    """A state transition is not allowed: for example, the episode is sealed or the group is leased."""


class SessionTaken(Conflict):
    """Another open episode already has the session name of the new episode."""


class OwnedElsewhere(Conflict):
    """Another proxy has taken over the open episode, so this one must not write to it any more."""


class NoTurn(Conflict):
    """An episode cannot be finished, because it has no model call and at least one is required."""
