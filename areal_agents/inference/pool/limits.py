"""The time limits of a pool, and how often it retries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The limits of a pool; times are in seconds.

    Attributes:
        probe_every_s: the interval between two health checks of a replica.
        probe_timeout_s: the longest wait for the answer to a health check.
        probe_again_s: the interval after a health check that was not answered.
        lost_after: the number of consecutive unanswered health checks after which a replica is lost, and its
            requests continue on other replicas.
        wait_s: the longest wait of a request for a serving replica, if one has served before, and of a
            suspect for its turn.
        load_again_s: the pause before the second attempt to load weights into a late replica; it doubles up
            to `longest_pause_s`.
        longest_pause_s: the longest pause between two such attempts, and of a replica that gives invalid
            answers.
        suspect_after: the number of engines that died while running a request after which it is a suspect,
            see `suspects`.
        most_deaths: the number of engines that died while running a request after which it is given up in any
            case.
        unread_interval: the number of tokens in one piece of a stream that no client reads. If the engine
            dies, up to that many of the last tokens are sampled again.
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
    unread_interval: int = 64
