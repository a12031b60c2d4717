"""The time limits of a pool, and how often it retries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Times in seconds, and counts.

    Attributes:
        probe_every_s: between two looks at a replica.
        probe_timeout_s: longest wait for a replica's answer to one.
        probe_again_s: between two looks at one that did not answer the last.
        lost_after: looks in a row without an answer after which a replica is lost, and what runs there is
            continued elsewhere.
        wait_s: longest wait of a request for a replica that serves, where one has served before, and of a
            suspect for its turn.
        load_again_s: before the second attempt to load weights into a late replica; it doubles up to
            `longest_pause_s`.
        longest_pause_s: the longest pause between two attempts, and of one that answers invalidly.
        suspect_after: deaths of engines under a request after which it is a suspect, see `suspects`.
        most_deaths: deaths of engines under a request after which it is given up in any case.
    """

    probe_every_s: float = 1.0
    probe_timeout_s: float = 5.0
    probe_again_s: float = 0.2
    lost_after: int = 3
    wait_s: float = 120.0
    load_again_s: float = 1.0
    longest_pause_s: float = 30.0
    suspect_after: int = 2
    most_deaths: int = 6
