"""Names the settings with which a run that does not fit in memory would fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from areal_agents.config import Config
from areal_agents.config.files import validate_config
from areal_agents.errors import ConfigError
from areal_agents.launch.engine_memory import starts_engines, trainer_gpus
from areal_agents.launch.gpus import Machine
from areal_agents.training.config import Offload

MOST = 3
_FREE = {"trainer.activation_checkpointing": "auto", "trainer.microbatch_tokens": 0}


def suggestions(config: Config, machine: Machine, fits: Callable[[Config], bool]) -> Iterator[str]:
    """Yield the settings, of those that a user would try, with which the run fits; MOST at most.

    More machines are named only if nothing on this one is enough, and then the fewest.

    Args:
        fits: whether a configuration fits; raises ConfigError if the machine cannot run it.
    """
    here, elsewhere = _on_this_machine(config, machine), _on_more_machines(config, machine)
    for candidates, most in ((here, MOST), (elsewhere, 1)):
        found = 0
        for changes in candidates:
            if _helps(config, changes, fits):
                yield ", ".join(f"{key}: {_text(value)}" for key, value in changes.items())
                found += 1
            if found == most:
                return
        if found:
            return


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with some keys changed, validated like one that is read from a file.

    What the other keys of a changed section follow from it, such as the transport of adapters, is set anew.

    Raises:
        ConfigError: they are not allowed.
    """
    tree = config.model_dump(mode="json")
    for section in {key.partition(".")[0] for key in changes}:
        tree[section] = getattr(config, section).model_dump(mode="json", exclude_unset=True)
    for key, value in changes.items():
        *path, name = key.split(".")
        inner = tree
        for part in path:
            inner = inner[part]
        inner[name] = value
    return validate_config(tree, source="the changed settings")


def _helps(config: Config, changes: Mapping[str, Any], fits: Callable[[Config], bool]) -> bool:
    try:
        return fits(with_changes(config, changes))
    except ConfigError:  # this combination is not allowed, or not on this machine
        return False


def _on_this_machine(config: Config, machine: Machine) -> Iterator[dict[str, Any]]:
    trainer, engine = config.trainer, config.engine
    gpus = trainer_gpus(config, machine)
    if trainer.activation_checkpointing not in ("auto", "full"):
        yield {"trainer.activation_checkpointing": "auto" if gpus else "full"}
    if trainer.activation_checkpointing == "auto" and not gpus:
        yield {"trainer.activation_checkpointing": "full"}
    if trainer.reshard == "step":
        yield {"trainer.reshard": "block"}
    if trainer.microbatch_tokens and gpus:
        yield _FREE
    offloads = _offloads(config) if gpus else ()
    yield from ({"trainer.offload": how} for how in offloads)
    if starts_engines(config):
        yield from _of_engines(config)
    for ranks in (count for count in (2, 4, 8) if gpus and trainer.ranks < count <= machine.gpus):
        yield {"trainer.ranks": ranks}
        yield from ({"trainer.ranks": ranks, "trainer.offload": how} for how in offloads)
    if trainer.lora is None:
        yield {"trainer.lora": {}}
        if engine.colocate == "split" and engine.kind != "vllm":
            yield {"trainer.lora": {}, "engine.colocate": "sleep"}
        if trainer.microbatch_tokens and gpus:
            yield {"trainer.lora": {}, **_FREE}
    elif trainer.lora.base == "dtype":  # rounds the weights: after what does not
        yield {"trainer.lora.base": "nf4"}
        if trainer.microbatch_tokens and gpus:
            yield {"trainer.lora.base": "nf4", **_FREE}


def _of_engines(config: Config) -> Iterator[dict[str, Any]]:
    engine = config.engine
    if engine.kind != "embedded":
        wider = (width for width in (2, 4, 8) if width > engine.tensor_parallel)
        yield from ({"engine.tensor_parallel": width} for width in wider)
        yield from ({"engine.memory_fraction": share} for share in (0.3, 0.5, 0.7))
    else:
        yield from ({"engine.slots": slots} for slots in (32, 16, 8) if slots < engine.slots)
    if engine.colocate == "split" and engine.kind != "vllm":
        yield {"engine.colocate": "sleep"}


def _on_more_machines(config: Config, machine: Machine) -> Iterator[dict[str, Any]]:
    trainer, here = config.trainer, trainer_gpus(config, machine)
    if not here:
        return
    for nodes in (count for count in (2, 4, 8) if count > max(1, trainer.nodes)):
        for each in sorted({here, machine.gpus}):
            more = {"trainer.nodes": nodes, "trainer.ranks": nodes * each}
            yield more
            yield from ({**more, "trainer.offload": how} for how in _offloads(config))


def _offloads(config: Config) -> tuple[Offload, ...]:
    """What else could be kept in host memory."""
    more: dict[Offload, tuple[Offload, ...]] = {"none": ("optimizer", "all"), "optimizer": ("all",)}
    return more.get(config.trainer.offload, ())


def _text(value: Any) -> str:
    return json.dumps(value).strip('"')
