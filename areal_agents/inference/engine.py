"""The engine as the other rooms see it: ids in, ids with logprobs and versions out, and weights swapped.

Versions are the run's integers; on the wire they are str(version). An engine that was just started reports
"default", which is version 0, the run's initial weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from areal_agents.core.completion import Completion, SamplingParams, TokenChunk, TokenIds
from areal_agents.errors import EngineError

PauseMode = Literal["retract", "in_place", "abort"]
OnTokens = Callable[[TokenChunk], None]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What an engine serves: the policy version, and the limits that requests are checked against.

    `max_context` bounds prompt plus completion, in tokens. `kernel` names what computes, where the engine
    says so.
    """

    model_path: str
    version: int
    vocab_size: int
    max_context: int
    kernel: str = ""


class Engine(Protocol):
    """A served policy. Every method raises EngineUnavailable when the engine does not answer in time,
    EngineRejected when it refuses the request, and EngineError when its answer cannot be trusted."""

    async def generate(
        self, rid: str, input_ids: TokenIds, sampling: SamplingParams, on_tokens: OnTokens | None = None
    ) -> Completion:
        """Continue `input_ids` [P]; cancelling the call aborts the generation.

        `on_tokens` is called in the event loop with each piece as it arrives; together they are the
        completion's tokens. What it raises ends the call and aborts the generation.
        """
        ...

    async def abort(self, rid: str) -> None:
        """End a running generation; its caller gets what was sampled, with finish_reason "abort"."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. retract: continue later on recomputed keys and values; in_place: continue later on
        the old ones; abort: end all running generations. New requests wait for `resume`."""
        ...

    async def resume(self) -> None:
        """Continue sampling after `pause`."""
        ...

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Serve the safetensors folder at `path` as `version`. On an error the old weights are kept."""
        ...

    async def health(self) -> None:
        """Return if the engine answers, raise otherwise."""
        ...

    async def model_info(self) -> ModelInfo:
        """What is being served now."""
        ...

    async def busy_s(self) -> float | None:
        """Seconds since its start in which it was sampling; None where the engine does not count them."""
        ...

    async def aclose(self) -> None:
        """Release connections. The engine itself goes on."""
        ...


def version_from_wire(value: object) -> int:
    """Parse a weight version; "default" is 0. EngineError for anything that is not a version."""
    if value == "default":
        return 0
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    raise EngineError(f"the engine reports weight version {value!r}; expected an integer of this run")
