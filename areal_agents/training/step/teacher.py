"""Teachers of distillation: the models towards whose distributions the policy is trained.

A teacher that the trainer holds runs with the policy in every micro-batch. The other teachers, an engine or
the policy itself after it has read a demonstration, are queried once per batch, before the first optimizer
step; their answers form one array per batch, complete and equal on every rank.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from areal_agents.algorithms.packing.microbatches import MicroBatch
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import EngineError, EngineUnavailable, TeacherError, TrainingError
from areal_agents.inference.engine import ModelInfo, PromptScores, Sampler
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.gathering import whole
from areal_agents.training.model.model import ModelOptions, load_policy
from areal_agents.training.step.divergence import FullTargets, TopTargets

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CONCURRENCY = 32  # sequences that an engine scores at the same time
_RETRY_S = 2.0
_POLL_S = 0.5  # interval at which `stopping` is checked while the engine is queried
_SCORING_ROOM = 7  # SGLang 0.5.21 scores only sequences that are shorter than its context by this many tokens


class HeldTeacher:
    """A frozen model that the trainer holds. It is sharded like the policy, except for its output matrix."""

    def __init__(self, path: str, ranks: Ranks, *, vocab_size: int, options: ModelOptions) -> None:
        """Load the model in the folder `path`.

        Raises:
            TrainingError: the model cannot be loaded, its output layer is not a plain matrix, or its
                vocabulary differs from the policy's.
        """
        self._policy = load_policy(path, ranks, options=replace(options, lora=None, frozen=True))
        head = self._policy.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise TrainingError(
                f"{path}: the output layer of a teacher must be nn.Linear, got {type(head).__name__}"
            )
        if head.out_features != vocab_size:
            raise TrainingError(
                f"{path}: the teacher has a vocabulary of {head.out_features} tokens and the policy one of "
                f"{vocab_size}; distillation needs a teacher with the policy's tokenizer and vocabulary"
            )
        # its whole matrix, which `FullTargets` reads outside of the passes in which FSDP gathers it
        self._head = nn.Linear(head.in_features, vocab_size, bias=head.bias is not None, device="meta")
        self._head.weight = nn.Parameter(whole(head.weight).to(options.dtype), requires_grad=False)
        if head.bias is not None:
            self._head.bias = nn.Parameter(whole(head.bias).to(options.dtype), requires_grad=False)
        if options.placement == "parked":
            self._head.to("cpu")

    @property
    def held(self) -> tuple[nn.Module, ...]:
        """The modules that hold its weights."""
        return self._policy, self._head

    def targets(self, batch: MicroBatch) -> FullTargets:
        """The teacher's distributions at the N scored tokens of a micro-batch. Collective."""
        # the recorded expert routing is the policy's and does not apply to the teacher's weights
        with torch.no_grad():
            hidden = self._policy.backbone(replace(batch, routed_experts=None))
        temperatures = batch.temperatures / self._policy.logit_scale
        return FullTargets(hidden, self._head.weight, self._head.bias, temperatures)


@dataclass(frozen=True, slots=True)
class EngineTeacher:
    """A model served by an engine, queried for its k most likely tokens by the first rank.

    Attributes:
        connect: creates a client, on the first rank; the client is closed after each batch.
        top: k, the number of tokens.
        timeout_s: the longest wait for one batch, including the time in which the engine does not answer.
    """

    connect: Callable[[], Sampler]
    top: int
    vocab_size: int
    timeout_s: float
    ranks: Ranks

    def meet(self, *, stopping: Callable[[], bool] = lambda: False) -> int | None:
        """Wait for the engine's first answer and check that its model can be the teacher. Collective.

        Args:
            stopping: called on the first rank while it waits for the engine.

        Returns:
            The largest number of tokens that a sequence may have; None on every rank if the first rank was
            told to stop while it waited.

        Raises:
            TeacherError: the engine has another vocabulary than the policy, or does not answer in time.
        """
        return self._collectively(
            self._longest,
            stopping,
            late=f"the teacher's engine did not answer within {self.timeout_s:g} s "
            "(trainer.teacher_timeout_s); check that a server runs at trainer.teacher_url",
        )

    def score(
        self, samples: Sequence[TrainingSample] | None, *, stopping: Callable[[], bool] = lambda: False
    ) -> TopTargets | None:
        """The teacher's most likely tokens at the M scored tokens of the samples, in order. Collective.

        Args:
            samples: given on the first rank; None on the others.
            stopping: called on the first rank while it waits for the engine.

        Returns:
            The tokens with their logprobs; None on every rank if the first rank was told to stop while it
            waited.

        Raises:
            TeacherError: the engine has another vocabulary than the policy, refuses a sequence, or does not
                answer in time, or a token was not sampled at temperature 1.
        """
        asked = samples or ()
        answered = self._collectively(
            lambda: self._ask(asked),
            stopping,
            late=f"the teacher's engine (trainer.teacher_url) did not score {len(asked)} sequences "
            f"within {self.timeout_s:g} s (trainer.teacher_timeout_s)",
        )
        if answered is None:
            return None
        ids = np.concatenate([np.empty((0, self.top), np.int32), *(one for one, _ in answered)])
        logprobs = np.concatenate([np.empty((0, self.top), np.float32), *(one for _, one in answered)])
        return TopTargets(
            torch.from_numpy(ids.astype(np.int64)).to(self.ranks.device),
            torch.from_numpy(logprobs).to(self.ranks.device),
        )

    def _collectively(
        self, ask: Callable[[], Coroutine[Any, Any, T]], stopping: Callable[[], bool], *, late: str
    ) -> T | None:
        """Run `ask` on the first rank and return its result on every rank; None if `stopping()`. Collective.

        Raises:
            TeacherError: on every rank, if `ask` fails, or with the message `late` if it takes too long.
        """
        found: T | TeacherError | None = None
        if self.ranks.is_first:
            try:
                found = asyncio.run(self._until(ask(), stopping))
            except TimeoutError:
                found = TeacherError(late)
            except EngineError as error:
                found = TeacherError(f"the teacher's engine (trainer.teacher_url): {error}")
            except TeacherError as error:
                found = error
        answered = self.ranks.broadcast(found)
        if isinstance(answered, TeacherError):
            raise answered
        return answered

    async def _until(self, asking: Coroutine[Any, Any, T], stopping: Callable[[], bool]) -> T | None:
        """Await `asking` for at most `timeout_s` and return its result; None as soon as `stopping()`."""
        task = asyncio.create_task(asking)
        try:
            async with asyncio.timeout(self.timeout_s):
                while not task.done():
                    if stopping():
                        return None
                    await asyncio.wait({task}, timeout=_POLL_S)
            return task.result()
        finally:
            if task.cancel():
                # closing the client aborts the requests still running in the engine, within seconds
                await asyncio.wait({task})

    async def _longest(self) -> int:
        engine = self.connect()
        try:
            info = await _answered(engine.model_info)
        finally:
            await engine.aclose()
        self._check(info)
        return info.max_context - _SCORING_ROOM

    def _check(self, info: ModelInfo) -> None:
        if info.vocab_size != self.vocab_size:
            raise TeacherError(
                f"the teacher's engine (trainer.teacher_url) has a vocabulary of {info.vocab_size} tokens "
                f"and the policy one of {self.vocab_size}; distillation needs the same vocabulary"
            )

    async def _ask(
        self, samples: Sequence[TrainingSample]
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
        engine = self.connect()
        free = asyncio.Semaphore(_CONCURRENCY)
        try:
            # the engine may have been restarted with another model
            self._check(await _answered(engine.model_info))

            async def one(index: int, sample: TrainingSample) -> PromptScores:
                scored = np.flatnonzero(sample.scored_mask)
                if (sample.temperatures[scored] != 1).any():
                    raise TeacherError(
                        f"group {sample.group_id}, episode {sample.episode_id}: tokens were sampled "
                        "at a temperature other than 1, but a teacher's engine scores at 1; pin the "
                        "temperature, or use a teacher that the trainer holds (teacher: model)"
                    )
                ids = sample.token_ids[: scored[-1] + 1]
                async with free:
                    return await _answered(
                        lambda: engine.score(
                            f"teacher-{time.time_ns()}-{index}", ids, start=int(scored[0]), top=self.top
                        )
                    )

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(index, sample)) for index, sample in enumerate(samples)]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            await engine.aclose()
        return [_at_scored(sample, task.result()) for sample, task in zip(samples, tasks, strict=True)]


@dataclass(frozen=True, slots=True)
class SelfTeacher:
    """The policy with the weights at the beginning of the batch, reading a demonstration first (see
    `algorithms.demonstrations`).

    Attributes:
        top: k, the number of its most likely tokens that are used.
    """

    top: int


Teacher = HeldTeacher | EngineTeacher | SelfTeacher


def _at_scored(
    sample: TrainingSample, scores: PromptScores
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Select the rows of a sequence's scores that belong to its scored tokens."""
    positions = np.flatnonzero(sample.scored_mask)
    rows = positions - positions[0]
    return scores.top_ids[rows], scores.top_logprobs[rows]


async def _answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Retry until the engine answers; the caller limits the time."""
    while True:
        try:
            return await ask()
        except EngineUnavailable as error:
            logger.warning("the teacher's engine does not answer, retrying: %s", error)
            await asyncio.sleep(_RETRY_S)
