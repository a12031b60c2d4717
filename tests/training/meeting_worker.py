"""A rank without a model, for tests of how ranks form a group and notice that a rank has ended.

Arguments: JOIN_TIMEOUT_S FACT BEHAVIOUR. The behaviours are wait (forever), short (like wait, but the time
limit for connections expires once only rank 1 is missing), finish, fail, compute (in collectives forever),
vanish (after all ranks have registered, before this rank is watched), and second (registers when rank 1 has,
so that JOIN_TIMEOUT_S holds only for the ranks after it).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from areal_agents.errors import TrainingError
from areal_agents.process_control import collect_seldom
from areal_agents.training import rank_watch, rendezvous
from areal_agents.training.distributed import ranks

LONG_S = 120.0

_wait_for_all = rank_watch.RankWatch._wait_for_all
_open = rendezvous._open


def wait_for_all_but_one(watch: rank_watch.RankWatch) -> None:
    """Wait without a time limit until only rank 1 is missing, and then with a very short one."""
    while watch._missing != {1}:
        time.sleep(0.02)
    rank_watch._CONNECT_S = 0.1
    _wait_for_all(watch)


def open_after_rank_1(member: rendezvous.Member, timeout_s: float) -> dist.Store:
    """Open the store of the first rank, and return it once rank 1 is registered, however long that takes."""
    store = _open(member, LONG_S)
    store.wait([rendezvous._registration(1)], timedelta(seconds=LONG_S))
    return store


if __name__ == "__main__":
    collect_seldom()
    logging.basicConfig(level=logging.INFO)
    join_timeout_s, fact, behaviour = sys.argv[1:]
    # Only a rank that waits forever is ended by this limit; the others have to end by themselves.
    rank_watch.END_S = 0.5 if behaviour == "wait" else LONG_S
    if behaviour == "vanish":
        rank_watch.RankWatch.__enter__ = lambda self: os._exit(3)  # type: ignore[method-assign]
    elif behaviour == "short":
        rank_watch.RankWatch._wait_for_all = wait_for_all_but_one  # type: ignore[method-assign]
    elif behaviour == "second":
        rendezvous._open = open_after_rank_1
    print("is about to join", flush=True)
    try:
        with ranks("cpu", join_timeout_s=float(join_timeout_s), facts={"trainer.steps": fact}) as group:
            print(f"rank {group.rank} of {group.count} has met the others", flush=True)
            if behaviour == "fail":
                raise ValueError("no memory left")
            while behaviour == "compute":
                group.sum(torch.ones(4))
            while behaviour in ("wait", "short"):
                time.sleep(1)
    except TrainingError as error:
        print(f"TrainingError: {error}", flush=True)
        sys.exit(1)
