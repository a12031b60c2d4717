"""What may be set about the proxy: who may call, how much, and how episodes are drawn and closed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PinnedField = Literal[
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed"
]


class ProxyConfig(BaseModel):
    """Settings of the proxy process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=0, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    public_url: str | None = Field(
        default=None, description="URL under which agents reach the proxy; by default as the caller did."
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

    max_body_mb: float = Field(default=32.0, gt=0, description="Largest request body, in MiB.")
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
        description="Split of implicit episodes: eval draws as the agent asks, train pins the sampling.",
    )
