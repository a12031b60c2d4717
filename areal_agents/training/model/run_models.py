"""Loads the models that a run's algorithm needs, with the optimizers of those that are trained.

The reference policy is a frozen model that the policy is kept close to; it is never modified.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.distillation import DistillationLoss
from areal_agents.errors import TrainingError
from areal_agents.inference import SGLangEngine
from areal_agents.secret_variables import given_teacher_key
from areal_agents.training.checkpoint.checkpoint import Parts
from areal_agents.training.checkpoint.export import DTYPES, lora_options
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.host_memory import Parking
from areal_agents.training.model.critic import CriticState, load_critic
from areal_agents.training.model.model import ModelOptions, Policy, load_policy
from areal_agents.training.model.reference import BaseOfAdapter, Reference
from areal_agents.training.step.learner import rate_factor, set_learning_rate
from areal_agents.training.step.optimizer import keeps_state_on_host, make_optimizer
from areal_agents.training.step.teacher import EngineTeacher, HeldTeacher, SelfTeacher, Teacher


@dataclass(frozen=True, slots=True)
class Models:
    """The policy with its optimizer and, if needed, a critic, a frozen reference policy and a teacher."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    critic: CriticState | None
    reference: Reference | None
    teacher: Teacher | None = None

    def parking(self, device: torch.device) -> Parking:
        """What moves these models between `device` and host memory; they must have been loaded parked."""
        modules: list[torch.nn.Module] = [self.policy]
        optimizers = [self.optimizer]
        if self.critic is not None:
            modules.append(self.critic.critic)
            optimizers.append(self.critic.optimizer)
        if isinstance(self.reference, Policy):
            modules.append(self.reference)
        if isinstance(self.teacher, HeldTeacher):
            modules.extend(self.teacher.held)
        return Parking(modules, [one for one in optimizers if not keeps_state_on_host(one)], device)

    @property
    def parts(self) -> Parts:
        """The trained models, which a checkpoint contains. The reference policy is always loaded from its
        folder."""
        parts: dict[str, tuple[torch.nn.Module, torch.optim.Optimizer]] = {
            "policy": (self.policy, self.optimizer)
        }
        if self.critic is not None:
            parts["critic"] = (self.critic.critic, self.critic.optimizer)
        return parts

    def set_rate(self, step: int, config: TrainerConfig) -> float:
        """Set the learning rates of batch `step`, counted from 0; return the policy's."""
        factor = rate_factor(step, config)
        set_learning_rate(self.optimizer, config.lr * factor)
        if self.critic is not None:
            set_learning_rate(self.critic.optimizer, config.critic_lr * factor)
        return config.lr * factor


def load_models(
    config: TrainerConfig,
    algorithm: AlgorithmConfig,
    model_path: Path,
    ranks: Ranks,
    *,
    parked: bool = False,
) -> Models:
    """Load what `algorithm` needs; a model without a folder of its own starts from the policy's folder.

    Args:
        parked: whether the models are in host memory, and `Models.parking` moves them to the device.

    Raises:
        TrainingError: a folder cannot be loaded.
    """
    checkpointing = config.activation_checkpointing
    assert checkpointing != "auto", "the memory of the ranks decides, see memory.choices"
    options = ModelOptions(
        dtype=compute_dtype(config, on_gpu=ranks.device.type == "cuda"),
        activation_checkpointing=checkpointing,
        lora=lora_options(config.lora),
        router_dtype=router_dtype(config),
        fused=config.fused,
        reshard=config.reshard,
        placement="offloaded" if config.offload == "all" else "parked" if parked else "device",
    )
    whole = replace(options, lora=None)
    frozen = replace(whole, activation_checkpointing="off", reshard="block")
    policy = load_policy(model_path, ranks, options=options)
    critic = reference = None
    if algorithm.needs_critic:
        model = load_critic(config.critic_model or model_path, ranks, options=whole)
        critic = CriticState(model, make_optimizer(model, config, lr=config.critic_lr, device=ranks.device))
    if algorithm.needs_reference:
        reference = (
            BaseOfAdapter(policy)
            if _is_base_of_adapter(config)
            else load_reference(config.reference_model or model_path, ranks, options=frozen)
        )
    teacher = _load_teacher(config, algorithm, policy, ranks, options=frozen)
    optimizer = make_optimizer(policy, config, device=ranks.device)
    return Models(policy, optimizer, critic, reference, teacher)


def compute_dtype(config: TrainerConfig, *, on_gpu: bool) -> torch.dtype:
    """The type of `trainer.dtype` on this kind of device."""
    if config.dtype == "auto":
        return torch.bfloat16 if on_gpu else torch.float32
    return DTYPES[config.dtype]


def router_dtype(config: TrainerConfig) -> torch.dtype | None:
    """The type in which routers compute; None: the compute type."""
    return torch.float32 if config.router_dtype == "float32" else None


def frozen_models(config: TrainerConfig, algorithm: AlgorithmConfig, model_path: Path) -> list[Path]:
    """The folders of the models that `load_models` loads beside the trained ones."""
    paths = []
    if algorithm.needs_reference and not _is_base_of_adapter(config):
        paths.append(Path(config.reference_model or model_path))
    if algorithm.teacher == "model":
        paths.append(Path(config.teacher_model))
    return paths


def _is_base_of_adapter(config: TrainerConfig) -> bool:
    """Whether the reference policy is the policy without its adapter."""
    return config.lora is not None and not config.reference_model


def _load_teacher(
    config: TrainerConfig, algorithm: AlgorithmConfig, policy: Policy, ranks: Ranks, *, options: ModelOptions
) -> Teacher | None:
    loss = algorithm.policy_loss
    if not isinstance(loss, DistillationLoss):
        return None
    vocab = policy.shape.vocab
    if loss.teacher != "model" and loss.distill_top_k > vocab:
        raise TrainingError(
            f"algorithm.distill_top_k: {loss.distill_top_k} is more than the vocabulary of {vocab} tokens"
        )
    if loss.teacher == "self":
        return SelfTeacher(loss.distill_top_k)
    if loss.teacher == "model":
        return HeldTeacher(config.teacher_model, ranks, vocab_size=vocab, options=options)
    return EngineTeacher(
        lambda: SGLangEngine(
            config.teacher_url, request_timeout_s=config.teacher_timeout_s, key=given_teacher_key()
        ),
        top=loss.distill_top_k,
        vocab_size=vocab,
        timeout_s=config.teacher_timeout_s,
        ranks=ranks,
    )


def load_reference(path: str | Path, ranks: Ranks, *, options: ModelOptions | None = None) -> Policy:
    """Load a Hugging Face folder like the policy, sharded, without gradients.

    Raises:
        TrainingError: the folder cannot be loaded.
    """
    return load_policy(path, ranks, options=replace(options or ModelOptions(), frozen=True))
