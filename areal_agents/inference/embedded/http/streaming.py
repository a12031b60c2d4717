"""Streams a request as server-sent events in SGLang's two forms: all tokens so far, or only the new ones."""

from __future__ import annotations

import time
from typing import Any

import orjson

from areal_agents.inference.embedded.http.protocol import GenerationRequest, answer, text_of
from areal_agents.inference.embedded.scheduling.request import Request, RequestProgress
from areal_agents.inference.embedded.scheduling.text import Detokenizer, TextStream

DONE = b"data: [DONE]\n\n"


class EventWriter:
    """Writes the chunks of one request: with `incremental` only the new tokens, else all tokens so far."""

    def __init__(
        self, request: Request, generation: GenerationRequest, detokenizer: Detokenizer, *, incremental: bool
    ) -> None:
        self._request = request
        self._generation = generation
        self._detokenizer = detokenizer
        self._incremental = incremental
        self._pieces = TextStream(detokenizer, skip_special_tokens=generation.skip_special_tokens)
        self._started = time.perf_counter()
        self._sent = 0

    def step(self) -> bytes | None:
        """Return a chunk of a running request; None if it has too few new tokens for one.

        As with SGLang, the first chunk does not wait for `stream_interval` tokens.
        """
        progress = self._request.progress
        if progress is None or progress.finish is not None:
            return None
        new = len(progress.ids) - self._sent
        if new < (self._generation.stream_interval if self._sent else 1):
            return None
        if self._incremental:
            return self._chunk(progress, self._pieces.feed(progress.ids))
        return self._chunk(progress, text_of(progress, self._generation, self._detokenizer))

    def last(self) -> bytes:
        """Return the chunk of a finished request, with its finish reason and weight version."""
        progress = self._request.progress
        assert progress is not None and progress.finish is not None, "a finished request was published"
        text = text_of(progress, self._generation, self._detokenizer)
        return self._chunk(progress, text[self._pieces.length :])

    def _chunk(self, progress: RequestProgress, text: str) -> bytes:
        chunk = answer(
            self._request,
            self._generation,
            progress,
            text,
            latency_s=time.perf_counter() - self._started,
            first=self._sent if self._incremental else 0,
        )
        self._sent = len(progress.ids)
        return event(chunk)


def event(content: Any) -> bytes:
    """Format one server-sent event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"
