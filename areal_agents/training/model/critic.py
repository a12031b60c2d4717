"""The critic of PPO: a separate model that estimates the value of the state before each trained token.

It is the backbone of a Hugging Face folder with a scalar head that starts at zero: an untrained
critic returns 0 everywhere. It shares no weights with the policy and has its own optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from areal_agents.algorithms.packing.microbatches import MicroBatch
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import ModelOptions, hidden_rows, load_sharded
from areal_agents.training.model.sharding import offload_policy


class Critic(nn.Module):
    """A model that returns values, one per trained token.

    The value of a token is read from the row that predicts it: the state before it was sampled.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1)
        self.eval()

    def forward(self, batch: MicroBatch) -> Tensor:
        """Values [N] float32 of the micro-batch's trained tokens, in the units of the returns."""
        # the recorded routing is the policy's, but the critic has other weights
        batch = replace(batch, routed_experts=None)
        values: Tensor = self.head(hidden_rows(self.model, batch).float())
        return values.squeeze(-1).clone()  # FSDP hooks onto the output, and a view could lose the hook


@dataclass(frozen=True, slots=True)
class CriticState:
    """A critic and its learner; both are saved in checkpoints."""

    critic: Critic
    optimizer: torch.optim.Optimizer


def load_critic(path: str | Path, ranks: Ranks, *, options: ModelOptions | None = None) -> Critic:
    """Load the backbone of a Hugging Face folder and add a head of zeros, sharded like the policy.

    The head is float32 whatever the compute type, because values need more precision than bfloat16 has.

    Raises:
        TrainingError: the folder cannot be loaded.
        ValueError: `options` has adapters, but a critic trains all of its weights.
    """
    options = options or ModelOptions()
    if options.lora is not None:
        raise ValueError("a critic trains all of its weights; expected options without lora, got lora")

    def root(model: PreTrainedModel, _: torch.dtype) -> Critic:
        critic = Critic(model)
        policy = offload_policy(ranks, options.placement)
        fully_shard(critic.head, mesh=ranks.mesh, offload_policy=policy)
        return critic

    critic = load_sharded(path, ranks, root, options=options, head=False)
    with torch.no_grad():
        for parameter in critic.head.parameters():
            parameter.zero_()
    return critic
