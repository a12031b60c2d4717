"""An example taskset, as users of verifiers 0.4 write it."""

from __future__ import annotations

import itertools

import verifiers.v1 as vf

__all__ = ["Sums"]


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if "raise" in trace.last_reply:
            raise ValueError("this reply cannot be graded")
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    count: int = 20


class Sums(vf.Taskset[SumTask, SumsConfig]):
    INFINITE = True

    def load(self):
        numbers = range(1, self.config.count + 1) if self.config.count else itertools.count(1)
        for n in numbers:
            yield SumTask(Sum(prompt=f"What is {n} + {n}?", answer=f"{2 * n}."), self.config.task)

    @property
    def bounded(self) -> bool:
        return bool(self.config.count) or super().bounded
