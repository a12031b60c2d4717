"""Example classes, as users of `tools:` write them."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any


class Counter:
    """Counts to a target."""

    made = 0

    def __init__(self) -> None:
        self.total = 0
        self.thread = threading.get_ident()
        Counter.made += 1

    @staticmethod
    def tasks(split: str) -> list[dict[str, Any]]:
        first = 100 if split == "eval" else 1
        return [{"id": f"{split}-{n}", "question": "Count.", "target": n} for n in range(first, first + 3)]

    def reset(self, target: int, **row: Any) -> str:
        self.target = target
        return f"Reach {target}."

    def add(self, amount: int, times: int = 1) -> str:
        """Add an amount.

        Args:
            amount: how much to add, a positive number.
            times: how often.
        """
        assert threading.get_ident() == self.thread
        if amount < 0:
            raise ValueError("the amount is negative")
        self.total += amount * times
        return f"The total is {self.total}."

    async def look(self) -> dict[str, int]:
        """Look at the total."""
        await asyncio.sleep(0)
        return {"total": self.total}

    def _hidden(self) -> None: ...

    def get_reward(self) -> float:
        return float(self.total == self.target)


class Attribute:
    """Has its reward as an attribute, and no tasks."""

    reward = 0.25

    def reset(self, **row: Any) -> None: ...

    def noop(self) -> str:
        return "nothing"

    def plot(self, function: str) -> str:
        return f"plotted {function}"

    def stop(self) -> None:
        raise SystemExit(3)


class Strict:
    """Accepts only the fields of its own tasks."""

    reward = 0.5

    def reset(self, id: str, question: str) -> str:
        return question

    def wait(self) -> str:
        """Wait."""
        return "waited"


class AsyncClose:
    closed = 0
    reward = 0.5

    def reset(self, **row: Any) -> None: ...

    def noop(self) -> str:
        return "nothing"

    async def close(self) -> None:
        await asyncio.sleep(0)
        AsyncClose.closed += 1


class NotANumber:
    reward = float("nan")

    def reset(self, **row: Any) -> None: ...

    async def leave(self) -> str:
        raise SystemExit(4)


class Unrewarded:
    def reset(self, **row: Any) -> None: ...

    def noop(self) -> str:
        return "nothing"


class NoReset:
    def noop(self) -> str:
        return "nothing"


class NoTool:
    def reset(self, **row: Any) -> None: ...


class Slow:
    """Has a tool that takes longer than the tests wait."""

    reward = 1.0

    def reset(self, **row: Any) -> None: ...

    def wait(self) -> str:
        time.sleep(30)
        return "late"

    def close(self) -> None: ...

    def die(self) -> str:
        import os

        os._exit(7)
