"""The trainer's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TrainerConfig(BaseModel):
    """Optimizer, batches, checkpoints. The batch's size is the rollout's: groups × group_size."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(default=100, ge=1, description="Batches to train; each publishes one version.")
    lr: float = Field(default=1e-6, ge=0, description="Peak learning rate of AdamW.")
    warmup_steps: int = Field(default=0, ge=0, description="Batches over which the rate rises linearly.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="What the rate does after the warm-up, until `steps`."
    )
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="Where linear and cosine end, × lr.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled decay, matrices only.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's first-moment decay.")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW's second-moment decay.")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    grad_clip: float = Field(default=1.0, gt=0, description="Largest gradient norm.")
    microbatch_tokens: int = Field(
        default=0,
        ge=0,
        description="Model tokens per micro-batch; the longest sample must fit. 0: 4096 on a CPU, "
        "where larger ones fall out of its cache, 32768 on a GPU.",
    )
    share_prefixes: bool = Field(default=True, description="Compute prefixes that samples share once.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Compute type; master weights are float32 always."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda if there is one.")
    ranks: int = Field(default=1, ge=1, description="Processes that share the training, under torchrun.")
    threads: int = Field(default=0, ge=0, description="CPU threads of torch; 0 leaves torch's default.")
    checkpoint_every: int = Field(default=20, ge=1, description="Batches between checkpoints.")
    keep_checkpoints: int = Field(default=2, ge=1, description="How many checkpoints are kept.")
    keep_weights: int = Field(default=2, ge=2, description="How many published weight folders are kept.")
    batch_timeout_s: float = Field(
        default=3600.0,
        gt=0,
        description="Longest wait for the groups of one batch before the run ends; "
        "before the first group, the longest time without any change in the store.",
    )
