"""Settings of the trainer. This module imports no torch, and refuses combinations that cannot work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from areal_agents.core.settings import Settings
from areal_agents.training.publish.config import PublishConfig

Fused = Literal["none", "compile", "liger", "auto"]
Reshard = Literal["block", "step"]
Offload = Literal["none", "optimizer", "all"]
Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]


class LoraConfig(Settings):
    """Low-rank adapters in place of training every weight (arXiv 2106.09685)."""

    rank: int = Field(default=16, ge=1, description="Rank of each adapter.")
    alpha: float = Field(default=32.0, gt=0, description="The adapter's output is scaled by alpha / rank.")
    targets: str | tuple[str, ...] = Field(
        default="all-linear",
        min_length=1,
        description="Names of the linear layers that get an adapter; all-linear: all except the head.",
    )
    base: Literal["dtype", "nf4"] = Field(
        default="dtype",
        description="Frozen weights of the blocks: in the compute type, or nf4: in four bits (extra gpu).",
    )
    dropout: Literal[0] = Field(
        default=0,
        description="Must be 0: with dropout the ratio would differ from 1 on-policy.",
    )


class TrainerConfig(Settings):
    """Optimizer, batches, checkpoints. The batch's size is the rollout's: groups × group_size."""

    steps: int = Field(default=100, ge=1, description="Batches to train; each publishes one version.")
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="muon: Muon for the matrices of the blocks, AdamW for embeddings, head and norms.",
    )
    lr: float = Field(default=1e-6, ge=0, description="Peak learning rate.")
    warmup_steps: int = Field(default=0, ge=0, description="Batches over which the rate rises linearly.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="How the learning rate changes from the end of the warm-up until `steps`.",
    )
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="Final rate of linear and cosine, × lr.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled decay, matrices only.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's first-moment decay.")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW's second-moment decay.")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="Muon's momentum (Nesterov).")
    offload: Offload = Field(
        default="none",
        description="What is kept in host memory: optimizer: the optimizer's state, between its steps; all: "
        "weights and gradients too, of which a GPU then holds one block at a time, and the step is taken on "
        "the CPU.",
    )
    grad_clip: float = Field(default=1.0, gt=0, description="Largest gradient norm.")
    microbatch_tokens: int = Field(
        default=0,
        ge=0,
        description="Model tokens per micro-batch; a longer sample is dropped with its group. 0: 4096 on a "
        "CPU, where larger ones fall out of its cache; on a GPU as many as its memory allows, at most 32768.",
    )
    share_prefixes: bool = Field(default=True, description="Compute prefixes that samples share once.")
    activation_checkpointing: Literal["auto", "off", "full"] | int = Field(
        default="auto",
        description="off, full, or n: recompute the activations of every n-th block. auto: off on a CPU; on "
        "a GPU the one with the least recomputation that its memory allows.",
    )
    reshard: Reshard = Field(
        default="block",
        description="When gathered weights are divided over the ranks again. block: after the pass of each "
        "block, which gathers it twice in each micro-batch. step: after the last micro-batch of an optimizer "
        "step; the weights are gathered once in it, and are whole in the compute type on each rank.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Compute type, and type of weights that are not trained; trained weights are float32. "
        "auto: that of the engines that the run starts (float32 with the embedded engine on a CPU, also on a "
        "GPU); else bfloat16 on a GPU, float32 on a CPU.",
    )
    fused: Fused = Field(
        default="none",
        description="Faster blocks. compile: each block is compiled by torch; liger: Liger's kernels of "
        "norms, activations and rotary embedding, on a GPU (extra gpu); auto: liger where it can be used.",
    )
    router_dtype: Literal["auto", "float32"] = Field(
        default="auto",
        description="Type in which routers of experts compute. auto: that of `dtype`, as in engines, so that "
        "the same experts are chosen; float32: more precise than engines.",
    )
    memory_check: Literal["refuse", "warn"] = Field(
        default="refuse",
        description="What happens to a run that does not fit in the GPUs' memory by the estimate of "
        "areal-agents plan: it is refused before anything is loaded, or started with a warning.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda if there is one.")
    ranks: int = Field(
        default=1, ge=1, description="Processes that share the training, on all nodes together; one per GPU."
    )
    start: bool = Field(
        default=True,
        description="false: train starts no trainer; torchrun, srun or Ray start its ranks, as areal-agents "
        "processes trainer. Engines use all GPUs of this machine, unless nodes says that it has ranks too.",
    )
    nodes: int = Field(
        default=0,
        ge=0,
        description="Machines that share the ranks evenly; the same command is started on each. 0: as many "
        "as srun, torchrun or Ray started it on, else 1.",
    )
    node_rank: int | None = Field(
        default=None,
        ge=0,
        description="Number of this machine, from 0. Engines, proxy and rollout run on machine 0. Absent: as "
        "srun, torchrun or Ray say.",
    )
    master: str = Field(
        default="",
        pattern=r"^(.+:\d+)?$",
        description="host:port of machine 0, where the ranks meet. Empty: as srun, torchrun or Ray say.",
    )
    join_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Longest wait until all ranks have been started; with start: false, the longest time "
        "without a trainer, also after one has ended.",
    )
    stop_timeout_s: float = Field(
        default=0.0,
        ge=0,
        description="Longest time that a stopped trainer may take for its checkpoint before it is killed. 0: "
        "one minute, and the time to write its bytes at 200 MB/s.",
    )
    replicas: int = Field(
        default=1, ge=1, description="Copies of the sharded weights (HSDP); ranks is a multiple of it."
    )
    context_parallel: int = Field(
        default=1, ge=1, description="Ranks that share each sequence (Ulysses); ranks is a multiple of it."
    )
    rank_timeout_s: float = Field(
        default=1800.0,
        gt=0,
        description="Longest wait of a rank for another one; then the run ends with an error that names it.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        description="CPU threads of torch in each rank; 0: the ranks of a machine divide OMP_NUM_THREADS, or "
        "else its cores.",
    )
    lora: LoraConfig | None = Field(default=None, description="Train adapters; absent: every weight.")
    publish: PublishConfig = Field(
        default_factory=PublishConfig, description="How new versions reach the engines."
    )
    critic_model: str = Field(
        default="", description="Folder that the critic starts from; empty: the run's model."
    )
    critic_lr: float = Field(default=1e-5, ge=0, description="Peak learning rate of the critic.")
    reference_model: str = Field(
        default="", description="Folder of the frozen reference policy; empty: the run's model."
    )
    teacher_model: str = Field(
        default="",
        description="Folder of the teacher of distillation that the trainer holds (teacher: model).",
    )
    teacher_url: str = Field(
        default="", description="A SGLang server of the teacher of distillation (teacher: engine)."
    )
    teacher_timeout_s: float = Field(
        default=600.0, gt=0, description="Longest wait for the teacher's engine in one batch."
    )
    checkpoint_every: int = Field(default=20, ge=1, description="Batches between checkpoints.")
    async_checkpoints: bool = Field(
        default=True, description="Continue training while a checkpoint is written."
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="How many of the latest checkpoints are kept.")
    keep_best: int = Field(
        default=0, ge=0, description="How many more checkpoints are kept, those with the best best_metric."
    )
    best_metric: str = Field(
        default="",
        description="heldout, or a metric of metrics.jsonl, larger is better; empty: heldout if the run "
        "evaluates while it trains, else reward_mean.",
    )
    keep_weights: int = Field(default=2, ge=2, description="How many published weight folders are kept.")
    record_tokens: Literal["all", "none"] | Annotated[int, Field(ge=1)] = Field(
        default="all",
        description="Steps of which the run keeps the record of each trained token (advantage, ratio, clip, "
        "share of the loss; areal-agents why shows it): all, none, or a number of the newest.",
    )
    trackers: tuple[Tracker, ...] = Field(
        default=("tensorboard",), description="Where metrics go besides metrics.jsonl."
    )
    batch_timeout_s: float = Field(
        default=3600.0,
        gt=0,
        description="Longest wait for the groups of one batch before the run ends; "
        "before the first group, the longest time without any change in the store.",
    )

    @model_validator(mode="before")
    @classmethod
    def _adapters_alone(cls, data: Any) -> Any:
        """With `lora`, only adapters are published, unless another transport is named."""
        if not isinstance(data, Mapping) or data.get("lora") is None:
            return data
        publish = data.get("publish")
        if isinstance(publish, PublishConfig):
            publish = publish.model_dump(include=publish.model_fields_set)
        if publish is None or (isinstance(publish, Mapping) and "transport" not in publish):
            return {**data, "publish": {"transport": "lora", **(publish or {})}}
        return data

    @property
    def publishes_adapters(self) -> bool:
        """Whether engines get only the adapter of a version, and serve it beside the model's weights."""
        return self.publish.transport == "lora" or (
            self.publish.transport == "object_storage" and self.lora is not None
        )

    @model_validator(mode="after")
    def _check(self) -> TrainerConfig:
        shares = self.replicas * self.context_parallel
        if self.ranks % shares:
            raise ValueError(
                f"ranks must be a multiple of replicas × context_parallel, got {self.ranks} and "
                f"{self.replicas} × {self.context_parallel}"
            )
        if self.nodes and self.ranks % self.nodes:
            raise ValueError(f"ranks must be a multiple of nodes, got {self.ranks} on {self.nodes}")
        if self.nodes and self.node_rank is not None and self.node_rank >= self.nodes:
            raise ValueError(f"node_rank must be from 0 to {self.nodes - 1}, got {self.node_rank}")
        if isinstance(self.activation_checkpointing, int) and self.activation_checkpointing < 1:
            raise ValueError(
                "activation_checkpointing must be auto, off, full or a number of blocks of at least 1, got "
                f"{self.activation_checkpointing}"
            )
        if self.publish.transport == "lora" and self.lora is None:
            raise ValueError(
                "publish: transport: lora publishes adapters, but none are trained; set trainer.lora, or "
                "use transport: disk"
            )
        if self.publishes_adapters and self.publish.pause == "in_place":
            raise ValueError(
                "publish: pause: in_place would continue on another adapter's keys and values, which no "
                "engine supports; use retract, abort or drain"
            )
        if self.publish.backend == "nccl" and self.device == "cpu":
            raise ValueError("publish: backend: nccl needs a trainer on GPUs, got device: cpu; use gloo")
        if self.offload == "all" and self.reshard == "step":
            raise ValueError(
                "offload: all keeps one block at a time on a GPU, and reshard: step all of them; use "
                "reshard: block, or offload: optimizer"
            )
        if self.offload == "all" and self.optimizer == "muon":
            raise ValueError(
                "offload: all takes the optimizer's step on the CPU, where Muon's products of matrices are "
                "slow; use offload: optimizer, or optimizer: adamw"
            )
        if self.lora is not None and self.optimizer == "muon":
            raise ValueError(
                "lora trains two thin factors, which Muon's orthogonal updates are not meant for; "
                "use optimizer: adamw"
            )
        return self
