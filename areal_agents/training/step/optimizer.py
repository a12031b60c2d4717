"""AdamW or Muon over the sharded float32 master weights, with the state in host memory if configured.

The state is keyed by parameter name, so a checkpoint depends neither on how the parameters were divided among
optimizers nor on where their state was kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from areal_agents.errors import TrainingError
from areal_agents.training.config import TrainerConfig
from areal_agents.training.host_memory import HostPlaces, moments

Named = Sequence[tuple[str, nn.Parameter]]

_BLOCKS = ("layers", "blocks")  # names of block lists in language models and vision towers
_WRAPPER = "_checkpoint_wrapped_module."  # inserted into names by activation checkpointing


def make_optimizer(
    module: nn.Module,
    config: TrainerConfig,
    *,
    lr: float | None = None,
    device: torch.device | None = None,
) -> torch.optim.Optimizer:
    """Create the optimizer of all trained parameters; weight decay applies to matrices only.

    With `optimizer: muon` the matrices of the blocks get Muon (Jordan et al. 2024), with updates scaled to
    AdamW's root mean square by 0.2·√max(rows, columns) (arXiv 2502.16982, eq. 4), so that one rate serves
    both; embeddings, head, norms, biases and stacked experts (three dimensions) get AdamW.

    Args:
        lr: peak learning rate; None uses the config's value.
        device: where the parameters are during a step; None: where they are now.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    rate = config.lr if lr is None else lr
    # With offload, block after block: only one block's state is on the device at a time.
    offload = config.offload == "optimizer"
    divided = _by_block(named) if offload else [named]
    if device is None:
        device = named[0][1].device
    parts = [part for some in divided for part in _optimizers(some, config, rate, device)]
    if len(parts) == 1 and not offload:
        return parts[0]
    return JointOptimizer(parts, device, offload=offload)


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers of disjoint parameters that step together and share one `state`.

    With `offload`, the state is kept on the CPU between steps. A step moves it to the device and back, one
    optimizer at a time: AdamW transfers 8 bytes per parameter each way, and the device never holds the state
    of more than one of the optimizers.

    Args:
        device: where the parameters are during a step.
    """

    def __init__(
        self, parts: Sequence[torch.optim.Optimizer], device: torch.device, *, offload: bool
    ) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = tuple(parts)
        self.offload = offload
        self._device = device
        self._host = HostPlaces(pinned=device.type == "cuda")
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step with the current gradients."""
        assert closure is None, "closures are not supported"
        for part in self.parts:
            if self.offload:
                self._fetch(part)
            part.step()
            if self.offload:
                self._put_away(part)
        if self.offload and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a checkpoint reads the host's copy

    def _fetch(self, part: torch.optim.Optimizer) -> None:
        """Copy the state to the device."""
        for parameter in _parameters(part):
            state = self.state.get(parameter, {})
            for name, value in moments(state).items():
                state[name] = value.to(self._device, non_blocking=True)

    def _put_away(self, part: torch.optim.Optimizer) -> None:
        """Copy the state to host memory."""
        for parameter in _parameters(part):
            state = self.state.get(parameter, {})
            keyed = {(id(parameter), name): value for name, value in moments(state).items()}
            state.update({name: value for (_, name), value in self._host.store(keyed).items()})


def keeps_state_on_host(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer itself keeps its state in host memory between its steps."""
    return isinstance(optimizer, JointOptimizer) and optimizer.offload


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state as "<parameter>/<moment>" → tensor; parameters that never had a gradient have none."""
    return {
        f"{plain_name(name)}/{moment}": value
        for name, parameter in module.named_parameters()
        for moment, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]
) -> None:
    """Replace the optimizer's state with `state`, named and sharded as `optimizer_state` returns it."""
    parameters = {plain_name(name): parameter for name, parameter in module.named_parameters()}
    optimizer.state.clear()
    for key, value in state.items():
        name, _, moment = key.rpartition("/")
        optimizer.state[parameters[name]][moment] = value


def empty_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """Allocate tensors into which a state is loaded, with the `shapes` given by key. A moment is sharded like
    its parameter, on the device where the optimizer keeps it between steps.

    Raises:
        ValueError: a key names no parameter of the module, or its shape differs from the parameter's.
        TrainingError: the state belongs to another optimizer.
    """
    parameters = {plain_name(name): parameter for name, parameter in module.named_parameters()}
    offload = keeps_state_on_host(optimizer)
    by_muon = _ids_of_muon(optimizer)
    out = {}
    for key, shape in shapes.items():
        name, _, moment = key.rpartition("/")
        if name not in parameters:
            raise ValueError(f"the optimizer's state has {key}, but the model has no parameter {name}")
        if (moment == "momentum_buffer") != (id(parameters[name]) in by_muon):
            raise TrainingError(
                f"the checkpoint holds {moment} of {name}, the state of another optimizer; leave "
                "trainer.optimizer as it was, or start a new run from the exported model"
            )
        parameter = parameters[name].detach()
        if not len(shape):
            out[key] = torch.zeros((), dtype=torch.float32)
        elif tuple(shape) == tuple(parameter.shape):
            out[key] = torch.empty_like(parameter, device="cpu" if offload else parameter.device)
        else:
            raise ValueError(
                f"the optimizer's {key} has shape {tuple(shape)}, expected {tuple(parameter.shape)}"
            )
    return out


def _parameters(part: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in part.param_groups for parameter in group["params"]]


def _ids_of_muon(optimizer: torch.optim.Optimizer) -> set[int]:
    parts = optimizer.parts if isinstance(optimizer, JointOptimizer) else (optimizer,)
    muon = [part for part in parts if isinstance(part, torch.optim.Muon)]
    return {id(p) for part in muon for p in _parameters(part)}


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of modules that wrap it."""
    return name.replace(_WRAPPER, "")


def _optimizers(
    named: Named, config: TrainerConfig, lr: float, device: torch.device
) -> list[torch.optim.Optimizer]:
    muon = [p for name, p in named if config.optimizer == "muon" and p.ndim == 2 and _block(name)]
    taken = set(map(id, muon))
    rest = [p for _, p in named if id(p) not in taken]
    parts: list[torch.optim.Optimizer] = []
    if muon:
        parts.append(
            torch.optim.Muon(
                muon,
                lr=lr,
                weight_decay=config.weight_decay,
                momentum=config.muon_momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    if rest:
        adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=lr,
            betas=(config.beta1, config.beta2),
            eps=config.adam_epsilon,
            # in one pass over memory, and without temporary arrays of the size of the weights
            fused=True if config.offload == "all" or device.type == "cuda" else None,
        )
        if adamw.defaults["fused"]:
            adamw.register_step_pre_hook(_move_counters)
        parts.append(adamw)
    return parts


def _move_counters(adamw: torch.optim.Optimizer, *_: Any) -> None:
    """Move the step counters to the parameters' device, where the fused kernel reads them. A checkpoint is
    loaded with counters on the CPU."""
    for parameter in _parameters(adamw):
        state = adamw.state.get(parameter)
        if state:
            state["step"] = state["step"].to(parameter.device)


def _by_block(named: Named) -> list[Named]:
    """Group the parameters by block, in the order of the model; parameters outside the blocks form their own
    groups."""
    out: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        out.setdefault(_block(name), []).append((name, parameter))
    return list(out.values())


def _block(name: str) -> str:
    """The name of the block that contains a parameter; empty for parameters outside the blocks."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part in _BLOCKS and parts[index + 1].isdigit():
            return ".".join(parts[: index + 2])
    return ""
