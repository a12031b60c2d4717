"""Joins and leaves the process group through which a trainer broadcasts weights, for both of its ends.

The steps are the same as in SGLang's server, because all members must use the same keys in the store.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from areal_agents.errors import EngineError
from areal_agents.inference.engine import WeightGroup


def join_group(group: WeightGroup, *, rank: int, timeout_s: float) -> ProcessGroup:
    """Join `group` as `rank`; returns when all its members have. `timeout_s` bounds this and every later
    broadcast. EngineError if the others do not come in time or the group cannot be made."""
    timeout = timedelta(seconds=timeout_s)
    host = f"[{group.address}]" if ":" in group.address else group.address
    try:
        url = f"tcp://{host}:{group.port}"
        store, _, _ = next(distributed_c10d.rendezvous(url, rank, group.world_size, timeout=timeout))
        store.set_timeout(timeout)
        made, _ = distributed_c10d._new_process_group_helper(
            group.world_size,
            rank,
            [],
            distributed_c10d.Backend(group.backend),
            dist.PrefixStore(group.name, store),
            group_name=distributed_c10d.GroupName(group.name),
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:  # RuntimeError: what torch's stores and backends raise
        raise EngineError(f"the weight group {group.name} at {url} could not be joined: {error}") from error
    assert isinstance(made, ProcessGroup), "without other groups every process is a member"
    distributed_c10d._world.pg_group_ranks[made] = {i: i for i in range(group.world_size)}
    return made


def leave_group(group: ProcessGroup) -> None:
    """Leave the group; calls that still wait in it fail."""
    dist.destroy_process_group(group)
