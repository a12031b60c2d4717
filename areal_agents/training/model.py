"""The policy as the trainer holds it: float32 master weights of a Hugging Face folder, sharded.

The root FSDP unit holds embedding, final norm and head together, which tied embeddings require;
each block is a unit of its own. Everything that touches weights, the chunked head included, runs
inside the root's forward, where the weights are whole.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from areal_agents.algorithms.packing import MicroBatch
from areal_agents.errors import TrainingError
from areal_agents.training import attention
from areal_agents.training.distributed import Ranks
from areal_agents.training.logprobs import CHUNK_LOGITS, token_logprobs


class Policy(nn.Module):
    """A causal language model that answers with logprobs of trained tokens, not with logits.

    It stays in evaluation mode: dropout would make the ratio differ from 1 on the weights that
    sampled.
    """

    model: PreTrainedModel

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        saved_dtype: torch.dtype = torch.float32,
        chunk_logits: int = CHUNK_LOGITS,
    ) -> None:
        super().__init__()
        self.model = model
        self.saved_dtype = saved_dtype  # of the folder it came from, and of the versions published
        self.chunk_logits = chunk_logits
        self.eval()

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Logprobs [N] and detached entropies [N] of the micro-batch's trained tokens."""
        output = self.model.get_decoder()(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            segments=batch.segments,
        )
        hidden = output.last_hidden_state[0].index_select(0, batch.predictor_rows)
        return token_logprobs(
            hidden,
            batch.target_ids,
            batch.temperatures,
            self.model.get_output_embeddings(),
            vocab_size=self.model.config.vocab_size,
            chunk_logits=self.chunk_logits,
        )

    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's own state dict, whole, float32, on the CPU. Collective: every rank calls it.

        Tied weights appear once, as transformers saves them.
        """
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        whole = {}
        for name, value in self.model.state_dict().items():
            if name not in tied:
                tensor = value.full_tensor() if isinstance(value, DTensor) else value
                whole[name] = tensor.detach().to("cpu", copy=True).contiguous()
        return whole


def load_policy(path: str | Path, ranks: Ranks, *, dtype: torch.dtype = torch.float32) -> Policy:
    """Load a Hugging Face folder in float32 and shard it over the ranks.

    Args:
        dtype: compute type; with bfloat16, gradients are still reduced in float32.

    Raises:
        TrainingError: the folder cannot be loaded, lacks weights, or needs attention over a sliding
            window, which packed attention does not have.
    """
    attention.register()
    disable_progress_bar()  # the process logs to a file
    try:
        config = AutoConfig.from_pretrained(path)
        saved_dtype = config.dtype or torch.float32
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            attn_implementation=attention.NAME,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises types of several libraries for a bad folder
        raise TrainingError(f"{path}: cannot load the model: {error}") from error
    missing, mismatched = sorted(report["missing_keys"]), sorted(map(str, report["mismatched_keys"]))
    if missing or mismatched:
        raise TrainingError(f"{path}: missing weights {missing}, mismatched {mismatched}")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise TrainingError(f"{path}: sliding-window attention is not supported")
    config.attention_dropout = 0.0
    return shard(Policy(model.to(ranks.device), saved_dtype=saved_dtype), ranks, dtype=dtype)


def shard(policy: Policy, ranks: Ranks, *, dtype: torch.dtype = torch.float32) -> Policy:
    """Apply FSDP2 in place: a unit per block, the rest in the root."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in policy.model.get_decoder().layers:
        fully_shard(block, mesh=ranks.mesh, mp_policy=precision)
    fully_shard(policy, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=False)
    return policy
