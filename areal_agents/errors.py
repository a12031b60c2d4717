"""Every error that this package raises on purpose, one type per boundary.

    ArealAgentsError
    ├── ConfigError          a configuration that cannot run: names the key and what to write instead
    ├── DataError            a data set that is missing, empty or malformed
    ├── AgentError           an agent that does not import, raised, or overran its time
    ├── RenderingError       a conversation that the model's template cannot express
    ├── RequestError         a client's request that is refused (carries the HTTP status and code)
    ├── EngineError          an inference engine that misbehaves
    │   ├── EngineUnavailable    it does not answer, or not in time
    │   └── EngineRejected       it refused the request as malformed
    ├── StoreError           the store is unusable, foreign, or a state transition is not allowed
    │   ├── NotFound             there is no such episode, group or completion (store/errors.py)
    │   └── Conflict             a state that the request contradicts; NoTurn: no call was recorded
    └── TrainingError        a batch or checkpoint that cannot be trained on

Programming mistakes stay ValueError, TypeError and AssertionError.
"""

from __future__ import annotations

from collections.abc import Mapping


class ArealAgentsError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(ArealAgentsError):
    """A configuration that cannot run; the message names the key and what to write instead."""


class DataError(ArealAgentsError):
    """A data set that is missing, empty or malformed."""


class AgentError(ArealAgentsError):
    """An agent that does not import, raised, or overran its time."""


class RenderingError(ArealAgentsError):
    """A conversation that the model's template cannot express."""


class RequestError(ArealAgentsError):
    """A client's request that is refused.

    Args:
        message: what was got and what was expected, in the client's terms.
        status: the HTTP status of the answer.
        code: a stable machine-readable word, for example ``context_length_exceeded``.
        param: the request field at fault, where there is one.
        retry_after_s: seconds after which the same request may succeed, where that is known.
        details: numbers that another form of the message needs, for example the limit that was exceeded.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        retry_after_s: float | None = None,
        details: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.details = dict(details or {})


class EngineError(ArealAgentsError):
    """An inference engine that misbehaves: garbage, a wrong version, half a response."""


class EngineUnavailable(EngineError):
    """The engine does not answer, or not in time."""


class EngineRejected(EngineError):
    """The engine refused the request as malformed (HTTP 400)."""


class StoreError(ArealAgentsError):
    """The store is unusable, was written by another schema, or a state transition is not allowed."""


class TrainingError(ArealAgentsError):
    """A batch or a checkpoint that cannot be trained on; the message names the group or the file."""
