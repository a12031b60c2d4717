"""The record of a model call that has ended, for the log, the metrics and the doctor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from areal_agents.core.trajectory import Turn


@dataclass(slots=True)
class CallRecord:
    """One model call.

    Attributes:
        endpoint: its path, without an episode's key.
        dialect: the API that it speaks.
        client: the User-Agent.
        streamed: whether the answer was requested as a stream.
        retry_count: earlier attempts that the client tells of.
        repeated: whether it was answered with the sample of an earlier attempt.
        label: who called within the episode.
        ignored: request fields that have no effect.
        episode_id: "" where the call did not get that far, as are the next fields.
        split: of the episode.
        turns: that were recorded and answered with.
        prompt_tokens: of the whole prompt.
        reused_tokens: prompt tokens that are recorded ids of earlier turns.
        upstream: the name of the model that another server answered for, "" for the policy.
        status: HTTP status of the answer.
        code: of the refusal, "" for a success.
        message: of the refusal.
        duration_s: from the request to the end of the answer.
        first_piece_s: to the first piece of a streamed answer; None if there was none.
    """

    endpoint: str
    dialect: str
    client: str = ""
    streamed: bool = False
    retry_count: int = 0
    repeated: bool = False
    label: str = ""
    ignored: tuple[str, ...] = ()
    episode_id: str = ""
    split: str = ""
    turns: tuple[Turn, ...] = ()
    prompt_tokens: int = 0
    reused_tokens: int = 0
    upstream: str = ""
    status: int = 200
    code: str = ""
    message: str = ""
    duration_s: float = 0.0
    first_piece_s: float | None = None


Observer = Callable[[CallRecord], None]
