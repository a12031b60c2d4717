"""How the ranks of a trainer meet: through a key-value store on the first rank's machine, in limited time.

The variables are torchrun's, whoever sets them. Every rank registers in the store. One that does not is
named, with its node, and all ranks must agree on what they are about to do: a second node with another
configuration or another version of PyTorch would fail later, in a collective, without a reason.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch.distributed as dist

from areal_agents.errors import TrainingError

_POLL_S = 0.1
_HEARD_S = 5.0  # how long the first rank waits until the others have read why they cannot start
_LATE_S = 30.0  # how much longer than the first rank the others wait


@dataclass(frozen=True, slots=True)
class Member:
    """This process among the ranks, from torchrun's variables.

    Attributes:
        rank, count: its rank, and the number of ranks.
        node: the number of its machine; local_count: the number of ranks on it.
        address, port: where the store of the first rank listens.
        host: the name of its machine.
    """

    rank: int
    count: int
    node: int
    local_count: int
    address: str
    port: int
    host: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Member:
        """Read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and where they are set LOCAL_WORLD_SIZE and
        GROUP_RANK (torchrun) or NODE_RANK (Ray)."""
        try:
            rank, count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        except (KeyError, ValueError) as error:
            raise TrainingError(
                f"RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must all be set if one is: {error}"
            ) from error
        local_count = int(environment.get("LOCAL_WORLD_SIZE", count))
        node = int(environment.get("GROUP_RANK") or environment.get("NODE_RANK") or rank // local_count)
        return cls(rank, count, node, local_count, address, port, socket.gethostname())

    @property
    def name(self) -> str:
        """How messages name it."""
        return f"rank {self.rank} on node {self.node} ({self.host})"


def meet(member: Member, *, timeout_s: float, facts: Mapping[str, str]) -> dist.Store:
    """Register this rank, and return the store when all ranks are registered. Collective.

    Args:
        timeout_s: the longest that the first rank waits for the others, and they for it.
        facts: what must be the same on every rank, by name, such as the version of PyTorch.

    Raises:
        TrainingError: on every registered rank, if another did not register in time or differs in a fact.
    """
    store = _open(member, timeout_s)
    store.set(_registration(member.rank), json.dumps({**asdict(member), "facts": dict(facts)}))
    if member.rank == 0:
        problem = _missing(store, member, timeout_s) or _difference(store, member.count)
        store.set("verdict", problem)
        if problem:
            _let_them_hear(store, member.count)
    else:
        problem = _verdict(store, member, timeout_s)
    if problem:
        raise TrainingError(problem)
    return store


def name_of(store: dist.Store, rank: int) -> str:
    """How messages name a registered rank."""
    told: dict[str, Any] = json.loads(store.get(_registration(rank)))
    return f"rank {rank} on node {told['node']} ({told['host']})"


def _open(member: Member, timeout_s: float) -> dist.Store:
    """Open the store, which a torchrun agent may have made already."""
    made_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            member.address,
            member.port,
            is_master=member.rank == 0 and not made_by_agent,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except dist.DistError as error:
        where = f"{member.address}:{member.port}"
        if member.rank == 0:
            raise TrainingError(
                f"the first rank cannot listen on {where}, where the others would look for it: {error}; if "
                "another program has the port, as under Ray, set MASTER_PORT to another one on every rank"
            ) from error
        raise TrainingError(
            f"{member.name} did not reach the first rank on {where} within {timeout_s:g} s "
            "(trainer.join_timeout_s): node 0 was not started, or its address is another"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"areal-agents/{attempt}", store)


def _missing(store: dist.Store, member: Member, timeout_s: float) -> str:
    """Wait until every rank is registered; return a message about those that are not in time, or an empty
    string."""
    deadline = time.monotonic() + timeout_s
    waiting = set(range(member.count))
    while waiting:
        waiting -= {rank for rank in waiting if store.check([_registration(rank)])}
        if waiting and time.monotonic() > deadline:
            who = "; ".join(
                f"node {node} ({_ranks([*ranks])})"
                for node, ranks in groupby(sorted(waiting), key=lambda rank: rank // member.local_count)
            )
            return (
                f"{len(waiting)} of {member.count} ranks did not register within {timeout_s:g} s "
                f"(trainer.join_timeout_s): {who}. Start the same command there, and check that it reaches "
                f"{member.address}:{member.port}"
            )
        time.sleep(_POLL_S if waiting else 0)
    return ""


def _difference(store: dist.Store, count: int) -> str:
    """Return a message about the first rank whose facts differ from those of rank 0, or an empty string."""
    first: dict[str, Any] = json.loads(store.get(_registration(0)))
    for rank in range(1, count):
        other: dict[str, Any] = json.loads(store.get(_registration(rank)))
        names = first["facts"].keys() | other["facts"].keys()
        differing = [
            f"{name}: {other['facts'].get(name)} instead of {first['facts'].get(name)}"
            for name in sorted(names)
            if first["facts"].get(name) != other["facts"].get(name)
        ]
        if differing:
            return (
                f"{name_of(store, rank)} differs from rank 0 ({first['host']}): {'; '.join(differing)}. "
                "All ranks need the same"
            )
    return ""


def _verdict(store: dist.Store, member: Member, timeout_s: float) -> str:
    """Return the first rank's verdict. Raises TrainingError if there is none."""
    try:
        store.set_timeout(timedelta(seconds=timeout_s + _LATE_S))
        verdict = store.get("verdict").decode()
        store.add("heard", 1)
    except dist.DistError as error:
        raise TrainingError(
            f"{member.name}: the first rank on {member.address} ended before all ranks registered: {error}"
        ) from error
    return verdict


def _let_them_hear(store: dist.Store, count: int) -> None:
    """Wait until the registered ranks have read the verdict; the store ends with this process."""
    registered = sum(store.check([_registration(rank)]) for rank in range(1, count))
    deadline = time.monotonic() + _HEARD_S
    while store.add("heard", 0) < registered and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _registration(rank: int) -> str:
    return f"registered/{rank}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
