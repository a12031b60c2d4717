"""Which machine of a run this is, and which rank of its trainer.

The configuration says so, or the variables of torchrun, srun or Ray. `areal-agents train` runs once on each
machine, the node, and starts the ranks of that node. `areal-agents processes trainer` is one rank, which
something else started. A key of the configuration comes before a variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from areal_agents.errors import ConfigError
from areal_agents.training.config import TrainerConfig

_HOW = "set trainer.nodes, trainer.node_rank and trainer.master, or start it with srun, torchrun or Ray"
_SLURM_PORTS = (20_000, 10_000)  # the first port that a Slurm job may use, and how many follow


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines that the ranks of a trainer are spread over.

    Attributes:
        count, rank: the number of machines, and the number of this one.
        host, port: where the ranks meet, on machine 0; with one machine the port is chosen when they start.
    """

    count: int = 1
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0

    def local_ranks(self, ranks: int) -> int:
        """Return how many of all ranks each node has."""
        return ranks // self.count


def nodes_of(trainer: TrainerConfig, environment: Mapping[str, str]) -> Nodes:
    """Return the place of this `areal-agents train` among the machines of the run.

    Raises:
        ConfigError: something is missing or cannot be: the message says what to set.
    """
    started = _started_processes(environment)
    if not trainer.start or trainer.nodes == 1 or (not trainer.nodes and started is None):
        return Nodes()
    count = trainer.nodes or (started.count if started is not None else 1)
    if started is not None and started.per_node > 1 and trainer.node_rank is None:
        raise ConfigError(
            f"{started.by} started {started.per_node} processes on a node, and areal-agents train starts the "
            f"ranks of its node itself: start it once per node ({started.once}), or start each rank as "
            "areal-agents processes trainer"
        )
    rank = trainer.node_rank
    if rank is None and started is not None:
        rank = started.rank
    master = trainer.master or (started.master if started is not None else "")
    if rank is None or not master:
        missing = "trainer.node_rank" if rank is None else "trainer.master"
        raise ConfigError(f"trainer.nodes is {count}, and {missing} is not known; {_HOW}")
    if started is not None and trainer.nodes and started.count != trainer.nodes and trainer.node_rank is None:
        raise ConfigError(
            f"trainer.nodes is {trainer.nodes}, but {started.by} started {started.count} processes"
        )
    if trainer.ranks % count:
        raise ConfigError(
            f"trainer.ranks: {trainer.ranks} ranks cannot be spread evenly over {count} nodes; use a "
            f"multiple of {count}"
        )
    host, _, port = master.rpartition(":")
    return Nodes(count, rank, host.strip("[]"), int(port))


def ranks_beside_engines(trainer: TrainerConfig, nodes: int) -> int:
    """Return how many ranks of the trainer are on the machine of the run's engines.

    Those that something else starts may be anywhere; `trainer.nodes` says that this machine is one of theirs.

    Args:
        nodes: the number of machines of a trainer that the run starts.
    """
    if trainer.start:
        return trainer.ranks // nodes
    return trainer.ranks // trainer.nodes if trainer.nodes else 0


def rank_variables(trainer: TrainerConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for this process as one rank of the trainer; none if it is the only one.

    Raises:
        ConfigError: the number of ranks that were started is not trainer.ranks.
    """
    found = _variables(environment)
    count = int(found.get("WORLD_SIZE", "1"))
    if count != trainer.ranks:
        raise ConfigError(
            f"trainer.ranks is {trainer.ranks}, and the number of ranks that were started is {count} "
            "(WORLD_SIZE of torchrun or Ray, SLURM_STEP_NUM_TASKS of srun); make them the same"
        )
    return found if count > 1 else {}


@dataclass(frozen=True, slots=True)
class _Started:
    """The processes of which something started this one: their number on all nodes and on each, the number of
    this one, where they meet, what started them, and how it starts one per node."""

    by: str
    count: int
    per_node: int
    rank: int
    master: str
    once: str


def _started_processes(environment: Mapping[str, str]) -> _Started | None:
    """Return what started this process as one of several; None if nothing did."""
    found = _variables(environment)
    if int(found.get("WORLD_SIZE", "1")) == 1:
        return None
    by_srun = "RANK" not in environment
    # torchrun and Ray listen on MASTER_PORT themselves.
    port = int(found["MASTER_PORT"]) + (0 if by_srun else 1)
    return _Started(
        by="srun" if by_srun else "torchrun or Ray",
        count=int(found["WORLD_SIZE"]),
        per_node=int(found["LOCAL_WORLD_SIZE"]),
        rank=int(found["RANK"]),
        master=f"{found['MASTER_ADDR']}:{port}",
        once="--ntasks-per-node=1" if by_srun else "--nproc-per-node=1",
    )


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables, made from Slurm's if srun started several tasks and no other is set."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in environment]
        if missing:
            raise ConfigError(
                f"RANK or WORLD_SIZE is set, but not {', '.join(missing)}: torchrun and Ray set them all; "
                "unset them to train on one machine"
            )
        found = {name: environment[name] for name in names}
        return {**found, "LOCAL_WORLD_SIZE": environment.get("LOCAL_WORLD_SIZE", found["WORLD_SIZE"])}
    # A batch script has the variables of its job, but only what srun starts has those of a step.
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) == 1 or "SLURM_PROCID" not in environment:
        return {}
    node = int(environment["SLURM_NODEID"])
    address = environment.get("MASTER_ADDR")
    if not address:
        address = hosts_of(environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"])[0]
    first, size = _SLURM_PORTS
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment["SLURM_TASKS_PER_NODE"]
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(_tasks_on(tasks, node)),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": address,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(first + int(environment["SLURM_JOB_ID"]) % size),
    }


def hosts_of(nodelist: str) -> list[str]:
    """Return the host names of Slurm's compact form: gpu[08-10,12],login → gpu08, gpu09, gpu10, gpu12, login.

    Raises:
        ConfigError: it is not a list of that form.
    """
    hosts: list[str] = []
    for item in re.split(r",(?![^\[]*\])", nodelist):  # at commas outside of brackets
        pieces = re.split(r"\[([^\[\]]*)\]", item)  # text, ranges, text, ranges, …, text
        choices = [[*_numbers(piece)] if i % 2 else [piece] for i, piece in enumerate(pieces)]
        hosts += ["".join(parts) for parts in product(*choices)]
    if not all(hosts) or any(set(host) & set("[] ") for host in hosts):
        raise ConfigError(
            f"SLURM_JOB_NODELIST: {nodelist!r} is not a list of hosts; give the first one as MASTER_ADDR"
        )
    return hosts


def _numbers(ranges: str) -> Iterator[str]:
    """Yield the numbers of 08-10,12 with their leading zeros. ConfigError if it is none."""
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ConfigError(
                f"SLURM_JOB_NODELIST: [{ranges}] is not a list of numbers; give the first host as MASTER_ADDR"
            )
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


def _tasks_on(tasks_per_node: str, node: int) -> int:
    """Return the number of tasks on a node from Slurm's form: 8(x2),4 → 8, 8, 4."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(count)] * int(times or 1)
    return counts[node]
