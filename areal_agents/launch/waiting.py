"""Messages of a starting run: what it waits for, how long it has waited and how long it waits at most."""

from __future__ import annotations

from collections.abc import Callable

FIRST_S = 10.0  # until a wait is reported again

# Called repeatedly during a wait with what is waited for, the seconds that have passed, and the limit.
OnWait = Callable[[str, float, float], None]


class WaitLines:
    """Reports a wait at once, and again after 10, 20, 40 and so on seconds, so in few lines.

    Args:
        say: called with each line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._what = ""
        self._waited_s = 0.0
        self._next_s = FIRST_S

    def __call__(self, what: str, waited_s: float, limit_s: float) -> None:
        if what != self._what or waited_s < self._waited_s:
            self._what, self._next_s = what, max(FIRST_S, 2 * waited_s)
            self._say(describe_wait(what, waited_s, limit_s))
        elif waited_s >= self._next_s:
            self._next_s *= 2
            self._say(describe_wait(what, waited_s, limit_s))
        self._waited_s = waited_s


def describe_wait(what: str, waited_s: float, limit_s: float) -> str:
    """Return a line such as: waiting for the inference engine: 20 s of at most 600 s."""
    if waited_s < 1:
        return f"waiting for {what}, at most {limit_s:.0f} s"
    return f"waiting for {what}: {waited_s:.0f} s of at most {limit_s:.0f} s"
