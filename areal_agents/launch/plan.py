"""`areal-agents plan`: the memory that a run needs on each GPU, from the configuration of its model only.

The trainer's part is computed by `training.memory`, the engines' part by `launch.engine_memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table

from areal_agents.config import Config
from areal_agents.errors import AdapterError, ConfigError
from areal_agents.launch.context_length import longest_sequence
from areal_agents.launch.dtypes import with_trainer_dtype
from areal_agents.launch.engine_memory import (
    EngineMemory,
    engine_bytes_in_training,
    engine_gpus,
    ranges,
    starts_engines,
    trainer_gpus,
)
from areal_agents.launch.gpus import Machine
from areal_agents.launch.suggestions import suggestions

if TYPE_CHECKING:
    from areal_agents.training.memory.choices import Choice
    from areal_agents.training.memory.estimate import Need, TrainerMemory

GIB = 2**30
EXIT_UNKNOWN = 3  # of the command, if the memory of the model cannot be computed
PASS, STEP, SAMPLING = "forward and backward", "optimizer's step", "sampling"
RESERVED = "CUDA, NCCL, fragmentation"

ELSEWHERE = (
    "For GPUs that are not here: areal-agents plan CONFIG profile=24gb --gpus 1 --gpu-memory 24 "
    "(docs/gpus.md lists the profiles)"
)

Row = tuple[str, tuple[int, ...]]  # what the memory is for, and bytes in each column


@dataclass(frozen=True, slots=True)
class Share:
    """What each GPU of one kind holds, or the host.

    Attributes:
        title: which GPUs these are.
        columns: the phases of a run.
        rows: the parts, with bytes for each column.
        capacity: bytes of one GPU or of the host; 0 if it is not known.
        note: what the settings mean, in one line.
        room, least_room: bytes that engines have for keys and values, and those of one sequence.
        heading: what the numbers are.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    capacity: int
    note: str = ""
    room: int = 0
    least_room: int = 0
    heading: str = "GiB per GPU"

    @property
    def totals(self) -> tuple[int, ...]:
        """The sum of each column."""
        return tuple(sum(column) for column in zip(*(values for _, values in self.rows), strict=True))

    @property
    def fits(self) -> bool:
        """Whether each column fits, and the engine has room for one sequence at least."""
        return (not self.capacity or max(self.totals) <= self.capacity) and self.room >= self.least_room

    def table(self) -> Table:
        """The parts as a table in GiB."""
        table = Table(title=self.title, title_justify="left", caption=self.note, caption_justify="left")
        table.add_column(self.heading)
        for column in self.columns:
            table.add_column(column, justify="right")
        for name, values in self.rows:
            if max(values) >= GIB // 20:
                table.add_row(name, *(f"{value / GIB:.1f}" if value else "" for value in values))
        table.add_section()
        table.add_row("total", *(f"{total / GIB:.1f}" for total in self.totals), style="bold")
        capacity = f"{self.capacity / GIB:.1f}" if self.capacity else "not known"
        table.add_row("capacity", *(capacity for _ in self.columns))
        return table

    def fault(self) -> str:
        """Where it does not fit, and by how much."""
        if self.room < self.least_room:
            return (
                f"{self.title} (one sequence needs {self.least_room / GIB:.1f} GiB for keys and values, and "
                f"{max(0, self.room) / GIB:.1f} GiB are left)"
            )
        return f"{self.title} ({max(self.totals) / GIB:.1f} of {self.capacity / GIB:.1f} GiB)"


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory of a run.

    Attributes:
        shares: one for each kind of GPU, and the host's if models compute there.
        remarks: what the run should know although it fits.
        helps: settings with which the run would fit; empty if it fits.
    """

    shares: tuple[Share, ...]
    remarks: tuple[str, ...] = ()
    helps: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return all(share.fits for share in self.shares)

    def show(self, console: Console) -> None:
        """Print the tables, the remarks and the verdict."""
        console.print(Group(*(share.table() for share in self.shares)))
        for line in (*self.remarks, self.verdict()):
            console.print(line, soft_wrap=True, highlight=False)

    def verdict(self) -> str:
        """One line that says whether the run fits, and otherwise what would help."""
        if self.fits:
            return "The run fits."
        where = " and ".join(share.fault() for share in self.shares if not share.fits)
        helps = "none of the settings that were tried is enough; use larger machines, or a smaller model"
        if self.helps:
            helps = f"it would fit with: {'; or '.join(self.helps)}"
        return f"The run does not fit: {where}. {helps[0].upper()}{helps[1:]}."


def plan_memory(config: Config, machine: Machine) -> Plan:
    """Compute the memory of a run on a machine.

    Raises:
        ConfigError: the machine has too few GPUs, engine and trainer would share a GPU unintendedly, or the
            adapter does not fit the model.
        MemoryUnknown: the memory of the model cannot be computed.
    """
    from areal_agents.training.memory.estimate import MemoryUnknown

    check_gpus(config, machine)
    measured: dict[object, Any] = {}
    try:
        plan = _plan(config, machine, measured)
    except AdapterError as error:
        raise ConfigError(str(error)) from error
    if plan.fits:
        return plan

    def fits(changed: Config) -> bool:
        check_gpus(changed, machine)
        try:
            return _plan(changed, machine, measured).fits
        except (AdapterError, MemoryUnknown):  # the model cannot be trained so, for example with an adapter
            return False

    return Plan(plan.shares, plan.remarks, tuple(suggestions(config, machine, fits)))


def check_gpus(config: Config, machine: Machine) -> None:
    """Check that there are enough GPUs, and that engine and trainer share one only if they are told to.

    Raises:
        ConfigError: they are not, or they do.
    """
    ranks = trainer_gpus(config, machine)
    if not config.trainer.start and not config.trainer.nodes:  # its ranks are on machines that are not known
        return
    if ranks and not machine.gpus:
        raise ConfigError(
            "trainer.device: cuda needs a GPU, and this machine has none; set trainer.device: cpu. "
            f"{ELSEWHERE}"
        )
    if ranks > machine.gpus:
        raise ConfigError(
            f"trainer.ranks: {ranks} ranks need as many GPUs on this machine, and there are {machine.gpus}; "
            f"set trainer.ranks: {machine.gpus}, or trainer.device: cpu"
        )
    if config.engine.urls or config.data.episodes or config.engine.colocate != "none":
        return
    shared = sorted(set(range(ranks)) & {gpu for gpus in engine_gpus(config, machine) for gpu in gpus})
    if shared:
        named = ", ".join(map(str, shared))
        raise ConfigError(
            f"engine.device: {config.engine.device} puts an engine on GPU {named}, which the trainer uses; "
            f"set engine.colocate: sleep or split to share it, or engine.device: cuda:{ranks}"
        )


def _plan(config: Config, machine: Machine, measured: dict[object, Any]) -> Plan:
    from areal_agents.training.memory.estimate import TrainerMemory
    from areal_agents.training.memory.states import fake_ranks

    config = with_trainer_dtype(config)
    trainer = config.trainer
    gpus, engines = trainer_gpus(config, machine), engine_gpus(config, machine)
    with fake_ranks(trainer.ranks, replicas=trainer.replicas, context=trainer.context_parallel) as ranks:
        memory = TrainerMemory(
            trainer, config.algorithm, Path(config.model), ranks, on_gpu=bool(gpus), measured=measured
        )
    choice = _choice(config, machine, memory, gpus)
    need = memory.need(choice.checkpointing, choice.tokens)
    engine = EngineMemory.of(config, machine, memory) if starts_engines(config) else None
    settings = (
        f"{str(memory.dtype).removeprefix('torch.')}, activation_checkpointing: {choice.checkpointing}, "
        f"microbatch_tokens: {choice.tokens}"
    )
    remarks = [_length_remark(config, choice.tokens)]
    on_host = None if engines else engine
    if not gpus:
        shares = [_host_share(config, machine, need, on_host, settings)]
    else:
        together = engine if engines and config.engine.colocate != "none" else None
        shares = [_trainer_share(config, machine, need, together, settings, gpus)]
        if on_host is not None:
            remarks.append(
                f"Not counted: engines on the CPU, with up to "
                f"{config.engine.replicas * on_host.total / GIB:.1f} GiB of host memory."
            )
    if engine is not None and engines and (not gpus or config.engine.colocate == "none"):
        shares.append(_engine_share(engine, engines, machine.memory))
    return Plan(tuple(shares), tuple(filter(None, remarks)))


def _choice(config: Config, machine: Machine, memory: TrainerMemory, gpus: int) -> Choice:
    """The settings that the trainer will choose, or if none fits those that need the least memory."""
    from areal_agents.training.memory.choices import choose, on_cpu, reserve, smallest

    trainer, longest = config.trainer, longest_sequence(config)
    wanted = 0 if longest is None else longest.wanted
    if not gpus:
        settled = on_cpu(trainer, longest=wanted)
        checkpointing, tokens = settled.activation_checkpointing, settled.microbatch_tokens
        return smallest(memory, checkpointing=checkpointing, tokens=tokens)
    free = machine.memory - reserve(machine.memory) - engine_bytes_in_training(config, machine.memory)
    checkpointing, tokens = trainer.activation_checkpointing, trainer.microbatch_tokens
    choice = choose(memory, free, checkpointing=checkpointing, tokens=tokens, longest=wanted)
    return choice or smallest(memory, checkpointing=checkpointing, tokens=tokens)


def _length_remark(config: Config, tokens: int) -> str:
    """What happens to the longest samples, if a micro-batch does not hold them; "" if it does."""
    longest = longest_sequence(config)
    if longest is None or longest.tokens <= tokens:
        return ""
    return (
        f"A sample may have up to {longest.tokens:,} tokens ({longest.key}), and a micro-batch holds "
        f"{tokens:,}: longer samples are dropped with their groups. If that is not intended, set "
        f"rollout.limits.context_tokens: {tokens}, or trainer.microbatch_tokens: {longest.tokens}."
    )


def _trainer_share(
    config: Config, machine: Machine, need: Need, engine: EngineMemory | None, settings: str, gpus: int
) -> Share:
    from areal_agents.training.memory.choices import reserve

    columns = (PASS, STEP, *((SAMPLING,) if engine is not None else ()))
    parked = config.engine.colocate == "sleep" and not config.data.episodes
    rows = [(name, values[: len(columns)]) for name, values in _trainer_rows(need, parked=parked)]
    note, room, least = settings, 0, 0
    if engine is not None:
        held = engine_bytes_in_training(config, machine.memory)
        rows.append(("engine", (held, held, engine.total)))
        room, least = engine.room, engine.least_room
    rows.append((RESERVED, (reserve(machine.memory),) * len(columns)))
    on_host = need.on_host + (need.idle if parked else 0)
    if on_host:  # page-locked allocations are rounded up
        note += f"; in host memory: at least {on_host / GIB:.1f} GiB per rank"
    if engine is not None:
        note += f"; engine: keys and values of {engine.tokens:,} tokens"
    elsewhere = not config.trainer.start and not config.trainer.nodes
    where = "Each of the trainer's GPUs" if elsewhere else f"GPU {ranges(range(gpus))}: the trainer"
    title = where + (" and the engines" if engine is not None else "")
    return Share(title, columns, tuple(rows), machine.memory, note, room, least)


def _engine_share(engine: EngineMemory, engines: list[tuple[int, ...]], memory: int) -> Share:
    """The share of GPUs that the engines have for themselves."""
    from areal_agents.training.memory.choices import reserve

    used = sorted({gpu for gpus in engines for gpu in gpus})
    rows: tuple[Row, ...] = (
        ("weights", (engine.weights,)),
        ("keys and values", (max(0, engine.room),)),
        (RESERVED, (reserve(memory),)),
    )
    note = f"keys and values of {engine.tokens:,} tokens"
    title = f"GPU {ranges(used)}: the engines"
    return Share(title, (SAMPLING,), rows, memory, note, engine.room, engine.least_room)


def _host_share(
    config: Config, machine: Machine, need: Need, engine: EngineMemory | None, settings: str
) -> Share:
    """The share of the host, if the trainer computes there: of all its ranks and of all engines there."""
    ranks = config.trainer.ranks // max(1, config.trainer.nodes)
    columns = (PASS, STEP, *((SAMPLING,) if engine is not None else ()))
    rows = [
        (name, tuple(ranks * value for value in values[: len(columns)]))
        for name, values in _trainer_rows(need, parked=False)
    ]
    rows.append(("moved by trainer.offload", (ranks * need.on_host,) * len(columns)))
    title = "Host memory: the trainer"
    if engine is not None:
        count = config.engine.replicas
        title += " and the engine" if count == 1 else f" and {count} engines"
        rows.append(("engines: weights", (count * engine.weights,) * 3))
        rows.append(("engines: keys and values, at most", (count * engine.room,) * 3))
    note = f"{settings}; not counted: the programs themselves, about 1 GiB for each process with a model"
    return Share(title, columns, tuple(rows), machine.host, note, heading="GiB of the host")


def _trainer_rows(need: Need, *, parked: bool) -> Iterator[Row]:
    """The trainer's parts in a pass, in a step, and while the engine samples.

    Args:
        parked: whether they are in host memory while the engine samples.
    """
    for name, size in (
        ("trained weights, float32", need.masters),
        ("frozen weights", need.frozen),
        ("optimizer", need.optimizer),
    ):
        yield name, (size, size, 0 if parked else size)
    yield "gradients", (need.gradients, need.gradients, 0)
    in_pass = need.gathered + need.unsharded + need.activations + need.working
    if in_pass >= need.ending:
        yield "gathered weights", (need.gathered, 0, 0)
        yield "gradient of a block, whole", (need.unsharded, 0, 0)
        yield "activations", (need.activations, 0, 0)
        yield "temporary, in a block or the head", (need.working, 0, 0)
    else:
        yield "embedding and head at the end of a pass", (need.ending, 0, 0)
    yield "temporary, in the optimizer", (0, need.step, 0)
