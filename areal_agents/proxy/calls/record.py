"""The record of a model call that has ended, for the log, the metrics and the doctor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from areal_agents.core.trajectory import Turn
from areal_agents.store import EpisodeRow


@dataclass(slots=True)
class CallRecord:
    """One model call that has ended.

    Attributes:
        endpoint: path of the request, without an episode's key.
        dialect: name of the API.
        client: the User-Agent header.
        traceparent: the header of that name.
        model: name of the model that was requested.
        streamed: whether the answer was requested as a stream.
        retry_count: number of earlier attempts, according to the client.
        repeated: whether the call was answered with the sample of an earlier attempt.
        label: label of the caller within the episode.
        ignored: request fields that have no effect.
        episode: the episode; None if the call failed before it was found.
        turns: the recorded turns of the answer; this and the counts of tokens are empty after a failure.
        prompt_tokens: length of the whole prompt.
        reused_tokens: number of prompt tokens that are recorded ids of earlier turns.
        upstream: name of the model if another server answered, "" for the policy.
        status: HTTP status of the answer.
        code: code of the error, "" for a success.
        message: message of the error.
        duration_s: time from the request to the end of the answer.
        first_piece_s: time from the request to the first piece of a streamed answer; None without a piece.
    """

    endpoint: str
    dialect: str
    client: str = ""
    traceparent: str = ""
    model: str = ""
    streamed: bool = False
    retry_count: int = 0
    repeated: bool = False
    label: str = ""
    ignored: tuple[str, ...] = ()
    episode: EpisodeRow | None = None
    turns: tuple[Turn, ...] = ()
    prompt_tokens: int = 0
    reused_tokens: int = 0
    upstream: str = ""
    status: int = 200
    code: str = ""
    message: str = ""
    duration_s: float = 0.0
    first_piece_s: float | None = None

    @property
    def episode_id(self) -> str:
        """The id of the episode, "" if the call failed before it was found."""
        return "" if self.episode is None else self.episode.id

    @property
    def split(self) -> str:
        """The split of the episode, "" if the call failed before it was found."""
        return "" if self.episode is None else self.episode.split


Observer = Callable[[CallRecord], None]
