"""Settings of the proxy: who may call it, its limits, and how episodes are sampled and closed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

PinnedField = Literal[
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed"
]


class Upstream(BaseModel):
    """Another server with an API of its own: a judge, a simulated user, embeddings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str = Field(description="For example https://host/v1.", pattern=r"^https?://")
    key: str | None = Field(default=None, description="Its API key.")
    model: str | None = Field(default=None, description="Its name of the model, if it is another one.")


class ProxyConfig(BaseModel):
    """Settings of the proxy process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("admin_key", "project_keys")
    @classmethod
    def _keys_are_keys(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for key in (value,) if isinstance(value, str) else value or ():
            if not key or key.startswith("ep-"):
                raise ValueError("a key must be a non-empty string that does not begin with ep-")
        return value

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=0, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    public_url: str | None = Field(
        default=None,
        description="URL under which agents reach the proxy, in the base_url of each episode; by default the "
        "address that the caller connected to.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Further host names that a Host or Origin header may have. Without an admin key, only "
        "these, loopback, `host` and the host of `public_url` are served.",
    )
    admin_key: str | None = Field(
        default=None, min_length=1, description="Key of the control API; may be absent on loopback only."
    )
    project_keys: tuple[str, ...] = Field(
        default=(), description="Keys that may call the model without an episode: they open implicit ones."
    )

    family: str = Field(
        default="auto", description="Chat template family; auto reads the model's config.json."
    )
    template_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the template, for example {enable_thinking: false}."
    )

    special_tokens_in_content: Literal["text", "parse"] = Field(
        default="text",
        description="How special tokens that messages and tools spell out are encoded: 'text', as their "
        "characters; 'parse', as the special tokens, like plain servers, so that web pages can forge turns.",
    )

    max_body_mb: float = Field(default=32.0, gt=0, description="Largest request body, in MiB.")
    max_json_values: int = Field(
        default=250_000,
        ge=1,
        description="Most JSON values in a request body: numbers, strings, names, objects and arrays.",
    )
    max_messages: int = Field(default=4096, ge=1, description="Most messages in one request.")
    max_concurrent: int = Field(default=256, ge=1, description="Model calls in the engine at a time.")
    max_queued: int = Field(default=4096, ge=0, description="Model calls that wait for their turn; then 429.")
    generate_timeout_s: float = Field(default=600.0, gt=0, description="Longest wait for one completion.")
    context_length: int | None = Field(
        default=None,
        ge=2,
        description="Most tokens of a prompt with its completion; by default the engine's.",
    )
    default_max_tokens: int | None = Field(
        default=None, ge=1, description="Completion limit where the agent names none; by default what fits."
    )

    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens of one completion; a request for more is refused."
    )
    keepalive_s: float = Field(
        default=10.0, gt=0, description="A stream that has nothing to say sends a comment this often."
    )
    durability: Literal["turn", "batched"] = Field(
        default="turn",
        description="'turn': a turn is in the store before its reply leaves; 'batched': within 50 ms.",
    )
    reasoning: Literal["template", "keep"] = Field(
        default="template",
        description="'template': earlier reasoning is shown as the chat template does; 'keep': it stays.",
    )
    models: dict[str, Upstream] = Field(
        default_factory=dict,
        description="Model names that other servers answer: passed through, counted, never trained.",
    )

    log_format: Literal["text", "json"] = Field(
        default="text", description="Form of the log on standard error: text, or one JSON object per line."
    )
    log_calls: bool = Field(default=False, description="Log every model call: its numbers, not its texts.")

    routed_experts: bool = Field(
        default=False,
        description="Record which experts the engine sends each token through; a run sets it from "
        "engine.routed_experts.",
    )

    group_size: int = Field(default=16, ge=1, description="Places of a group that is opened without a size.")
    lifted_pins: tuple[PinnedField, ...] = Field(
        default=(),
        description="Parameters that agents may set in training episodes too; such turns are not trained.",
    )
    truncated_reward: float = Field(
        default=0.0, allow_inf_nan=False, description="Reward of a truncated episode that got none."
    )
    reward_timeout_s: float = Field(
        default=600.0, gt=0, description="A finished episode of a group without a reward fails after this."
    )
    idle_timeout_s: float = Field(
        default=3600.0, gt=0, description="An open episode fails after so long without a call."
    )
    implicit_idle_s: float = Field(
        default=600.0, gt=0, description="An implicit episode is finished after so long without a call."
    )
    implicit_split: Literal["train", "eval"] = Field(
        default="eval",
        description="Split of implicit episodes: eval grants what the agent requests, train pins sampling.",
    )
