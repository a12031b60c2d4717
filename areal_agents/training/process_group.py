"""The process group of a trainer: made from torchrun's variables, or of one rank without them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from areal_agents.training.rank_watch import RankWatch
from areal_agents.training.rendezvous import Member, meet


@contextmanager
def process_group(
    backend: str, *, timeout_s: float, join_timeout_s: float, facts: Mapping[str, str]
) -> Iterator[RankWatch | None]:
    """Join the process group of all ranks within a with-block; a group that exists already is used as it is.

    Args:
        timeout_s: the longest that a rank waits in a collective.
        join_timeout_s, facts: see `meet`.

    Yields:
        What watches the other ranks; None if there are none, or the group existed.
    """
    if dist.is_initialized():
        yield None
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield None
        finally:
            dist.destroy_process_group()
        return
    member = Member.of(os.environ)
    store = meet(member, timeout_s=join_timeout_s, facts=facts)
    with RankWatch(member, store) as watch:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=member.rank,
            world_size=member.count,
            timeout=timedelta(seconds=timeout_s),
        )
        try:
            yield watch
        finally:
            dist.destroy_process_group()
