"""The scheduler's record of a generation, from submission to its last token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_agents.core.completion import FinishReason, SamplingParams, TokenIds

if TYPE_CHECKING:
    from areal_agents.inference.embedded.scheduling.grammar import TokenMatcher

RankedTokens = list[tuple[float, int]]  # (logprob, token id), best first


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a generation ended; `matched` is the stop id or string, `message` says why it was aborted."""

    reason: FinishReason
    matched: int | str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens from `start` on were sampled by `version`, until the next span."""

    version: str
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class RequestProgress:
    """A snapshot of a request: the sampled ids and logprobs [N], and the best tokens of each where they were
    requested. `version` is the one that samples now, `spans` are those until now."""

    ids: np.ndarray
    logprobs: np.ndarray
    ranked: list[RankedTokens]
    version: str
    spans: tuple[Span, ...]
    finish: Finish | None

    def version_spans(self) -> list[dict[str, Any]]:
        """Spans in wire form; they cover `ids` exactly, and an empty output has one empty span."""
        ends = [span.start for span in self.spans[1:]] + [len(self.ids)]
        covered = [(span, end) for span, end in zip(self.spans, ends, strict=True) if end > span.start]
        return [
            {"version": span.version, "start": span.start, "end": end}
            for span, end in covered or [(self.spans[0], 0)]
        ]


@dataclass(slots=True, eq=False)
class Request:
    """A generation that the scheduler runs. Only the scheduler's thread changes it.

    `output_ids` and `output_logprobs` are complete when `finish` is set, and are current after a retraction;
    while the request runs, its tokens are in the slot table. `notify` is called with the request when it has
    finished, and after every step if `streaming`; `progress` is then what other threads may read.
    """

    rid: str
    prompt: TokenIds  # [P]
    sampling: SamplingParams
    seed: int
    notify: Callable[[Request], None]
    input_logprobs_from: int = -1  # prompt logprobs are requested after this position; -1: none
    input_top: int = 0  # number of most likely tokens requested at each of these positions
    prompt_only: bool = False  # nothing is sampled: the request ends when its prompt has been computed
    streaming: bool = False
    matcher: TokenMatcher | None = None  # constrains the output
    adapter: str = ""  # name of the adapter on the wire; "": the base model
    model: int = 0  # the number of the model that computes it, see Scheduler
    output_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    output_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    output_ranked: list[RankedTokens] = field(default_factory=list)
    input_logprobs: np.ndarray | None = None  # [P], NaN where not requested or not yet computed
    input_top_ids: np.ndarray | None = None  # [P, input_top], likewise
    input_top_logprobs: np.ndarray | None = None  # [P, input_top], likewise
    prompt_scored: bool = False
    spans: list[Span] = field(default_factory=list)
    cached_tokens: int = 0
    retractions: int = 0
    finish: Finish | None = None
    progress: RequestProgress | None = None

    def publish(self) -> None:
        """Publish a consistent snapshot of the progress, and notify."""
        ranked = self.output_ranked[: len(self.output_ids)]
        spans = tuple(self.spans)
        self.progress = RequestProgress(
            self.output_ids, self.output_logprobs, ranked, spans[-1].version, spans, self.finish
        )
        self.notify(self)

    def mark_version(self, version: str, sampled: int) -> None:
        """The next token, number `sampled`, will be sampled by `version`."""
        if self.spans and self.spans[-1].start == sampled:
            self.spans.pop()
        if not self.spans or self.spans[-1].version != version:
            self.spans.append(Span(version, sampled))
