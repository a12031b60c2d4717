"""The inputs of the estimate: for each its value, its unit, and whether it was measured or assumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from areal_agents.config import with_overrides
from areal_agents.simulate import hardware
from areal_agents.simulate.parameters import Distribution

# measured: here, docs/benchmarks.md has the command. published: by others. assumed: neither. code: a constant
# of this project. chosen: a setting of the run.
Kind = Literal["chosen", "measured", "published", "code", "assumed"]


def _input(default: Any, what: str, kind: Kind, source: str = "", **bounds: Any) -> Any:
    """A field of an input; its type is that of `default`."""
    return Field(
        default=default, description=what, json_schema_extra={"kind": kind, "from": source}, **bounds
    )


_DATASHEET = "NVIDIA's data sheet of the H100 SXM"
_PROXY = "`python -m benchmarks proxy`"
_QWEN = "the model's config.json"
_BENCH_STORE = "`python -m benchmarks store --url …`"
_HARDWARE = "nine measurements of others, in areal_agents/simulate/hardware.py"
_GPUSTACK = "GPUStack's performance lab"
_TORCHTITAN = "torchtitan, figures of December 2024"


class ModelInputs(BaseModel):
    """A dense decoder with gated feed-forward layers; embedding and head are two matrices."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = _input("Qwen3-8B", "Name, for the heading.", "chosen")
    layers: int = _input(36, "Layers.", "published", _QWEN, ge=1)
    hidden: int = _input(4096, "Width.", "published", _QWEN, ge=1)
    intermediate: int = _input(12288, "Width of a feed-forward layer.", "published", _QWEN, ge=1)
    heads: int = _input(32, "Heads.", "published", _QWEN, ge=1)
    kv_heads: int = _input(8, "Heads of keys and values.", "published", _QWEN, ge=1)
    head_dim: int = _input(128, "Width of a head.", "published", _QWEN, ge=1)
    vocab: int = _input(151_936, "Vocabulary.", "published", _QWEN, ge=1)
    gpus_per_engine: int = _input(1, "GPUs of an engine (tensor parallel).", "chosen", ge=1)
    trainer_gib: float = _input(
        24.1, "GiB on each GPU of the trainer that more ranks do not make less.", "code",
        "docs/gpus.md, less 16 bytes for each weight", ge=0,
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        if given not in MODELS:
            raise ValueError(f"expected one of {', '.join(MODELS)}, or the sizes of a model, got {given!r}")
        return MODELS[given]


MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {},
    "Qwen3-32B": {
        "name": "Qwen3-32B", "layers": 64, "hidden": 5120, "intermediate": 25600, "heads": 64,
        "gpus_per_engine": 4, "trainer_gib": 47.3,
    },
}  # fmt: skip


class ScalingInputs(BaseModel):
    """What the estimate begins with. Each field has its kind and its source in the schema."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: tuple[int, ...] = _input(
        (8, 64, 512, 1000), "Sizes of the cluster, in GPUs.", "chosen", min_length=1
    )
    model: ModelInputs = ModelInputs()

    # the run
    turns: int = _input(16, "Model calls of an episode.", "chosen", ge=1)
    tokens: Distribution = _input(
        Distribution(mean=500, sigma=1.0, cap=8192), "Sampled tokens of a call (log-normal).", "chosen"
    )
    first_prompt_tokens: int = _input(2000, "Prompt of the first call.", "chosen", ge=1)
    new_prompt_tokens: int = _input(500, "New prompt tokens of each later call.", "chosen", ge=0)
    tool_s: Distribution = _input(
        Distribution(mean=3.0, sigma=1.0, cap=60.0), "Seconds between two calls (log-normal).", "chosen"
    )
    group_size: int = _input(16, "`rollout.group_size`.", "chosen", ge=2)
    groups_per_gpu: float = _input(1.0, "Groups in a batch for each GPU,", "chosen", gt=0)
    most_groups: int = _input(512, "and at most so many.", "chosen", ge=1)
    max_staleness: int = _input(4, "`rollout.max_staleness`, η.", "chosen", ge=0)
    microbatch_tokens: int = _input(32_768, "Tokens of a micro-batch of a rank.", "chosen", ge=1)
    lora_rank: int = _input(32, "Rank of an adapter, where adapters are published.", "chosen", ge=1)

    # the machines
    gpu_flops: float = _input(
        hardware.H100.flops, "FLOP/s of a GPU in bfloat16.", "published", _DATASHEET, gt=0
    )
    gpu_bandwidth: float = _input(
        hardware.H100.bandwidth, "Bytes/s of its memory.", "published", _DATASHEET, gt=0
    )
    gpu_gib: float = _input(79.6, "GiB of its memory.", "published", "what nvidia-smi shows of it", gt=0)
    nvlink: float = _input(450e9, "Bytes/s between GPUs of a node, each way.", "published", _DATASHEET, gt=0)
    network: float = _input(
        50e9, "Bytes/s of a GPU to other nodes (400 Gb/s).", "published", _TORCHTITAN, gt=0
    )
    gpus_per_node: int = _input(8, "GPUs of a node.", "published", _TORCHTITAN, ge=1)
    network_share: float = _input(0.8, "Share of it that large transfers reach.", "assumed", gt=0, le=1)
    decode_share: float = _input(
        hardware.BANDWIDTH_USE, "Share of the memory's bandwidth that decoding reaches.", "published",
        _HARDWARE, gt=0, le=1,
    )  # fmt: skip
    decode_s: float = _input(
        hardware.STEP_S, "Seconds of a decoding step besides what it reads.", "published", _HARDWARE, ge=0
    )
    request_s: float = _input(hardware.REQUEST_S, "… for each running request.", "published", _HARDWARE, ge=0)
    prefill_share: float = _input(
        0.33, "Share of the FLOP/s that reading prompts reaches.", "published",
        f"{_GPUSTACK}: 8,299 tokens/s of Qwen3-14B on prompts of 32,000", gt=0, le=1,
    )  # fmt: skip
    trainer_share: float = _input(
        0.33, "Share of the FLOP/s that training reaches, recomputation not counted.", "published",
        f"{_TORCHTITAN}: FSDP without compilation, 8 GPUs", gt=0, le=1,
    )  # fmt: skip
    cache_share: float = _input(
        0.85, "Share of an engine's memory for weights, keys and values.", "assumed", gt=0, le=1
    )
    files_write: float = _input(2e9, "Bytes/s that one process writes to the shared files.", "assumed", gt=0)
    files_read: float = _input(40e9, "Bytes/s that all engines together read from them.", "assumed", gt=0)
    database_cores: int = _input(16, "Cores of PostgreSQL's machine.", "assumed", ge=1)
    gpu_hour: float = _input(hardware.H100.dollars, "US dollars for one GPU for an hour.", "assumed", ge=0)

    # the proxy
    call_ms: float = _input(
        1.35, "Processor time of a call, without its tokens.", "measured",
        f"{_PROXY}: 2.04 ms at 4k with 300 sampled, less the next two", ge=0,
    )  # fmt: skip
    call_ms_per_1k_prompt: float = _input(
        0.029, "… for 1,000 tokens of its prompt.", "measured",
        f"{_PROXY}: 3.07 ms with 36k, 2.07 with 1.5k", ge=0,
    )  # fmt: skip
    call_ms_per_1k_sampled: float = _input(
        1.9, "… for 1,000 sampled tokens.", "measured", f"{_PROXY}: 4.19 ms at 32k with 1,000 sampled", ge=0
    )
    proxy_share: float = _input(0.6, "Share of a core that a proxy may use.", "assumed", gt=0, le=1)
    proxy_mb: float = _input(267, "Memory of an idle proxy, MB.", "measured", f"{_PROXY}: 390 less 123", ge=0)
    episode_mb: float = _input(
        0.25, "Memory of an open episode in a proxy, MB.", "measured", f"{_PROXY}: 123 of 500 episodes", ge=0
    )
    check_s: float = _input(
        1.0, "Seconds between two health checks of an engine by a proxy.", "code",
        "areal_agents/inference/pool/limits.py", gt=0,
    )  # fmt: skip
    check_ms: float = _input(1.0, "Processor time of a health check in the proxy.", "assumed", ge=0)
    look_s: float = _input(
        1.0, "Seconds between two reads of the engines' addresses by a proxy.", "code",
        "areal_agents/inference/pool/addresses.py", gt=0,
    )  # fmt: skip
    address_us: float = _input(5.0, "Processor time of an address in such a read.", "assumed", ge=0)
    most_proxies: int = _input(
        64, "Largest `cluster.proxies`.", "code", "areal_agents/cluster/config.py", ge=1
    )
    most_engines: int = _input(
        256, "Largest `engine.replicas`.", "code", "areal_agents/inference/config.py", ge=1
    )
    episodes_per_rollout: int = _input(1000, "Episodes that one rollout process runs.", "assumed", ge=1)
    most_rollouts: int = _input(
        1024, "Largest `cluster.rollouts`.", "code", "areal_agents/cluster/config.py", ge=1
    )

    # the store
    turn_ms: float = _input(
        0.21, "Time in which a turn that one process writes excludes all others.", "measured",
        f"{_BENCH_STORE}: 3,443 turns/s by 4 processes (mean of three), 4,347 by 1", ge=0,
    )  # fmt: skip
    turn_overhead_bytes: float = _input(
        600, "Bytes of a row of `turns` besides tokens and text.", "assumed", ge=0
    )
    text_per_token: float = _input(4.0, "Bytes of text for each token.", "assumed", ge=0)
    beat_s: float = _input(
        2.0, "Seconds between two heartbeats of a process.", "code", "areal_agents/store/roles.py", gt=0
    )
    connections: int = _input(
        3, "Connections of a process: for writes, notifications and reads.", "code",
        "areal_agents/store/postgres.py", ge=1,
    )  # fmt: skip
    max_connections: int = _input(
        100, "`max_connections` of PostgreSQL.", "published", "PostgreSQL's default", ge=1
    )
    read_ms: float = _input(0.1, "Processor time of a small read in the database.", "assumed", ge=0)
    row_us: float = _input(1.0, "… for each row of it.", "assumed", ge=0)
    notification_us: float = _input(
        11.0,
        "… of a notification of a commit to one process.",
        "measured",
        "python -m benchmarks listeners: docs/async.md",
        ge=0,
    )
    beat_ms: float = _input(
        0.15, "… of a heartbeat.", "measured", "python -m benchmarks listeners: docs/async.md", ge=0
    )

    # the weights
    bucket_bytes: float = _input(
        1e9, "Bytes of a bucket of weights.", "code", "docs/training.md: `bucket_mb`", gt=0
    )
    control_calls: int = _input(
        5, "Calls to an engine for a version, besides its buckets.", "code",
        "areal_agents/training/publish/piecewise.py", ge=1,
    )  # fmt: skip
    control_ms: float = _input(1.0, "Processor time of such a call in the trainer.", "assumed", ge=0)
    density: float = _input(
        0.01, "Share of the weights that a step changes in bfloat16.", "published",
        "Understanding and Exploiting Weight Update Sparsity: over 99% stay", gt=0, le=1,
    )  # fmt: skip
    sync_share: float = _input(0.1, "Share of a step that publishing may take.", "assumed", gt=0, le=1)


@dataclass(frozen=True, slots=True)
class Input:
    """An input for the table: its key, its value as it is given on the command line, and where it is from."""

    key: str
    value: Any
    what: str
    kind: Kind
    source: str


def listed(inputs: ScalingInputs) -> Iterator[Input]:
    """Yield every input. One that was changed is no longer measured or published, but chosen."""
    name = inputs.model.name
    known = ModelInputs.model_validate(name) if name in MODELS else ModelInputs()
    yield from _listed(inputs.model, known, "model.")
    yield from _listed(inputs, ScalingInputs(), "")


def _listed(values: BaseModel, defaults: BaseModel, prefix: str) -> Iterator[Input]:
    for key, field in type(values).model_fields.items():
        extra = field.json_schema_extra
        if not isinstance(extra, dict):
            continue  # the model, which has inputs of its own
        value = getattr(values, key)
        is_given = value == getattr(defaults, key)
        kind: Any = extra["kind"] if is_given else "chosen"
        source = str(extra["from"]) if is_given else ""
        yield Input(f"{prefix}{key}", value, field.description or "", kind, source)


def read_inputs(overrides: Iterable[str], *, gpus: int | None = None) -> ScalingInputs:
    """Return the inputs with `key=value` overrides. Raises ConfigError for an invalid one.

    Args:
        gpus: the only size to estimate; None: those of the inputs.
    """
    return with_overrides(ScalingInputs, {} if gpus is None else {"gpus": [gpus]}, overrides)
