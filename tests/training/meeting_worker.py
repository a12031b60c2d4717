"""A rank without a model, for tests of how ranks meet and notice each other's end.

JOIN_TIMEOUT_S FACT BEHAVIOUR: wait (for the others, without end), short (the same, but their connections have
10 s), finish, fail, compute (in collectives), or vanish (once all have come, before it is watched).
"""

from __future__ import annotations

import logging
import os
import sys
import time

import torch

from areal_agents.errors import TrainingError
from areal_agents.training import rank_watch
from areal_agents.training.distributed import ranks

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    join_timeout_s, fact, behaviour = sys.argv[1:]
    rank_watch.END_S = 2.0
    if behaviour == "vanish":
        rank_watch.RankWatch.__enter__ = lambda self: os._exit(3)  # type: ignore[method-assign]
    elif behaviour == "short":
        rank_watch._CONNECT_S = 10.0
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
