"""The errors that this package raises deliberately, one type per boundary.

    ArealAgentsError
    ├── ConfigError          a configuration cannot be used: names the key and what to write instead
    ├── DataError            a data set is missing, empty or malformed
    ├── AgentError           an agent cannot be imported, raised an exception, or exceeded its time limit
    │   ├── AgentLost            what ran the agent was lost, such as the node of its job
    │   └── AgentNotStarted      the agent has not begun, for a reason that is not its own
    ├── RewardError          a reward function failed, or gave no valid reward
    ├── TaskEnvironmentError an environment cannot be opened, or failed while it was played
    ├── SandboxError         a sandbox cannot be started, or cannot do what was asked
    │   └── SandboxUnavailable   this machine lacks what the isolation needs; says what to do
    ├── RenderingError       the model's template cannot express a conversation
    │   └── PromptTooLong        the prompt has more tokens than its limit
    ├── RequestError         a client's request is refused (carries the HTTP status and code)
    ├── EngineError          an inference engine gave an invalid answer
    │   ├── EngineUnavailable    the engine does not answer, or not in time
    │   └── EngineRejected       the engine refused the request as malformed
    ├── StoreError           the store is unusable or has another schema, or a state transition is not allowed
    │   ├── NotFound             there is no such episode, group or completion (store/errors.py)
    │   └── Conflict             the request contradicts the stored state; NoTurn: no call was recorded
    ├── RunFailed            a run that was started from Python has failed; has the cause as its message
    └── TrainingError        a batch or a checkpoint cannot be trained on
        ├── AdapterError         trainer.lora does not fit the model
        └── TeacherError         a teacher's engine gave no usable answer; the weights are unchanged

Programming mistakes stay ValueError, TypeError and AssertionError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MOST_SHOWN = 200  # the most characters of a client's value in a message
_LONGEST_MESSAGE = 1_000  # the most characters of a message that a client gets and a log keeps


class ArealAgentsError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(ArealAgentsError):
    """A configuration cannot be used; the message names the key and what to write instead."""


class DataError(ArealAgentsError):
    """A data set is missing, empty or malformed."""


class AgentError(ArealAgentsError):
    """An agent cannot be imported, raised an exception, or exceeded its time limit."""


class AgentLost(AgentError):
    """What ran the agent was lost; the agent and the policy are not the cause."""


class AgentNotStarted(AgentError):
    """The agent has not begun, for a reason that is not its own, such as a full queue."""


class RewardError(ArealAgentsError):
    """A reward function failed, took too long, or gave something that is no reward."""


class TaskEnvironmentError(ArealAgentsError):
    """An environment cannot be opened, has no such option, or failed while it was played."""


class SandboxError(ArealAgentsError):
    """A sandbox cannot be started, has ended, or cannot do what was asked of it."""


class SandboxUnavailable(SandboxError):
    """This machine lacks what an isolation needs; the message says what to install or to set."""


class RunFailed(ArealAgentsError):
    """A run that was started from Python has failed or was stopped; the message has the cause."""


class RenderingError(ArealAgentsError):
    """The model's template cannot express a conversation."""


class PromptTooLong(RenderingError):
    """A prompt has more tokens than its limit; this was detected before all of it was encoded.

    Args:
        at_least: a lower bound on the number of the prompt's tokens; it is above the limit.
    """

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the prompt has at least {at_least} tokens")
        self.at_least = at_least


class RequestError(ArealAgentsError):
    """A client's request is refused.

    Args:
        message: what was got and what was expected, in the client's terms; cut if it is very long.
        status: the HTTP status of the response.
        code: a stable machine-readable code, for example ``context_length_exceeded``.
        param: the invalid field of the request, if there is one.
        retry_after_s: seconds after which the same request may succeed, if that is known.
        details: values that a dialect's form of the error needs, for example the limit that was exceeded.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        retry_after_s: float | None = None,
        details: Mapping[str, Any] | None = None,
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
    """An inference engine gave an invalid answer: malformed, of a wrong version, or incomplete."""


class EngineUnavailable(EngineError):
    """The engine does not answer, or not in time."""


class EngineRejected(EngineError):
    """The engine refused the request as malformed (HTTP 400)."""


class StoreError(ArealAgentsError):
    """The store is unusable or has another schema, or a state transition is not allowed."""


class StorageError(ArealAgentsError):
    """An object storage could not be read or written, or a version in it is not what was published."""


class TrainingError(ArealAgentsError):
    """A batch or a checkpoint cannot be trained on; the message names the group or the file."""


class AdapterError(TrainingError):
    """The adapter that `trainer.lora` describes does not fit the model, or a package for it is missing."""


class TeacherError(TrainingError):
    """A teacher's engine did not answer, or its answer does not fit this policy.

    It is raised on every rank before the first optimizer step of a batch, so the weights are unchanged.
    """


def shown(value: Any) -> str:
    """Return a value of a client's JSON for a message: as `repr` writes it, cut after 200 characters.

    The work is bounded too, because a value may be as large as a whole request.
    """
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > _MOST_SHOWN:
            break
    return _cut(text, _MOST_SHOWN)


def _pieces(value: Any) -> Iterator[str]:
    """Yield `repr(value)` piece by piece, with only the beginning of long strings."""
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
