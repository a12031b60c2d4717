"""The errors that this package raises deliberately, one type per boundary.

    ArealAgentsError
    ├── ConfigError          a configuration that cannot run: names the key and what to write instead
    ├── DataError            a data set that is missing, empty or malformed
    ├── AgentError           an agent that does not import, raised, or overran its time
    ├── RenderingError       a conversation that the model's template cannot express
    │   └── PromptTooLong        it has more tokens than its limit
    ├── RequestError         a client's request that is refused (carries the HTTP status and code)
    ├── EngineError          an inference engine that misbehaves
    │   ├── EngineUnavailable    it does not answer, or not in time
    │   └── EngineRejected       it refused the request as malformed
    ├── StoreError           the store is unusable, foreign, or a state transition is not allowed
    │   ├── NotFound             there is no such episode, group or completion (store/errors.py)
    │   └── Conflict             a state that the request contradicts; NoTurn: no call was recorded
    └── TrainingError        a batch or checkpoint that cannot be trained on
        └── TeacherError         a teacher's engine that cannot be learned from; the weights are as they were

Programming mistakes stay ValueError, TypeError and AssertionError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MOST_SHOWN = 200  # characters of a client's value in a message
_LONGEST_MESSAGE = 1_000  # characters of a message that a client gets and a log keeps


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


class PromptTooLong(RenderingError):
    """A prompt with more tokens than its limit, detected before all of it was encoded.

    Args:
        at_least: a lower bound on the number of its tokens, above the limit.
    """

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the prompt has at least {at_least} tokens")
        self.at_least = at_least


class RequestError(ArealAgentsError):
    """A client's request that is refused.

    Args:
        message: what was got and what was expected, in the client's terms; cut where it is very long.
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
        message = _cut(message, _LONGEST_MESSAGE)
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = None if param is None else _cut(param, _MOST_SHOWN)
        self.retry_after_s = retry_after_s
        self.details = dict(details or {})


class EngineError(ArealAgentsError):
    """An inference engine that misbehaves: an invalid answer, a wrong version, half a response."""


class EngineUnavailable(EngineError):
    """The engine does not answer, or not in time."""


class EngineRejected(EngineError):
    """The engine refused the request as malformed (HTTP 400)."""


class StoreError(ArealAgentsError):
    """The store is unusable, was written by another schema, or a state transition is not allowed."""


class TrainingError(ArealAgentsError):
    """A batch or a checkpoint that cannot be trained on; the message names the group or the file."""


class TeacherError(TrainingError):
    """A teacher's engine did not answer, or not as a teacher of this policy.

    It is raised on every rank before the first optimizer step of a batch: the weights are as they were.
    """


def shown(value: Any) -> str:
    """A value of a client's JSON for a message: as `repr` writes it, cut after 200 characters.

    The work is bounded too, since a value may be as large as a whole request.
    """
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > _MOST_SHOWN:
            break
    return _cut(text, _MOST_SHOWN)


def _pieces(value: Any) -> Iterator[str]:
    """`repr(value)` piece by piece, of long texts only the beginning."""
    if isinstance(value, str):
        yield repr(value[:_MOST_SHOWN])
    elif isinstance(value, list):
        yield "["
        for index, item in enumerate(value):
            yield ", " if index else ""
            yield from _pieces(item)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for index, (name, item) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _pieces(name)
            yield ": "
            yield from _pieces(item)
        yield "}"
    else:
        yield repr(value)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
