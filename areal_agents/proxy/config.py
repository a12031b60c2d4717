"""Settings of the proxy: who may call it, its limits, and how episodes are sampled and closed."""

from __future__ import annotations

import math
import os
from typing import Any, Literal

from pydantic import Field, field_validator

from areal_agents.core.settings import Settings
from areal_agents.inference.config import SGLANG_SEQUENCES
from areal_agents.proxy.redaction_patterns import KNOWN_PATTERNS
from areal_agents.proxy.volatile import KNOWN_RULES, VolatileRule

PinnedField = Literal[
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed"
]


MOST_WORKERS = 256
FEWEST_CALLS = 256  # the least automatic value of `max_concurrent`
SEQUENCES_PER_WORKER = 512
CORES_PER_WORKER = 4


class Upstream(Settings):
    """Another server with an API of its own: a judge, a simulated user, embeddings."""

    base_url: str = Field(
        description="Base URL of the server, for example https://host/v1.", pattern=r"^https?://"
    )
    key: str | None = Field(default=None, description="API key for the server.")
    model: str | None = Field(
        default=None, description="Model name to send to that server; by default the name that agents use."
    )


class ProxyConfig(Settings):
    """Settings of the proxy process."""

    @field_validator("admin_key", "project_keys")
    @classmethod
    def _check_keys(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for key in (value,) if isinstance(value, str) else value or ():
            if not key or key.startswith("ep-"):
                raise ValueError("a key must be a non-empty string that does not begin with ep-")
        return value

    @field_validator("volatile", mode="before")
    @classmethod
    def _read_off(cls, given: Any) -> Any:
        """YAML reads a bare `off` as false."""
        return {k: "off" if v is False else v for k, v in given.items()} if isinstance(given, dict) else given

    @field_validator("workers", "max_concurrent", mode="before")
    @classmethod
    def _automatic(cls, given: Any) -> Any:
        return 0 if given == "auto" else given

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=0, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    public_url: str | None = Field(
        default=None,
        description="URL under which agents reach the proxy, in the base_url of each episode; by default the "
        "address that the caller connected to.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Additional host names to accept in Host and Origin headers. Without an admin key, only "
        "these, loopback, `host` and the host of `public_url` are accepted.",
    )
    admin_key: str | None = Field(
        default=None, min_length=1, description="Key of the control API; may be absent on loopback only."
    )
    project_keys: tuple[str, ...] = Field(
        default=(),
        description="Keys that may call the model without an episode; such calls open implicit episodes.",
    )

    family: str = Field(
        default="auto", description="Chat template family; auto reads the model's config.json."
    )
    template_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the template, for example {enable_thinking: false}."
    )

    special_tokens_in_content: Literal["text", "parse"] = Field(
        default="text",
        description="How the text of a special token in messages and tools is encoded: 'text', as ordinary "
        "characters; 'parse', as the special token, as plain servers do, which lets web pages forge turns.",
    )

    max_body_mb: float = Field(default=32.0, gt=0, description="Maximum size of a request body, in MiB.")
    max_json_values: int = Field(
        default=250_000,
        ge=1,
        description="Maximum number of JSON values in a request body: numbers, strings, names, objects and "
        "arrays.",
    )
    max_messages: int = Field(default=4096, ge=1, description="Maximum number of messages in one request.")
    workers: int = Field(
        default=0,
        ge=0,
        le=MOST_WORKERS,
        description="Proxy processes; they share one store and one port. 0 or auto: one for every "
        f"{SEQUENCES_PER_WORKER} sequences that the engines sample at the same time (engines × slots; "
        f"{SGLANG_SEQUENCES} slots for SGLang without --max-running-requests), and at most one for every "
        f"{CORES_PER_WORKER} cores.",
    )
    max_concurrent: int = Field(
        default=0,
        ge=0,
        description="Maximum number of model calls in the engines at a time, over all workers. 0 or auto: "
        f"twice engines × slots, at least {FEWEST_CALLS}.",
    )
    max_queued: int = Field(
        default=4096, ge=0, description="Maximum number of queued model calls; further calls get 429."
    )
    generate_timeout_s: float = Field(default=600.0, gt=0, description="Timeout of one completion.")
    context_length: int | None = Field(
        default=None,
        ge=2,
        description="Maximum tokens of a prompt with its completion; by default the engine's limit.",
    )
    default_max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Completion limit if the request sets none; by default as many tokens as fit.",
    )

    max_completion_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of tokens of one completion; requests for more are refused.",
    )
    keepalive_s: float = Field(
        default=10.0,
        gt=0,
        description="Interval of the keep-alive comments on a stream that has no data to send.",
    )
    durability: Literal["turn", "batched"] = Field(
        default="turn",
        description="When a turn is written to the store: 'turn', before its reply is sent; 'batched', at "
        "most 50 ms after it is complete.",
    )
    reasoning: Literal["template", "keep"] = Field(
        default="template",
        description="Reasoning of earlier turns in a prompt: 'template', as the chat template shows it; "
        "'keep', always included.",
    )
    volatile: dict[str, VolatileRule | Literal["off"]] = Field(
        default_factory=dict,
        description="Rules for text that a client changes from call to call, by a name of your choice: "
        "conversations are compared without it, and the model reads it as it was first recorded. Rules on by "
        f"default, which `off` under their name switches off: {', '.join(KNOWN_RULES)}.",
    )
    redact: dict[str, str] = Field(
        default_factory=dict,
        description="Text that is replaced by [NAME] before the model reads it and before it is stored: "
        "regular expressions by a name of your choice, or `default` under the name of a known one: "
        f"{', '.join(KNOWN_PATTERNS)}. docs/serve-and-train.md.",
    )
    models: dict[str, Upstream] = Field(
        default_factory=dict,
        description="Models of other servers, by the name that agents use; their calls are passed through, "
        "counted, and never trained on.",
    )

    log_format: Literal["text", "json"] = Field(
        default="text", description="Format of the log on standard error: text, or one JSON object per line."
    )
    log_calls: bool = Field(default=False, description="Log every model call, without its messages.")

    routed_experts: bool = Field(
        default=False,
        description="Record which experts the engine sends each token through; a run sets it from "
        "engine.routed_experts.",
    )

    group_size: int = Field(default=16, ge=1, description="Size of a group that is opened without one.")
    lifted_pins: tuple[PinnedField, ...] = Field(
        default=(),
        description="Sampling parameters that agents may set in training episodes too; turns sampled with "
        "them are not trained on.",
    )
    truncated_reward: float = Field(
        default=0.0, allow_inf_nan=False, description="Reward of a truncated episode that received no reward."
    )
    reward_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Time after which a finished episode of a group fails if it has no reward, counted from "
        "when no other episode of its group is open.",
    )
    idle_timeout_s: float = Field(
        default=3600.0, gt=0, description="Time without a call after which an open episode fails."
    )
    implicit_idle_s: float = Field(
        default=600.0, gt=0, description="Time without a call after which an implicit episode is finished."
    )
    implicit_split: Literal["train", "eval"] = Field(
        default="eval",
        description="Split of implicit episodes: eval uses the sampling parameters of the request, train "
        "pins them.",
    )
    implicit_groups: bool = Field(
        default=False,
        description="Each implicit episode is a group of one, which a trainer can lease once it has ended "
        "and has a reward; a run with data.traffic sets it.",
    )
    canary_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the episodes that the last engines serve, with the candidate version; 0: there "
        "is no canary. A run sets it from rollout.canary.",
    )

    @property
    def max_body_bytes(self) -> int:
        """The value of `max_body_mb`, in bytes."""
        return int(self.max_body_mb * 2**20)

    def for_engines(self, sequences: int, *, is_alone: bool = True) -> ProxyConfig:
        """Return these settings with values for what is automatic.

        Args:
            sequences: the number of sequences that all engines together sample at the same time.
            is_alone: whether this is the only proxy of its run; if not, it is one process.
        """
        workers = min(math.ceil(sequences / SEQUENCES_PER_WORKER), available_cores() // CORES_PER_WORKER)
        workers = workers if is_alone else 1
        return self.model_copy(
            update={
                "workers": self.workers or min(max(1, workers), MOST_WORKERS),
                "max_concurrent": self.max_concurrent or max(FEWEST_CALLS, 2 * sequences),
            }
        )


def shared_among(count: int, config: ProxyConfig) -> ProxyConfig:
    """Return the settings of one of `count` processes, with its share of the limits of all of them."""
    return config.model_copy(
        update={
            "max_concurrent": math.ceil(config.max_concurrent / count),
            "max_queued": math.ceil(config.max_queued / count),
        }
    )


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # Linux only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
