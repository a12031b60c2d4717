"""`areal-agents plan`: the memory that a run needs on each GPU, from the configuration of its model only.

The trainer's part is computed by `training.memory`; the engines' part is their weights, and keys and values
in the rest of the memory that they are given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table

from areal_agents.config import Config
from areal_agents.errors import ConfigError
from areal_agents.inference.config import DEFAULT_MAX_CONTEXT
from areal_agents.inference.sglang.server import place
from areal_agents.launch.gpus import Machine

if TYPE_CHECKING:
    from areal_agents.training.memory.choices import Choice
    from areal_agents.training.memory.estimate import Need, TrainerMemory

GIB = 2**30
SGLANG_SHARE = 0.85  # of a GPU, about what SGLang takes if it is given no share
MOST_SUGGESTIONS = 3
PASS, STEP, SAMPLING = "forward and backward", "optimizer's step", "sampling"

Row = tuple[str, tuple[int, ...]]  # what the memory is for, and bytes in each column


@dataclass(frozen=True, slots=True)
class Share:
    """What each GPU of one kind holds.

    Attributes:
        title: which GPUs these are.
        columns: the phases of a run.
        rows: the parts, with bytes for each column.
        capacity: bytes of one GPU.
        note: what the settings mean, in one line.
        room, least_room: bytes that engines have for keys and values, and those of one sequence.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    capacity: int
    note: str = ""
    room: int = 0
    least_room: int = 0

    @property
    def totals(self) -> tuple[int, ...]:
        """The sum of each column."""
        return tuple(sum(column) for column in zip(*(values for _, values in self.rows), strict=True))

    @property
    def fits(self) -> bool:
        """Whether each column fits, and the engine has room for one sequence at least."""
        return max(self.totals) <= self.capacity and self.room >= self.least_room

    def table(self) -> Table:
        """The parts as a table in GiB."""
        table = Table(title=self.title, title_justify="left", caption=self.note, caption_justify="left")
        table.add_column("GiB per GPU")
        for column in self.columns:
            table.add_column(column, justify="right")
        for name, values in self.rows:
            if max(values) >= GIB // 20:
                table.add_row(name, *(f"{value / GIB:.1f}" if value else "" for value in values))
        table.add_section()
        table.add_row("total", *(f"{total / GIB:.1f}" for total in self.totals), style="bold")
        table.add_row("capacity", *(f"{self.capacity / GIB:.1f}" for _ in self.columns))
        return table


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory of a run.

    Attributes:
        shares: one for each kind of GPU.
        suggestions: settings with which the run would fit; empty if it fits.
    """

    shares: tuple[Share, ...]
    suggestions: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return all(share.fits for share in self.shares)

    def show(self, console: Console) -> None:
        """Print the tables and the verdict."""
        console.print(Group(*(share.table() for share in self.shares)))
        console.print(self.verdict(), soft_wrap=True, highlight=False)

    def verdict(self) -> str:
        """One line that says whether the run fits, and otherwise what would help."""
        if self.fits:
            return "The run fits."
        where = " and ".join(
            f"{share.title} ({max(share.totals) / GIB:.1f} of {share.capacity / GIB:.1f} GiB)"
            for share in self.shares
            if not share.fits
        )
        helps = "; or ".join(self.suggestions) or (
            "none of the settings of this machine is enough; use more or larger GPUs, or a smaller model"
        )
        return f"The run does not fit: {where}. It would fit with: {helps}."


def plan_memory(config: Config, machine: Machine) -> Plan:
    """Compute the memory of a run on a machine.

    Raises:
        ConfigError: the machine has too few GPUs, or engine and trainer would share a GPU unintendedly.
        TrainingError: the model cannot be trained.
    """
    check_gpus(config, machine)
    measured: dict[object, Any] = {}
    shares = _shares(config, machine, measured)
    if all(share.fits for share in shares):
        return Plan(shares)
    return Plan(shares, tuple(_suggestions(config, machine, measured)))


def check_gpus(config: Config, machine: Machine) -> None:
    """Check that there are enough GPUs, and that engine and trainer share one only if they are told to.

    Raises:
        ConfigError: they are not, or they do.
    """
    ranks = trainer_gpus(config, machine)
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


def trainer_gpus(config: Config, machine: Machine) -> int:
    """The number of GPUs of a machine that the trainer computes on."""
    on_cpu = config.trainer.device == "cpu" or (config.trainer.device == "auto" and not machine.gpus)
    return 0 if on_cpu else config.trainer.ranks // max(1, config.trainer.nodes)


def engine_gpus(config: Config, machine: Machine) -> list[tuple[int, ...]]:
    """The GPUs of each engine that the run starts."""
    engine = config.engine
    if engine.urls or config.data.episodes:
        return []
    if engine.kind == "sglang":
        placed = place(engine, machine.gpus, trainer_gpus=trainer_gpus(config, machine))
        return [placement.gpus for placement in placed if placement.gpus]
    if not engine.device.startswith("cuda"):
        return []
    first = int(engine.device.partition(":")[2] or 0)
    return [(first + replica,) for replica in range(engine.replicas)]


def engine_bytes_in_training(config: Config, memory: int) -> int:
    """The bytes that engines hold of each of the trainer's GPUs while a step is trained.

    Args:
        memory: bytes of a GPU.
    """
    engine = config.engine
    if engine.colocate == "split":
        return round(engine.static_memory * memory)
    if engine.colocate == "sleep" and engine.kind == "embedded" and engine.device.startswith("cuda"):
        return _weight_elements(config) * _engine_width(config)  # it releases keys and values only
    return 0


def _shares(config: Config, machine: Machine, measured: dict[object, Any]) -> tuple[Share, ...]:
    from areal_agents.training.memory.choices import choose, reserve, smallest
    from areal_agents.training.memory.estimate import TrainerMemory
    from areal_agents.training.memory.states import fake_ranks

    trainer = config.trainer
    gpus = trainer_gpus(config, machine)
    engines = engine_gpus(config, machine)
    reserved = reserve(machine.memory) if gpus else 0
    engine_bytes = engine_bytes_in_training(config, machine.memory) if gpus else 0
    ranks_here = trainer.ranks // max(1, trainer.nodes)
    capacity = machine.memory if gpus else machine.memory // ranks_here
    with fake_ranks(trainer.ranks, replicas=trainer.replicas, context=trainer.context_parallel) as ranks:
        memory = TrainerMemory(
            trainer, config.algorithm, Path(config.model), ranks, on_gpu=bool(gpus), measured=measured
        )
    checkpointing, tokens = trainer.activation_checkpointing, trainer.microbatch_tokens
    if not gpus:
        checkpointing = "off" if checkpointing == "auto" else checkpointing
        tokens = tokens or 4096
    free = capacity - reserved - engine_bytes
    choice = choose(memory, free, checkpointing=checkpointing, tokens=tokens)
    choice = choice or smallest(memory, checkpointing=checkpointing, tokens=tokens)
    colocated = config.engine.colocate != "none" and bool(gpus) and bool(engines)
    held = _EngineShare.of(config, machine, memory) if engines else None
    shares = [
        _trainer_share(config, memory, choice, held if colocated else None,
                       capacity=capacity, reserved=reserved, gpus=gpus, engine_bytes=engine_bytes)
    ]  # fmt: skip
    if held is not None and not colocated:
        shares.append(held.share(engines, machine.memory, reserved=reserve(machine.memory)))
    return tuple(shares)


def _trainer_share(
    config: Config, memory: TrainerMemory, choice: Choice, held: _EngineShare | None, *,
    capacity: int, reserved: int, gpus: int, engine_bytes: int,
) -> Share:  # fmt: skip
    need = memory.need(choice.checkpointing, choice.tokens)
    columns = (PASS, STEP, *((SAMPLING,) if held is not None else ()))
    parked = gpus > 0 and config.engine.colocate == "sleep"
    rows = [(name, values[: len(columns)]) for name, values in _trainer_rows(need, parked=parked)]
    if held is not None:
        rows.append(("engine", (engine_bytes, engine_bytes, held.total)[: len(columns)]))
    rows.append(("CUDA, NCCL, fragmentation", (reserved,) * len(columns)))
    note = (
        f"{str(memory.dtype).removeprefix('torch.')}, activation_checkpointing: {choice.checkpointing}, "
        f"microbatch_tokens: {choice.tokens}"
    )
    if need.on_host:
        note += f"; in host memory: {need.on_host / GIB:.1f} GiB per rank"
    if held is not None:
        note += f"; {held.note}"
    title = "CPU: each rank of the trainer"
    if gpus:
        title = f"GPU {_range(range(gpus))}: the trainer" + (" and the engines" if held else "")
    room, least = (held.room, held.least_room) if held is not None else (0, 0)
    return Share(title, columns, tuple(rows), capacity, note, room, least)


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


@dataclass(frozen=True, slots=True)
class _EngineShare:
    """What an engine holds of each of its GPUs: weights, and room for keys and values."""

    weights: int
    room: int
    least_room: int
    note: str

    @property
    def total(self) -> int:
        return self.weights + max(0, self.room)

    @classmethod
    def of(cls, config: Config, machine: Machine, memory: TrainerMemory) -> _EngineShare:
        engine = config.engine
        width = _engine_width(config)
        weights = memory.model_elements * width // engine.tensor_parallel
        per_token = memory.cache_elements() * width / engine.tensor_parallel
        context = engine.max_context or min(memory.positions or DEFAULT_MAX_CONTEXT, DEFAULT_MAX_CONTEXT)
        if engine.kind == "sglang":
            room = round((engine.static_memory or SGLANG_SHARE) * machine.memory) - weights
        else:
            room = round(engine.slots * context * per_token)
        note = f"engine: keys and values of {max(0, round(room / per_token)):,} tokens"
        return cls(weights, room, round(context * per_token), note)

    def share(self, engines: list[tuple[int, ...]], memory: int, *, reserved: int) -> Share:
        """The share of GPUs that the engines have for themselves."""
        used = sorted({gpu for gpus in engines for gpu in gpus})
        rows: tuple[Row, ...] = (
            ("weights", (self.weights,)),
            ("keys and values", (max(0, self.room),)),
            ("CUDA, NCCL, fragmentation", (reserved,)),
        )
        return Share(
            f"GPU {_range(used)}: the engines",
            (SAMPLING,),
            rows,
            memory,
            self.note,
            self.room,
            self.least_room,
        )


def _suggestions(config: Config, machine: Machine, measured: dict[object, Any]) -> Iterator[str]:
    """Yield the settings, of those that a user would try, with which the run fits; a few at most."""
    found = 0
    for changes in _candidates(config, machine):
        try:
            changed = _with(config, changes)
            check_gpus(changed, machine)
            fits = all(share.fits for share in _shares(changed, machine, measured))
        except (ValueError, ConfigError):  # this combination is not allowed
            continue
        if fits:
            yield ", ".join(f"{key}: {_text(value)}" for key, value in changes.items())
            found += 1
            if found == MOST_SUGGESTIONS:
                return


def _candidates(config: Config, machine: Machine) -> Iterator[dict[str, Any]]:
    trainer, engine = config.trainer, config.engine
    on_gpus = trainer_gpus(config, machine)
    free = {"trainer.activation_checkpointing": "auto", "trainer.microbatch_tokens": 0}
    if trainer.activation_checkpointing not in ("auto", "full"):
        yield {"trainer.activation_checkpointing": "auto" if on_gpus else "full"}
    if trainer.microbatch_tokens:
        yield free
    offloads = {"none": ("optimizer", "all"), "optimizer": ("all",), "all": ()}[trainer.offload]
    yield from ({"trainer.offload": how} for how in offloads)
    if engine.kind == "sglang" and not engine.urls:
        yield from (
            {"engine.tensor_parallel": width} for width in (2, 4, 8) if width > engine.tensor_parallel
        )
        yield from ({"engine.memory_fraction": share} for share in (0.3, 0.5, 0.7))
    for ranks in (count for count in (2, 4, 8) if on_gpus and trainer.ranks < count <= machine.gpus):
        yield {"trainer.ranks": ranks}
        yield from ({"trainer.ranks": ranks, "trainer.offload": how} for how in offloads)
    if engine.colocate == "split":
        yield {"engine.colocate": "sleep"}
    if trainer.lora is None:
        yield {"trainer.lora": {}}
        if engine.colocate == "split":
            yield {"trainer.lora": {}, "engine.colocate": "sleep"}
        if trainer.microbatch_tokens:
            yield {"trainer.lora": {}, **free}


def _with(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with some keys changed. Raises ValueError if they are not allowed."""
    updates: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, name = key.split(".")
        updates.setdefault(section, {})[name] = value
    parts = {}
    for section, values in updates.items():
        before = getattr(config, section)
        given = {**before.model_dump(include=before.model_fields_set), **values}
        parts[section] = type(before).model_validate(given)
    return config.model_copy(update=parts)


def _text(value: Any) -> str:
    return json.dumps(value).strip('"')


def _range(gpus: Any) -> str:
    gpus = list(gpus)
    return str(gpus[0]) if len(gpus) == 1 else f"{gpus[0]}-{gpus[-1]}"


def _engine_width(config: Config) -> int:
    """Bytes of a weight in the engines."""
    engine = config.engine
    on_gpu = engine.kind == "sglang" or engine.device.startswith("cuda")
    return 4 if engine.dtype == "float32" or (engine.dtype == "auto" and not on_gpu) else 2


def _weight_elements(config: Config) -> int:
    from areal_agents.training.model.loading import build_model

    return sum(p.numel() for p in build_model(Path(config.model))[0].parameters())
